"""Rules of pointwise ops: every op of the table runs on shards; linearity is as listed."""

import itertools

import pytest
import torch

from monoflow.sbp.oracle import describe, missing_signatures, prove
from monoflow.sbp.rules.pointwise import RULES
from tests.null.rule_trial import holds, integers, proven, values

aten = torch.ops.aten
SHAPE = (5, 3)


def _units(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values within (0, 1): inside the domain of every function of the table."""
    return torch.sigmoid(values(*SHAPE, seed=seed)).to(dtype)


def _arguments(op, kind: str) -> tuple[list, dict]:
    """Arguments for every parameter without a default, by its type."""
    args, kwargs = [], {}
    for position, one in enumerate(op._schema.arguments):
        tensor = {
            "float": lambda p=position: _units(p),
            "int": lambda p=position: integers(3, *SHAPE, seed=p) + 1,
            "bool": lambda p=position: integers(2, *SHAPE, seed=p).bool(),
            "mask first": lambda p=position: integers(2, *SHAPE, seed=p).bool() if p == 0 else _units(p),
            "mask second": lambda p=position: integers(2, *SHAPE, seed=p).bool() if p == 1 else _units(p),
        }[kind]
        made = {
            "Tensor": tensor,
            "Tensor[]": lambda: [_units(0)],
            "number": lambda: 2 if kind in ("int", "bool") else 0.5,
            "float": lambda: 0.5,
            "int": lambda: 1,
            "bool": lambda: False,
            "str": lambda: "none",
        }
        kind_of = str(one.type)
        if one.name == "rounding_mode":
            value = "floor"
        elif one.name == "value" and kind_of == "Tensor":
            value = _units(position)[0, 0]
        elif one.has_default_value() and one.name not in ("min", "max"):
            continue
        else:
            value = made.get(kind_of.removeprefix("Optional[").removesuffix("]"), made["Tensor"])()
        if one.kwarg_only:
            kwargs[one.name] = value
        else:
            args.append(value)
    return args, kwargs


def _runnable(op) -> tuple[list, dict]:
    for kind in ("float", "int", "bool", "mask first", "mask second"):
        args, kwargs = _arguments(op, kind)
        try:
            op(*args, **kwargs)
        except (RuntimeError, TypeError):
            continue
        return args, kwargs
    raise AssertionError(f"no arguments found for {op._schema}")


@pytest.mark.parametrize("op", [op for op in RULES if "glu" not in str(op) or "gelu" in str(op)], ids=str)
def test_every_op_splits_every_dim(op):
    args, kwargs = _runnable(op)
    found = proven(RULES[op], op, *args, axis_sizes=(2, 3), nd=False, **kwargs)
    call = describe(op, args, kwargs)
    for split in ("S(0)", "S(1)"):
        inputs, outputs = (
            ", ".join(split if meta and meta.shape else "B" for meta in metas)
            for metas in (call.inputs, call.outputs)
        )
        holds(found, f"{inputs} -> {outputs}")


def test_every_op_that_torch_marks_pointwise_is_listed():
    names = [one for one in torch._C._dispatch_get_all_op_names() if one.startswith("aten::")]
    left_out = {"equal", "rrelu", "float_power", "clip", "true_divide", "relu6"}  # a bool, random, composite
    for name in names:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if packet in left_out or overload.endswith("out"):
            continue
        op = getattr(getattr(aten, packet), overload or "default")
        if torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
            assert op in RULES, name


LINEAR = [
    (aten.add.Tensor, {"P(sum), P(sum) -> P(sum)"}),
    (aten.sub.Tensor, {"P(sum), P(sum) -> P(sum)"}),
    (aten.mul.Tensor, {"P(sum), B -> P(sum)", "B, P(sum) -> P(sum)"}),
    (aten.div.Tensor, {"P(sum), B -> P(sum)"}),
    (aten.maximum.default, set()),
    (aten.pow.Tensor_Tensor, set()),
    (aten.lt.Tensor, set()),
    (aten.gelu_backward.default, {"P(sum), B -> P(sum)"}),
    (aten.tanh_backward.default, {"P(sum), B -> P(sum)"}),
    (aten.sigmoid_backward.default, {"P(sum), B -> P(sum)"}),
    (aten.silu_backward.default, {"P(sum), B -> P(sum)"}),
    (aten.addcmul.default, {"P(sum), P(sum), B -> P(sum)", "P(sum), B, P(sum) -> P(sum)"}),
    (aten.addcdiv.default, {"P(sum), P(sum), B -> P(sum)"}),
    (aten.lerp.Tensor, {"P(sum), P(sum), B -> P(sum)"}),
]


@pytest.mark.parametrize(("op", "partials"), LINEAR, ids=lambda x: str(x) if callable(x) else "")
def test_partials_go_where_the_op_is_linear_and_nowhere_else(op, partials):
    args = [
        values(*SHAPE, seed=i) + 2 for i in range(sum("Tensor" in str(a.type) for a in op._schema.arguments))
    ]
    found = proven(RULES[op], op, *args)
    assert {one for one in found if "P" in one} == partials
    # A truth value is the "sum" of equal ones: true, and of no use.
    assert op is aten.lt.Tensor or missing_signatures(op, args, {}, RULES[op], 2) == []


@pytest.mark.parametrize(
    ("op", "args", "linear"),
    [
        (aten.add.Tensor, (values(4, 3), 2.0), False),
        (aten.mul.Tensor, (values(4, 3), 2.0), True),
        (aten.div.Tensor, (values(4, 3), 2.0), True),
        (aten.add.Scalar, (values(4, 3), 2.0), False),
        (aten.mul.Scalar, (values(4, 3), 2.0), True),
        (aten.neg.default, (values(4, 3),), True),
        (aten.clone.default, (values(4, 3),), True),
        (aten.masked_fill.Scalar, (values(4, 3), integers(2, 4, 3).bool(), 0), True),
        (aten.masked_fill.Scalar, (values(4, 3), integers(2, 4, 3).bool(), 1.0), False),
        (aten.native_dropout_backward.default, (values(4, 3), integers(2, 4, 3).bool(), 2.0), True),
        (aten.threshold_backward.default, (values(4, 3), values(4, 3, seed=1), 0), True),
        (aten.div.Tensor_mode, (values(4, 3), values(4, 3, seed=1)), True),
    ],
    ids=str,
)
def test_linearity_depends_on_the_arguments(op, args, linear):
    if op is aten.div.Tensor_mode:
        found = proven(RULES[op], op, *args, rounding_mode=None)
    else:
        found = proven(RULES[op], op, *args)
    assert any(one.startswith("P(sum)") for one in found) == linear


def test_alpha_keeps_add_linear():
    found = proven(RULES[aten.add.Tensor], aten.add.Tensor, values(4, 3), values(4, 3, seed=1), alpha=-3.0)
    holds(found, "P(sum), P(sum) -> P(sum)")


@pytest.mark.parametrize(
    ("source", "target", "linear"),
    [
        (torch.float32, torch.float64, True),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
        (torch.int64, torch.float32, True),
        (torch.int64, torch.int32, False),
        (torch.float32, torch.int64, False),
        (torch.float32, torch.bool, False),
        (torch.bool, torch.float32, False),
    ],
)
def test_sums_go_through_widening_casts_only(source, target, linear):
    op = aten._to_copy.default
    x = (values(5, 3) * 4).to(source)
    signatures = RULES[op].signatures(describe(op, (x,), {"dtype": target}), 2, [()])
    assert [str(one) for one in signatures] == ["S(0) -> S(0)", "S(1) -> S(1)"] + [
        "P(sum) -> P(sum)"
    ] * linear
    for signature in signatures[:2]:
        prove(op, (x,), {"dtype": target}, signature, 3)
    if linear:  # of small integers: the sum's own rounding, before or after the cast, is not in question
        parts = [integers(9, 5, 3, seed=i).to(source) for i in range(3)]
        cast = torch.stack(parts).to(target).sum(0)
        assert torch.equal(cast, torch.stack(parts).sum(0).to(target))


def test_where_is_linear_in_its_branches():
    op = aten.where.self
    args = (integers(2, 5, 3).bool(), values(5, 3), values(3, seed=1))
    assert proven(RULES[op], op, *args) == {
        "S(0), S(0), B -> S(0)",
        "S(1), S(1), S(0) -> S(1)",
        "B, P(sum), P(sum) -> P(sum)",
    }


def test_copy_takes_its_layout_from_the_source():
    op = aten.copy.default
    found = proven(RULES[op], op, values(5, 3), values(3, seed=1))
    assert found == {"S(0), B -> S(0)", "S(1), S(0) -> S(1)", "B, P(sum) -> P(sum)"}


@pytest.mark.parametrize(
    "shapes", list(itertools.permutations([(4, 1, 3), (1, 3), (), (4, 6, 1)], 2)), ids=str
)
def test_broadcast_dims_are_not_split_where_they_are_missing(shapes):
    op = aten.mul.Tensor
    args = [values(*shape, seed=i) for i, shape in enumerate(shapes)]
    proven(RULES[op], op, *args)
    assert missing_signatures(op, args, {}, RULES[op], 2) == []


def test_broadcasting_with_two_splits():
    op = aten.add.Tensor
    found = proven(RULES[op], op, values(4, 1, 3), values(6, 1))
    assert found == {
        "S(0), B -> S(0)", "B, S(0) -> S(1)", "S(2), B -> S(2)", "P(sum), P(sum) -> P(sum)",
    }  # fmt: skip


@pytest.mark.parametrize("size", [4, 8, 6])
def test_glu_splits_within_its_halves(size):
    x, grad = values(3, size), values(3, size // 2, seed=1)
    forward = proven(RULES[aten.glu.default], aten.glu.default, x, 1)
    backward = proven(RULES[aten.glu_backward.default], aten.glu_backward.default, grad, x, -1)
    holds(forward, "S(0) -> S(0)")
    holds(backward, "S(0), S(0) -> S(0)", "P(sum), B -> P(sum)")
    assert ("S(1,2) -> S(1)" in forward) == ("S(1), S(1,2) -> S(1,2)" in backward) == (size % 4 == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_floats(dtype):
    op = aten.add.Tensor
    proven(RULES[op], op, values(5, 3, dtype=dtype), values(5, 3, seed=1, dtype=dtype))


def test_linear_in_a_size_or_a_mantissa():
    op = aten.polar.default
    holds(proven(RULES[op], op, values(5, 3).abs(), values(5, 3, seed=1)), "P(sum), B -> P(sum)")
    op = aten.ldexp.Tensor
    found = proven(RULES[op], op, values(5, 3), torch.arange(3))
    assert found == {"S(0), B -> S(0)", "S(1), S(0) -> S(1)", "P(sum), B -> P(sum)"}
