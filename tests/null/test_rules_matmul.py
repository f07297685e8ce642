"""Rules of matrix products."""

import pytest
import torch

from monoflow.sbp.oracle import missing_signatures
from monoflow.sbp.rules.matmul import RULES
from tests.null.rule_trial import holds, proven, values

aten = torch.ops.aten


def test_mm_has_exactly_the_five_known_kinds():
    op = aten.mm.default
    assert proven(RULES[op], op, values(7, 6), values(6, 5)) == {
        "S(0), B -> S(0)",
        "B, S(1) -> S(1)",
        "S(1), S(0) -> P(sum)",
        "P(sum), B -> P(sum)",
        "B, P(sum) -> P(sum)",
    }
    assert missing_signatures(op, (values(7, 6), values(6, 5)), {}, RULES[op], 2) == []


def test_mm_passes_blocked_splits_on():
    op = aten.mm.default
    wrong = proven(RULES[op], op, values(8, 4), values(4, 12), axis_sizes=(2,))
    assert len(wrong) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mm_in_narrow_floats(dtype):
    op = aten.mm.default
    proven(RULES[op], op, values(5, 4, dtype=dtype), values(4, 3, dtype=dtype))


@pytest.mark.parametrize("bias", [(5,), (1, 5), (7, 5), (7, 1), ()])
@pytest.mark.parametrize("scale", [{}, {"alpha": 0.5, "beta": -2.0}])
def test_addmm_takes_its_bias_partial_where_the_product_is(bias, scale):
    op = aten.addmm.default
    found = proven(RULES[op], op, values(*bias), values(7, 6), values(6, 5), **scale)
    holds(found, "P(sum), S(1), S(0) -> P(sum)", "P(sum), P(sum), B -> P(sum)", "P(sum), B, P(sum) -> P(sum)")
    assert len(found) == 5
    rows, columns = "S(0)" if bias[:1] == (7,) else "B", f"S({len(bias) - 1})" if bias[-1:] == (5,) else "B"
    holds(found, f"{rows}, S(0), B -> S(0)", f"{columns}, B, S(1) -> S(1)")


@pytest.mark.parametrize(
    ("op", "shapes", "count"),
    [
        (aten.bmm.default, [(3, 5, 4), (3, 4, 7)], 6),
        (aten.baddbmm.default, [(3, 5, 7), (3, 5, 4), (3, 4, 7)], 6),
        (aten.baddbmm.default, [(1, 1, 7), (3, 5, 4), (3, 4, 7)], 6),
        (aten.addbmm.default, [(5, 7), (3, 5, 4), (3, 4, 7)], 6),
        (aten.dot.default, [(5,), (5,)], 3),
        (aten.mv.default, [(5, 3), (3,)], 4),
        (aten.addmv.default, [(5,), (5, 3), (3,)], 4),
        (aten.ger.default, [(5,), (3,)], 4),
        (aten.addr.default, [(5, 3), (5,), (3,)], 4),
        (aten._cdist_forward.default, [(2, 5, 3), (2, 4, 3)], 3),
        (aten._cdist_forward.default, [(1, 5, 3), (2, 4, 3)], 3),
    ],
)
def test_other_products(op, shapes, count):
    args = [values(*shape, seed=i) for i, shape in enumerate(shapes)]
    extra = (2.0, None) if op is aten._cdist_forward.default else ()
    assert len(proven(RULES[op], op, *args, *extra)) == count


@pytest.fixture
def wide_results_on_cpu():
    """torch has the overloads with a dtype for the result on accelerators only: these stand in."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in ("mm", "bmm"):
            op = getattr(aten, name).default
            library.impl(f"{name}.dtype", lambda a, b, dtype, op=op: op(a.to(dtype), b.to(dtype)), "CPU")
        for name in ("addmm", "baddbmm"):
            op = getattr(aten, name).default
            library.impl(
                f"{name}.dtype",
                lambda c, a, b, dtype, *, beta=1, alpha=1, op=op: op(
                    c.to(dtype), a.to(dtype), b.to(dtype), beta=beta, alpha=alpha
                ),
                "CPU",
            )
        yield


@pytest.mark.usefixtures("wide_results_on_cpu")
def test_products_with_a_wider_result():
    shapes = {"mm": [(5, 4), (4, 7)], "bmm": [(3, 5, 4), (3, 4, 7)]}
    for name in ("mm", "bmm"):
        args = [values(*shape, seed=i) for i, shape in enumerate(shapes[name])]
        for op, own in (
            (getattr(aten, name).dtype, args),
            (getattr(aten, "addmm" if name == "mm" else "baddbmm").dtype, [values(7), *args]),
        ):
            found = proven(RULES[op], op, *own, torch.float64, axis_sizes=(3,))
            assert len(found) == (5 if name == "mm" else 6)


def test_products_of_integers():
    op = aten.mm.default
    proven(RULES[op], op, torch.arange(10).view(5, 2), torch.arange(6).view(2, 3))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_backward_of_distances(p):
    op = aten._cdist_backward.default
    x, y = values(2, 5, 3), values(2, 4, 3, seed=1)
    args = (values(2, 5, 4, seed=2), x, y, p, aten._cdist_forward.default(x, y, p, None))
    assert proven(RULES[op], op, *args) == {
        "S(0), S(0), S(0), S(0) -> S(0)",
        "S(1), S(1), B, S(1) -> S(1)",
        "S(2), B, S(1), S(2) -> P(sum)",
        "B, S(2), S(2), B -> S(2)",
        "P(sum), B, B, B -> P(sum)",
    }


def test_trilinear_is_an_einsum_of_three():
    op = aten._trilinear.default
    # What bilinear(x, y) makes: x (batch, i), weight (o, i, j), y (batch, j), summed over i and j.
    args = (values(5, 3), values(2, 3, 4, seed=1), values(5, 4, seed=2), [1, 3], [0], [1, 2], [2, 3])
    assert proven(RULES[op], op, *args) == {
        "S(0), B, S(0) -> S(0)",
        "B, S(0), B -> S(1)",
        "S(1), S(1), B -> P(sum)",
        "B, S(2), S(1) -> P(sum)",
        "P(sum), B, B -> P(sum)",
        "B, P(sum), B -> P(sum)",
        "B, B, P(sum) -> P(sum)",
    }


@pytest.mark.parametrize("beta", [-2.0, 0.0])
def test_addmv_with_one_bias_for_all_rows(beta):
    """Over an empty shard torch's addmv gives its bias as it is, of the wrong shape (and NaN for beta 0)."""
    op = aten.addmv.default
    bias = values(1) if beta else torch.tensor([float("nan")], dtype=torch.float64)
    found = proven(RULES[op], op, bias, values(5, 3), values(3), beta=beta)
    assert "P(sum), S(1), S(0) -> P(sum)" in found and "B, S(0), B -> S(0)" in found


@pytest.mark.parametrize(
    ("p", "how"), [(0.0, "sum"), (1.0, "sum"), (float("inf"), "max"), (2.0, None), (1.5, None)]
)
def test_distances_add_up_over_features_where_their_norm_does(p, how):
    op = aten._cdist_forward.default
    found = proven(RULES[op], op, values(5, 3), values(4, 3, seed=1), p, None)
    assert found == {"S(0), B -> S(0)", "B, S(0) -> S(1)"} | ({f"S(1), S(1) -> P({how})"} if how else set())
    op = aten._pdist_forward.default
    assert proven(RULES[op], op, values(5, 3), p) == ({f"S(1) -> P({how})"} if how else set())
    pairs = op(values(5, 3), p)
    op = aten._pdist_backward.default
    found = proven(RULES[op], op, values(10), values(5, 3), p, pairs)
    assert found == {"B, S(1), B -> S(1)", "P(sum), B, B -> P(sum)"}


def test_a_product_of_conjugates():
    op = aten.vdot.default
    x, y = (torch.complex(values(5, seed=i), values(5, seed=i + 1)) for i in (0, 2))
    assert proven(RULES[op], op, x, y) == {
        "S(0), S(0) -> P(sum)",
        "P(sum), B -> P(sum)",
        "B, P(sum) -> P(sum)",
    }
