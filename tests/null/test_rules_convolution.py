"""Rules of convolutions."""

import itertools
from dataclasses import replace

import pytest
import torch

from monoflow.sbp.layout import S
from monoflow.sbp.oracle import WrongRule, describe, missing_signatures, prove_nd
from monoflow.sbp.rules.convolution import RULES, empty_convolution_backward
from tests.null.rule_trial import holds, proven, values

aten = torch.ops.aten
CONV, BACKWARD = aten.convolution.default, aten.convolution_backward.default


def _case(inner, outer, groups=1, transposed=False, bias=True, spatial=(5,), samples=3, dtype=torch.float64):
    """Arguments of a convolution with kernel 3, stride 2 and padding 1 (kernel 2 along a second dim)."""
    rank = len(spatial)
    channels = (inner, outer // groups) if transposed else (outer, inner // groups)
    x = values(samples, inner, *spatial, dtype=dtype)
    weight = values(*channels, *(3, 2)[:rank], seed=1, dtype=dtype)
    b = values(outer, seed=2, dtype=dtype) if bias else None
    return x, weight, b, [2] * rank, [1] * rank, [1] * rank, transposed, [0] * rank, groups


def _backward(case, mask):
    x, weight, bias, *rest = case
    out = CONV(*case)
    grad = values(*out.shape, seed=3, dtype=x.dtype)
    sizes = None if bias is None else [len(bias)]
    return grad, x, weight, sizes, *rest, list(mask)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spatial", [(5,), (4, 3)])
@pytest.mark.parametrize(("inner", "outer"), [(4, 6), (3, 1), (5, 7)])
def test_convolution(inner, outer, spatial, bias, transposed):
    case = _case(inner, outer, transposed=transposed, bias=bias, spatial=spatial)
    found = proven(RULES[CONV], CONV, *case)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)

    def tail(text):
        return f", {text}" if bias else ""

    assert found == {
        f"S(0), B{tail('B')} -> S(0)",
        f"B, S({out_dim}){tail('S(0)')} -> S(1)",
        f"S(1), S({in_dim}){tail('P(sum)')} -> P(sum)",
        f"P(sum), B{tail('P(sum)')} -> P(sum)",
        f"B, P(sum){tail('P(sum)')} -> P(sum)",
    }


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("inner", "outer", "groups"), [(6, 3, 3), (4, 8, 2), (6, 6, 6), (5, 5, 5), (8, 8, 4)]
)
def test_grouped_convolution_splits_by_whole_groups(inner, outer, groups, transposed):
    case = _case(inner, outer, groups, transposed)
    nd = groups % 4 == 0  # two axes share the groups only if there are enough for both
    found = proven(RULES[CONV], CONV, *case, nd=nd)
    holds(found, "S(0), B, B -> S(0)")
    if groups in (6, 4, 2):
        holds(found, "S(1), S(0), S(0) -> S(1)")
    found = proven(RULES[BACKWARD], BACKWARD, *_backward(case, [True] * 3), nd=nd)
    holds(found, "S(0), S(0), B -> S(0), P(sum), P(sum)", "P(sum), B, B -> P(sum), P(sum), P(sum)")
    if groups in (6, 4, 2):
        holds(found, "S(1), S(1), S(0) -> S(1), S(0), S(0)")


def test_groups_that_do_not_divide_are_units():
    found = proven(RULES[CONV], CONV, *_case(6, 3, 3))
    holds(found, "S(1,1,2), S(0), S(0) -> S(1)")


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("inner", "outer"), [(4, 4), (4, 8), (8, 4)])
def test_groups_that_an_outer_axis_left(inner, outer, transposed):
    """Shapes are what an outer axis left of 8 groups, arguments are the whole call's."""
    case = _case(inner, outer, 4, transposed)
    for op, args, at in ((CONV, case, -1), (BACKWARD, _backward(case, [True] * 3), -2)):
        alone = describe(op, args, {})
        within = replace(alone, args=(*alone.args[:at], 8, *alone.args[len(alone.args) + at + 1 :]))
        forms = [()] * len(alone.inputs)
        found = RULES[op].signatures(within, 2, forms)
        assert found == RULES[op].signatures(alone, 2, forms)
        assert any(one.inputs[1] == S(1 if op is BACKWARD else 0) for one in found)


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3))[:-1])
@pytest.mark.parametrize("transposed", [True, False])
def test_backward(transposed, mask):
    case = _case(4, 6, transposed=transposed, bias=mask[2])
    found = proven(RULES[BACKWARD], BACKWARD, *_backward(case, mask))
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    for inputs, outputs in (
        ("S(0), S(0), B", ("S(0)", "P(sum)", "P(sum)")),
        (f"S(1), B, S({out_dim})", ("P(sum)", f"S({out_dim})", "S(0)")),
        (f"B, S(1), S({in_dim})", ("S(1)", f"S({in_dim})", "B")),
        ("P(sum), B, B", ("P(sum)",) * 3),
    ):
        there = [one if asked else "B" for one, asked in zip(outputs, mask, strict=True)]
        holds(found, f"{inputs} -> {', '.join(there)}")
    assert len(found) == 4


def test_backward_of_few_channels_and_samples():
    case = _case(3, 2, samples=1)
    proven(RULES[BACKWARD], BACKWARD, *_backward(case, [True] * 3), axis_sizes=(2, 4, 5))


@pytest.mark.parametrize("transposed", [True, False])
def test_a_rank_without_channels_has_the_very_bias_gradient(transposed):
    """The ranks hold replicas of it, which must not drift apart by rounding."""
    case = _case(3, 5, transposed=transposed, spatial=(50,), dtype=torch.float32)
    args = _backward(case, [True] * 3)
    sizes = [(3, 0, 50), (0, 5, 3) if transposed else (5, 0, 3)]
    found = empty_convolution_backward(args[0], sizes, (*sizes, (5,)), *args[4:9])
    assert [tuple(one.shape) for one in found if one is not None] == [*sizes, (5,)]
    assert found[2] is not None and torch.equal(found[2], BACKWARD(*args)[2])


def test_nothing_is_missing_but_spatial_splits():
    case = _case(4, 6)
    missing = missing_signatures(CONV, case, {}, RULES[CONV], 2)
    assert [str(one) for one in missing if "2" not in str(one)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_floats(dtype):
    case = _case(4, 6, dtype=dtype, spatial=(4, 3))
    proven(RULES[CONV], CONV, *case)
    proven(RULES[BACKWARD], BACKWARD, *_backward(case, [True] * 3))


def test_half_a_group_is_refused():
    case = _case(4, 8, 2)
    one = next(
        s for s in RULES[CONV].signatures(describe(CONV, case, {}), 2, [(), (), ()]) if s.inputs[0] == S(1)
    )
    with pytest.raises(WrongRule, match=r"LayoutError.* 1 channels are not whole groups of 2"):
        prove_nd(CONV, case, {}, [one, one], (2, 2), RULES[CONV])
