"""Slices, splits, joins: every listed layout is proved, and fused projections come apart and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monoflow.sbp.layout import B, P, S, Split
from monoflow.sbp.oracle import describe, missing_signatures, prove_nd, wrong_signatures
from monoflow.sbp.registry import OpRule
from monoflow.sbp.rules import pieces, view
from monoflow.sbp.signature import OpCall, Signature

aten = torch.ops.aten
torch.manual_seed(0)
RULES = {**view.RULES, **pieces.RULES}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


CASES: list[tuple[Callable, tuple[Any, ...]]] = [
    (aten.slice.Tensor, (randn(12, 5), 0, 4, 8)),
    (aten.slice.Tensor, (randn(12, 5), 0, 4)),
    (aten.slice.Tensor, (randn(12, 5), -1, 0, 2**62)),
    (aten.slice.Tensor, (randn(12, 5), 0, -8, -2)),
    (aten.slice.Tensor, (randn(12, 5), 0, 1, 9, 3)),
    (aten.narrow.default, (randn(12, 5), 0, -4, 4)),
    (aten.slice_backward.default, (randn(4, 5), [12, 5], 0, 4, 8, 1)),
    (aten.slice_backward.default, (randn(12, 5), [12, 5], 0, 0, 2**62, 1)),
    (aten.slice_backward.default, (randn(6, 5), [12, 5], 0, 0, 12, 2)),
    (aten.slice_scatter.default, (randn(12, 5), randn(4, 5), 0, 4, 8)),
    (aten.split.Tensor, (randn(3, 12), 4, 1)),
    (aten.split.Tensor, (randn(3, 12), 5, -1)),
    (aten.split_with_sizes.default, (randn(12, 3), [8, 2, 2])),
    (aten.cat.default, ([randn(4, 5), randn(8, 5), randn(4, 5)],)),
    (aten.cat.default, ([randn(3, 5), randn(4, 5)], -2)),
    (aten.cat.default, ([randn(6, 5)],)),
    (aten.stack.default, ([randn(3, 5), randn(3, 5)], -1)),
    (aten.select.int, (randn(3, 4, 5), -2, -1)),
    (aten.unbind.int, (randn(3, 4, 5), 1)),
    (aten.select_backward.default, (randn(3, 5), [3, 4, 5], 1, 2)),
    (aten.select_scatter.default, (randn(3, 4, 5), randn(3, 5), -2, 2)),
    (aten.diagonal.default, (randn(3, 4, 5), 1, 0, -1)),
    (aten.diagonal_backward.default, (randn(4, 3), [3, 4, 5], 1, 0, -1)),
    (aten.diagonal_scatter.default, (randn(3, 4, 5), randn(4, 3), 0, 0, 2)),
    (aten.diag_embed.default, (randn(3, 4, 5), 1, 0, -1)),
    (aten.unfold.default, (randn(3, 7), 1, 3, 2)),
    (aten.unfold_backward.default, (randn(3, 3, 3), [3, 7], 1, 3, 2)),
    (aten.roll.default, (randn(3, 4), [2])),
    (aten.roll.default, (randn(3, 4), [2], [-1])),
    (aten.flip.default, (randn(3, 4, 2), [0, -1])),
    (aten.tril.default, (randn(2, 5, 4),)),
    (aten.triu.default, (randn(5, 6), -1)),
    (aten.tril.default, (randn(5, 6), 2)),
]
#: Results or arguments that no element of counts: any layout of them is exact, and not worth listing.
IDLE: list[tuple[Callable, tuple[Any, ...]]] = [
    (aten.slice.Tensor, (randn(12, 5), 0, 8, 3)),
    (aten.slice_scatter.default, (randn(12, 5), randn(12, 5), 0, 0, 12)),
    (aten.split_with_sizes.default, (randn(12, 3), [12, 0])),
    (aten.cat.default, ([randn(0), randn(4, 5), randn(4, 5)],)),
    (aten.cat.default, ([randn(0), randn(5)],)),
]
IDS = [f"{op.__name__}-{i}" for i, (op, _) in enumerate(CASES)]


@pytest.mark.parametrize(("op", "args"), CASES, ids=IDS)
@pytest.mark.parametrize("axis_size", [1, 2, 3, 4])
def test_listed_signatures_are_exact(op: Callable, args: tuple[Any, ...], axis_size: int) -> None:
    assert wrong_signatures(op, args, {}, RULES[op], axis_size) == []


@pytest.mark.parametrize(("op", "args"), CASES, ids=IDS)
@pytest.mark.parametrize("axis_size", [2, 3])
def test_no_plain_signature_is_missing(op: Callable, args: tuple[Any, ...], axis_size: int) -> None:
    own = OpRule(RULES[op].signatures)
    assert missing_signatures(op, args, {}, own, axis_size, limit=300) == []


@pytest.mark.parametrize(("op", "args"), IDLE)
@pytest.mark.parametrize("axis_size", [1, 2, 3])
def test_idle_elements_do_no_harm(op: Callable, args: tuple[Any, ...], axis_size: int) -> None:
    assert wrong_signatures(op, args, {}, RULES[op], axis_size) == []


def test_an_empty_cache_does_not_stop_a_split() -> None:
    call = describe(aten.cat.default, ([randn(0), randn(4, 5)], 0), {})
    found = RULES[aten.cat.default].signatures(call, 2, [[], []])
    assert {Signature((B, one), (one,)) for one in (S(0), S(1), P)} <= set(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_other_dtypes(dtype: torch.dtype) -> None:
    a, b = ((randn(4, 3) * 4).to(dtype) for _ in range(2))
    assert wrong_signatures(aten.cat.default, ([a, b],), {}, RULES[aten.cat.default], 2) == []
    assert wrong_signatures(aten.slice.Tensor, (a, 0, 1, 2), {}, RULES[aten.slice.Tensor], 3) == []
    assert wrong_signatures(aten.tril.default, (a,), {}, RULES[aten.tril.default], 3) == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_any_split_and_join_is_exact(sizes: list[int], axis_size: int) -> None:
    whole = randn(2, sum(sizes))
    op = aten.split_with_sizes.default
    assert wrong_signatures(op, (whole, sizes, 1), {}, RULES[op], axis_size) == []
    parts = list(whole.split(sizes, 1))
    assert wrong_signatures(aten.cat.default, (parts, 1), {}, RULES[aten.cat.default], axis_size) == []


@given(st.integers(1, 12), st.integers(-13, 13), st.integers(-13, 13), st.integers(1, 3), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_any_slice_is_exact(size: int, start: int, end: int, step: int, axis_size: int) -> None:
    x = randn(size, 3)
    args = (x, 0, start, end, step)
    assert wrong_signatures(aten.slice.Tensor, args, {}, RULES[aten.slice.Tensor], axis_size) == []
    back, op = (aten.slice.Tensor(*args), [size, 3], 0, start, end, step), aten.slice_backward.default
    assert wrong_signatures(op, back, {}, RULES[op], axis_size) == []


def outputs_for(call: OpCall, inputs: tuple, axis_size: int = 2) -> tuple:
    """What the rule gives for these input layouts when they are the forms that arrive."""
    forms = [[one] if isinstance(one, Split) else [] for one in inputs]
    (found,) = [s for s in RULES[call.op].signatures(call, axis_size, forms) if s.inputs == inputs]
    return found.outputs


def test_a_fused_projection_comes_apart_into_heads() -> None:
    """(B*T, 3C) under S(1,3) -> (B, T, 3C) -> three (B, T, C) -> (B, T, heads, C/heads) under S(2)."""
    batch, time, heads, depth = 3, 5, 4, 2
    fused = randn(batch * time, 3 * heads * depth)
    (layout,) = outputs_for(describe(aten.view.default, (fused, [batch, time, -1]), {}), (S(1, 3),))
    assert layout == S(2, 3)
    cube = fused.view(batch, time, -1)
    parts = outputs_for(describe(aten.split.Tensor, (cube, heads * depth, 2), {}), (layout,))
    assert parts == (S(2), S(2), S(2))
    query = cube.split(heads * depth, 2)[0]
    call = describe(aten.view.default, (query, [batch, time, heads, depth]), {})
    assert outputs_for(call, (parts[0],)) == (S(2),)
    swapped = describe(aten.transpose.int, (query.view(batch, time, heads, depth), 1, 2), {})
    assert outputs_for(swapped, (S(2),)) == (S(1),)


def test_gradients_of_heads_go_back_into_the_fused_projection() -> None:
    """Three gradients (B, T, heads, depth) under S(2) -> (B, T, C) -> cat -> (B*T, 3C) under S(1,3)."""
    batch, time, heads, depth = 3, 5, 4, 2
    grad = randn(batch, time, heads, depth)
    (flat,) = outputs_for(describe(aten.view.default, (grad, [batch, time, heads * depth]), {}), (S(2),))
    assert flat == S(2)
    pieces_ = [grad.view(batch, time, -1)] * 3
    (whole,) = outputs_for(describe(aten.cat.default, (pieces_, 2), {}), (S(2),) * 3)
    assert whole == S(2, 3)
    call = describe(aten.view.default, (torch.cat(pieces_, 2), [batch * time, -1]), {})
    assert outputs_for(call, (whole,)) == (S(1, 3),)


def test_grouped_query_pieces_of_unequal_size() -> None:
    """Eight query heads and two each of key and value: blocks are as large as the smallest piece."""
    call = describe(aten.split_with_sizes.default, (randn(3, 24), [16, 4, 4], 1), {})
    assert Signature((S(1, 6),), (S(1, 4), S(1), S(1))) in RULES[call.op].signatures(call, 2, [[]])
    back = describe(aten.cat.default, ([randn(3, 16), randn(3, 4), randn(3, 4)], 1), {})
    assert Signature((S(1, 4), S(1), S(1)), (S(1, 6),)) in RULES[back.op].signatures(back, 2, [[], [], []])


def test_slices_of_blocks() -> None:
    call = describe(aten.slice.Tensor, (randn(12), 0, 8, 12), {})
    assert Signature((S(0, 3),), (S(0),)) in RULES[call.op].signatures(call, 2, [[]])
    plain = RULES[call.op].signatures(call, 2, [[S(0)]])
    assert not any(one.inputs == (S(0),) for one in plain), "a slice of a plainly split dim is not local"
    back = describe(aten.slice_backward.default, (randn(4), [12], 0, 8, 12, 1), {})
    assert Signature((S(0),), (S(0, 3),)) in RULES[back.op].signatures(back, 2, [[]])


@pytest.mark.parametrize("op", [aten.tril.default, aten.triu.default])
def test_triangles_with_split_rows_and_columns(op: Callable) -> None:
    args, rule = (randn(5, 7), 1), RULES[op]
    rows, columns = Signature((S(0),), (S(0),)), Signature((S(1),), (S(1),))
    prove_nd(op, args, {}, [rows, columns], (2, 3), rule)
    prove_nd(op, args, {}, [columns, columns], (2, 2), rule)
    call = describe(op, (randn(4, 8), 1), {})
    assert Signature((S(1, 2),), (S(1, 2),)) not in rule.signatures(call, 2, [[S(1, 2)]])


def test_two_axes_along_one_dim() -> None:
    args, op = (randn(24), 8), aten.split.Tensor
    one = Signature((S(0, 3),), (S(0), S(0), S(0)))
    prove_nd(op, args, {}, [one, one], (2, 2), RULES[op])
    cat_args = (list(args[0].split(8)),)
    prove_nd(
        aten.cat.default,
        cat_args,
        {},
        [Signature(one.outputs, one.inputs)] * 2,
        (2, 2),
        RULES[aten.cat.default],
    )
    sliced = Signature((S(0, 3),), (S(0),))
    prove_nd(aten.slice.Tensor, (args[0], 0, 8, 16), {}, [sliced, sliced], (2, 4), RULES[aten.slice.Tensor])
    whole = Signature((B,), (B,))
    prove_nd(aten.slice.Tensor, (args[0], 0, 8, 16), {}, [whole, sliced], (2, 4), RULES[aten.slice.Tensor])


def plain(op: Callable, *args: Any, axis_size: int = 2) -> set[str]:
    """The plain signatures of a call, all of which are proven."""
    assert wrong_signatures(op, args, {}, RULES[op], axis_size) == []
    call = describe(op, args, {})
    return {str(one) for one in RULES[op].signatures(call, axis_size, [()] * len(call.inputs))}


@pytest.mark.parametrize("axis_size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(5, 5), (5, 3), (3, 6), (2, 2)])
def test_a_trace_is_the_sum_of_what_rows_or_columns_cross(shape: tuple[int, int], axis_size: int) -> None:
    expected = {"S(0) -> P(sum)", "S(1) -> P(sum)", "P(sum) -> P(sum)"}
    assert plain(aten.trace.default, randn(*shape), axis_size=axis_size) == expected


def test_a_trace_on_two_axes() -> None:
    rows, columns = Signature((S(0),), (P,)), Signature((S(1),), (P,))
    prove_nd(aten.trace.default, (randn(5, 7),), {}, [rows, columns], (2, 3), RULES[aten.trace.default])


def test_rotations_diagonals_and_shuffles() -> None:
    extremes = {"P(sum) -> P(sum)", "P(max) -> P(max)", "P(min) -> P(min)"}
    assert plain(aten.rot90.default, randn(5, 3, 4), 1, [0, 2]) == {"S(1) -> S(1)"} | extremes
    assert plain(aten.block_diag.default, [randn(2, 3), randn(4, 1)]) == {"P(sum), P(sum) -> P(sum)"}
    found = plain(aten.channel_shuffle.default, randn(4, 12, 3), 3)
    assert found == {"S(0) -> S(0)", "S(2) -> S(2)", "S(1,3) -> S(1)"} | extremes
