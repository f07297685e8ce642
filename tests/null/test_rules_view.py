"""Views: every listed layout is proved, and splits come through reshapes as the maths says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monoflow.sbp.layout import B, P, S, Split
from monoflow.sbp.oracle import (
    describe,
    every_split,
    listed,
    missing_signatures,
    prove_nd,
    wrong_signatures,
)
from monoflow.sbp.rules.view import RULES, carry
from monoflow.sbp.signature import LocalCall, Signature, TensorMeta, TensorShard

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(6, 1, 4, 5)


def op_named(name: str) -> Callable:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("view", (X, [6, 20])),
    ("view", (X, [-1])),
    ("view_copy", (X, [3, 2, 20])),
    ("_unsafe_view", (X, [24, 5])),
    ("_reshape_alias", (X, [6, 4, 5], [20, 5, 1])),
    ("permute", (X, [2, 0, -1, 1])),
    ("transpose.int", (X, -1, 0)),
    ("t", (torch.randn(5, 3),)),
    ("t", (torch.randn(5),)),
    ("squeeze", (torch.randn(2, 1, 3, 1),)),
    ("squeeze.dim", (torch.randn(2, 1, 3), 0)),
    ("squeeze.dim", (torch.randn(2, 1, 3), -2)),
    ("squeeze.dims", (torch.randn(2, 1, 3, 1), [0, 1, -1])),
    ("unsqueeze", (torch.randn(2, 3), -1)),
    ("unsqueeze", (torch.randn(2, 3), 0)),
    ("expand", (torch.randn(1, 3), [5, -1])),
    ("expand", (torch.randn(3, 1), [2, 3, 4])),
    ("expand", (torch.randn(()), [5, 2])),
    ("repeat", (torch.randn(4, 1), [2, 3, 5])),
    ("repeat", (torch.randn(4, 3), [1, 2])),
    ("view.dtype", (torch.randn(4, 6), torch.int32)),
    ("view.dtype", (torch.randn(4, 6), torch.bfloat16)),
    ("view.dtype", (torch.randn(4, 6).bfloat16(), torch.float32)),
    ("view_as_real", (torch.randn(4, 3, dtype=torch.complex64),)),
    ("view_as_complex", (torch.randn(4, 3, 2),)),
    ("as_strided", (torch.randn(12), [3, 4], [4, 1])),
    ("as_strided", (torch.randn(3, 4, 1), [3, 4, 1], [4, 1, 7])),
    ("as_strided", (torch.randn(12), [3, 4], [1, 3])),
    ("as_strided_scatter", (torch.randn(12), torch.randn(3), [3], [2])),
    ("alias_copy", (torch.randn(3),)),
]


@pytest.mark.parametrize(("name", "args"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)])
@pytest.mark.parametrize("axis_size", [1, 2, 3, 4])
def test_listed_signatures_are_exact(name: str, args: tuple[Any, ...], axis_size: int) -> None:
    op = op_named(name)
    assert wrong_signatures(op, args, {}, RULES[op], axis_size) == []


@pytest.mark.parametrize(("name", "args"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)])
@pytest.mark.parametrize("axis_size", [2, 3])
def test_no_plain_signature_is_missing(name: str, args: tuple[Any, ...], axis_size: int) -> None:
    op = op_named(name)
    missing = missing_signatures(op, args, {}, RULES[op], axis_size)
    if op is aten.view.dtype:
        # Of two bfloat16 read as one float32 the upper is the value to bfloat16 rounding, which adds up.
        missing = [one for one in missing if P not in one.inputs]
    assert missing == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_partials_of_every_kind_pass_through(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4) * 5).to(dtype)
    call = describe(aten.view.default, (x, [12]), {})
    partial = [
        one for one in listed(call, RULES[aten.view.default], 2, None) if not isinstance(one.inputs[0], Split)
    ]
    assert [str(one) for one in partial] == ["P(sum) -> P(sum)", "P(max) -> P(max)", "P(min) -> P(min)"]
    assert wrong_signatures(aten.view.default, (x, [12]), {}, RULES[aten.view.default], 2) == []


@pytest.mark.parametrize("axis_size", [1, 2, 3, 4])
def test_a_scatter_that_replaces_everything_is_a_reshape(axis_size: int) -> None:
    op, args = aten.as_strided_scatter.default, (torch.randn(15), torch.randn(3, 5), [3, 5], [5, 1])
    assert wrong_signatures(op, args, {}, RULES[op], axis_size) == []
    found = listed(describe(op, args, {}), RULES[op], 2, None)
    assert {Signature((B, P), (P,)), Signature((B, S(0)), (S(0, 1, 5),))} <= set(found)


@st.composite
def reshapes(draw) -> tuple[list[int], list[int]]:
    """Two shapes of the same number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4)))
        return [math.prod(factors[a:b]) for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)]

    return grouped(), grouped()


@given(reshapes(), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_any_reshape_is_exact(shapes: tuple[list[int], list[int]], axis_size: int) -> None:
    source, result = shapes
    args = (torch.randn(source), result)
    assert wrong_signatures(aten.view.default, args, {}, RULES[aten.view.default], axis_size) == []


@given(reshapes(), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_any_reshape_is_complete(shapes: tuple[list[int], list[int]], axis_size: int) -> None:
    source, result = shapes
    args = (torch.arange(float(math.prod(source))).reshape(source) + 1, result)
    assert missing_signatures(aten.view.default, args, {}, RULES[aten.view.default], axis_size) == []


@given(reshapes(), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_what_a_reshape_does_its_inverse_undoes(shapes: tuple[list[int], list[int]], axis_size: int) -> None:
    """The backward of a view takes the gradient back to the layout the input had."""
    source, result = shapes
    for one in every_split(source, axis_size):
        there = carry(source, one, result, axis_size)
        back = there and carry(result, there, source, axis_size)
        if there is None or source[one.dim] == 1:
            continue
        # Two names of one layout are possible; the one that comes back is the one with the smaller unit.
        assert back is not None and (back.dim, back.blocks) == (one.dim, one.blocks) and back.unit <= one.unit
        assert carry(source, back, result, axis_size) == there


@pytest.mark.parametrize(
    ("source", "split", "result", "axis_size", "expected"),
    [
        ((4, 6, 8), S(0), (24, 8), 2, S(0)),
        ((5, 6, 8), S(0), (30, 8), 2, S(0, 1, 6)),
        ((30, 8), S(0, 1, 6), (5, 6, 8), 2, S(0)),
        ((4, 6, 8), S(1), (24, 8), 2, S(0, 4)),
        ((4, 5, 8), S(1), (20, 8), 2, None),
        ((24, 12), S(1, 3), (4, 6, 12), 2, S(2, 3)),
        ((4, 6, 4), S(2), (4, 6, 2, 2), 2, S(2)),
        ((4, 6, 5, 2), S(2), (4, 6, 10), 2, S(2, 1, 2)),
        ((4, 6, 10), S(2), (4, 6, 5, 2), 2, None),
        ((4, 6, 10), S(2, 1, 2), (4, 6, 5, 2), 2, S(2)),
        ((3, 4), S(0), (12,), 4, S(0, 1, 2)),
        ((3, 5), S(0), (15,), 4, S(0, 1, 5)),
        ((3, 2), S(0), (6,), 4, S(0)),
        ((12,), S(0), (3, 4), 2, None),
        ((12,), S(0), (12, 1), 5, S(0)),
        ((2, 3, 4), S(2), (6, 4), 2, S(1)),
    ],
)
def test_splits_through_reshapes(
    source, split: Split, result, axis_size: int, expected: Split | None
) -> None:
    assert carry(source, split, result, axis_size) == expected


def test_large_shapes_are_followed_at_once() -> None:
    """Units are found among divisors, not by counting."""
    assert carry((999_983, 2**20), S(0), (999_983 * 2**20,), 2) == S(0, 1, 2**20)


def test_strides_that_are_no_reshape_stay_whole() -> None:
    for args in [
        (torch.randn(3, 4), [4, 3], [3, 1]),
        (torch.randn(12), [3, 3], [4, 1]),
        (torch.randn(12), [11], [1], 1),
        (torch.randn(12), [12], [0]),
    ]:
        call = describe(aten.as_strided.default, args, {})
        found = listed(call, RULES[aten.as_strided.default], 2, None)
        assert found and not any(isinstance(one.inputs[0], Split) for one in found)


def test_a_plain_result_asks_for_the_blocked_input() -> None:
    call = describe(aten.view.default, (torch.randn(12), [3, 4]), {})
    assert Signature((S(0, 3),), (S(1),)) in RULES[aten.view.default].signatures(call, 2, [[]])


def test_repeat_makes_blocks() -> None:
    call = describe(aten.repeat.default, (torch.randn(4), [3]), {})
    found = RULES[aten.repeat.default].signatures(call, 2, [[]])
    assert Signature((S(0),), (S(0, 3),)) in found and Signature((B,), (S(0, 1, 4),)) in found


def test_a_split_dim_that_gets_one_element_is_not_squeezed() -> None:
    call = describe(aten.squeeze.dim, (torch.randn(2, 3), 0), {})
    assert call.outputs == (TensorMeta((2, 3), torch.float32),)
    assert Signature((S(0),), (S(0),)) in RULES[aten.squeeze.dim].signatures(call, 2, [[]])


def test_two_axes_split_what_is_merged() -> None:
    """The outer dim on the inner axis and the other way round, each along the dims the other leaves."""
    args, rule = (torch.randn(4, 6, 5), [24, 5]), RULES[aten.view.default]
    by_last, by_first = Signature((S(2),), (S(1),)), Signature((S(0),), (S(0),))
    prove_nd(aten.view.default, args, {}, [by_last, by_first], (2, 2), rule)
    prove_nd(aten.view.default, args, {}, [Signature((S(1),), (S(0, 4),)), by_first], (3, 2), rule)
    prove_nd(aten.view.default, args, {}, [by_first, Signature((P,), (P,))], (2, 3), rule)


def test_lazy_conjugates_become_real_before_they_are_sent() -> None:
    x = torch.complex(torch.randn(5, 3), torch.randn(5, 3))
    for op in (aten._conj.default, aten._conj_copy.default, aten._neg_view.default):
        assert wrong_signatures(op, (x,), {}, RULES[op], 3) == []
        call = describe(op, (x,), {})
        assert Signature((P,), (P,)) in RULES[op].signatures(call, 2, [()])
        shard = TensorShard(call.inputs[0], (B,), (2,), (1,))
        local = RULES[op].local
        assert local is not None
        run, args, kwargs = local(LocalCall(op, (x,), {}, [shard], [shard]))
        assert not run(*args, **kwargs).is_conj() and not run(*args, **kwargs).is_neg()
