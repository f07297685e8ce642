"""Rules of reductions, scans and orderings."""

import math

import pytest
import torch

from monoflow.sbp.oracle import missing_signatures
from monoflow.sbp.rules import reduction
from monoflow.sbp.rules.reduction import RULES
from tests.null.rule_trial import holds, integers, proven, same_as_expanded, values

aten = torch.ops.aten
X = values(5, 6, 4)


@pytest.mark.parametrize(
    ("op", "args", "partial"),
    [
        (aten.sum.default, (X,), "P(sum)"),
        (aten.count_nonzero.default, (X,), "P(sum)"),
        (aten.max.default, (X,), "P(max)"),
        (aten.min.default, (X,), "P(min)"),
        (aten.amax.default, (X,), "P(max)"),
        (aten.amin.default, (X,), "P(min)"),
        (aten.any.default, (X > 2,), "P(max)"),
        (aten.all.default, (X > -2,), "P(min)"),
        (aten.linalg_vector_norm.default, (X, 1), "P(sum)"),
        (aten.linalg_vector_norm.default, (X, 0), "P(sum)"),
        (aten.linalg_vector_norm.default, (X, math.inf), "P(max)"),
        (aten.linalg_vector_norm.default, (X, -math.inf), "P(min)"),
        (aten.norm.Scalar, (X, 1), "P(sum)"),
        (aten.count_nonzero.dim_IntList, (X.long(), [0, 1, 2]), "P(sum)"),
    ],
    ids=str,
)
def test_full_reductions_of_a_split_tensor_are_partial(op, args, partial):
    holds(proven(RULES[op], op, *args), *(f"S({dim}) -> {partial}" for dim in range(3)))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [[1], [-1], [0, 2], [0, 1, 2], []])
def test_sum_over_dims(dims, keepdim):
    op = aten.sum.dim_IntList
    found = proven(RULES[op], op, X, dims, keepdim)
    reduced = {dim % 3 for dim in dims} or {0, 1, 2}
    for dim in range(3):
        left = dim if keepdim else dim - sum(one < dim for one in reduced)
        holds(found, f"S({dim}) -> P(sum)" if dim in reduced else f"S({dim}) -> S({left})")
    holds(found, "P(sum) -> P(sum)")
    assert missing_signatures(op, (X, dims, keepdim), {}, RULES[op], 2) == []


@pytest.mark.parametrize(
    "x",
    [X.float(), integers(9, 5, 6), integers(2, 5, 6).bool(), integers(9, 5, 6).int()],
    ids=lambda x: str(x.dtype),
)
def test_sum_of_other_dtypes(x):
    op = aten.sum.dim_IntList
    found = proven(RULES[op], op, x, [0])
    assert ("P(sum) -> P(sum)" in found) == (x.dtype != torch.bool)
    holds(found, "S(0) -> P(sum)", "S(1) -> S(0)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("keepdim", [False, True])
def test_extrema_survive_empty_shards(dtype, keepdim):
    x = (values(3, 4) * 5).to(dtype)
    for op, partial in ((aten.amax.default, "P(max)"), (aten.amin.default, "P(min)")):
        for dims in ([0], [1], [0, 1]):
            found = proven(RULES[op], op, x, dims, keepdim, axis_sizes=(2, 4, 5))
            holds(found, f"S({dims[0]}) -> {partial}", f"{partial} -> {partial}")


def test_local_extremum_of_nothing():
    empty = torch.empty(0, 3)
    assert reduction.amax(empty, [0]).tolist() == [-math.inf] * 3
    assert reduction.amin(empty.int(), [0], True).tolist() == [[torch.iinfo(torch.int32).max] * 3]
    assert reduction.amax(empty, [1]).shape == (0,)


@pytest.mark.parametrize("op", [aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims], ids=str)
def test_truth_over_dims(op):
    x = integers(4, 5, 6) > 0
    dims = 1 if op in (aten.any.dim, aten.all.dim) else [1]
    partial = "P(max)" if "any" in str(op) else "P(min)"
    holds(proven(RULES[op], op, x, dims), f"S(1) -> {partial}", "S(0) -> S(0)")


SPLIT_ONLY = [
    (aten.prod.dim_int, (1,), 1, 2),
    (aten.argmax.default, (1,), 1, 2),
    (aten.argmin.default, (-1, True), 1, 2),
    (aten.argmax.default, (), 1, 0),
    (aten.max.dim, (1,), 2, 2),
    (aten.min.dim, (0, True), 2, 2),
    (aten.median.dim, (1,), 2, 2),
    (aten.nanmedian.dim, (1,), 2, 2),
    (aten.mode.default, (1,), 2, 2),
    (aten.kthvalue.default, (2, 1), 2, 2),
    (aten.logsumexp.default, ([1],), 1, 2),
    (aten.linalg_vector_norm.default, (2, [1]), 1, 2),
    (aten.linalg_vector_norm.default, (3, [0, 1]), 1, 1),
    (aten.norm.ScalarOpt_dim, (2, [1], True), 1, 2),
    (aten.cumprod.default, (1,), 1, 2),
    (aten.logcumsumexp.default, (1,), 1, 2),
    (aten.cummax.default, (1,), 2, 2),
    (aten.cummin.default, (1,), 2, 2),
    (aten.sort.default, (1,), 2, 2),
    (aten.topk.default, (2, 1), 2, 2),
]


@pytest.mark.parametrize(("op", "args", "outputs", "count"), SPLIT_ONLY, ids=str)
def test_dims_that_are_not_reduced_split(op, args, outputs, count):
    found = proven(RULES[op], op, X, *args)
    assert len(found) == count and not any("P" in one for one in found)
    assert all(one.split(" -> ")[1].count("S") == outputs for one in found)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.var.correction, ([1],), {"correction": 1}),
        (aten.std.correction, ([0, 1],), {"correction": 0, "keepdim": True}),
        (aten.var_mean.correction, ([1],), {}),
        (aten.std_mean.correction, ([1],), {}),
        (aten.aminmax.default, (), {"dim": 1}),
        (aten.sort.stable, (), {"stable": True, "dim": 1}),
        (aten.mean.default, (), {}),
    ],
    ids=str,
)
def test_more_dims_that_are_not_reduced(op, args, kwargs):
    found = proven(RULES[op], op, X, *args, **kwargs)
    assert ("S(2) -> S(" in " ".join(found)) == (op is not aten.mean.default)


def test_linear_without_a_contracted_partial():
    assert proven(RULES[aten.cumsum.default], aten.cumsum.default, X, 1) == {
        "S(0) -> S(0)", "S(2) -> S(2)", "P(sum) -> P(sum)",
    }  # fmt: skip
    assert proven(RULES[aten.mean.dim], aten.mean.dim, X, [1]) == {
        "S(0) -> S(0)", "S(2) -> S(1)", "P(sum) -> P(sum)",
    }  # fmt: skip


@pytest.mark.parametrize("order", [2, 1, 0, 3, 2.5, math.inf, -math.inf])
@pytest.mark.parametrize("dims", [None, [1], [0, 2]])
def test_expanded_norm(order, dims):
    op = aten.linalg_vector_norm.default
    same_as_expanded(RULES[op], op, X, order, dims, True)
    same_as_expanded(RULES[op], op, X.bfloat16(), order, dims, tolerance=2e-2)
    same_as_expanded(RULES[op], op, X.bfloat16(), order, dims, dtype=torch.float32, tolerance=1e-3)


def test_expanded_norm_in_its_other_spellings():
    for op, args in ((aten.norm.Scalar, (X, 2)), (aten.norm.ScalarOpt_dim, (X, 2, [0], False))):
        same_as_expanded(RULES[op], op, *args)
    for op in (aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype):
        more = ([1], True) if "dim" in str(op) else ()
        same_as_expanded(RULES[op], op, X.float(), 2, *more, dtype=torch.float64, tolerance=1e-6)
        holds(proven(RULES[op], op, X, 1, *more, dtype=torch.float64), "S(1) -> P(sum)")


def test_expanded_logsumexp():
    op = aten.logsumexp.default
    for x in (X, X * 1000, torch.full((2, 3), -math.inf), torch.tensor([[1.0, math.inf]])):
        for keepdim in (False, True):
            same_as_expanded(RULES[op], op, x, [1], keepdim)


def test_infinity_norm_of_more_ranks_than_rows():
    op = aten.linalg_vector_norm.default
    for order in (math.inf, -math.inf):
        proven(RULES[op], op, values(2, 3), order, [0], True, axis_sizes=(4,))
        proven(RULES[op], op, values(2, 3), order, axis_sizes=(4,))


@pytest.mark.parametrize(
    ("order", "how"), [(0, "sum"), (1, "sum"), (math.inf, "max"), (-math.inf, "min"), (2, None)]
)
def test_a_distance_adds_up_where_its_norm_does(order, how):
    op = aten.dist.default
    found = proven(RULES[op], op, values(5, 3), values(3, seed=1), order)
    assert found == (set() if how is None else {f"S(0), B -> P({how})", f"S(1), S(0) -> P({how})"})
    same_as_expanded(RULES[op], op, values(5, 3), values(3, seed=1), order)


def test_what_has_no_partial_of_its_own_stays_whole():
    for op in (aten.prod.default, aten.median.default, aten.nanmedian.default, aten.var.default):
        assert proven(RULES[op], op, X) == set()
    op = aten.var.dim
    assert proven(RULES[op], op, values(5, 3), [1]) == {"S(0) -> S(0)"}


def test_sums_without_nans_and_slices_of_a_bounded_norm():
    op = aten.nansum.default
    x = values(5, 3)
    x = torch.where(x > 1, torch.nan, x)
    assert proven(RULES[op], op, x, [1]) == {"S(0) -> S(0)", "S(1) -> P(sum)"}
    op = aten.renorm.default
    assert proven(RULES[op], op, X, 2, 1, 0.5) == {"S(1) -> S(1)"}
