"""Factories: every rank makes its own part, whatever lies uneven or empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from monoflow.sbp.layout import B, P, S
from monoflow.sbp.oracle import describe, missing_signatures, prove_nd, wrong_signatures
from monoflow.sbp.rules.factory import RULES
from monoflow.sbp.signature import LocalCall, Signature, TensorMeta, TensorShard

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(5, 4)
BF16 = {"dtype": torch.bfloat16}

CASES: list[tuple[Callable, tuple[Any, ...], dict[str, Any]]] = [
    (aten.linspace.Tensor_Tensor, (torch.tensor(0.5), torch.tensor(2.0), 7), {}),
    (aten.logspace.Scalar_Tensor, (0.5, torch.tensor(2.0), 7), {}),
    (aten.full.default, ([5, 4], 2.5), {}),
    (aten.full.default, ([5, 4], 0), {"dtype": torch.int64}),
    (aten.zeros.default, ([5, 4],), BF16),
    (aten.ones.default, ([5, 4],), {"dtype": torch.bool}),
    (aten.empty.memory_format, ([5, 4],), {}),
    (aten.empty_strided.default, ([5, 4], [1, 5]), {}),
    (aten.empty_permuted.default, ([5, 4], [1, 0]), {}),
    (aten.new_full.default, (X, [3, 7], 2.5), {}),
    (aten.new_zeros.default, (X, [3, 7]), BF16),
    (aten.new_ones.default, (X, [3]), {}),
    (aten.new_empty.default, (X, [3]), {}),
    (aten.new_empty_strided.default, (X, [3, 5], [5, 1]), {}),
    (aten.zeros_like.default, (X,), {"memory_format": torch.preserve_format}),
    (aten.ones_like.default, (X,), BF16),
    (aten.full_like.default, (X, -1.5), {}),
    (aten.full_like.default, (X, 0.0), {"memory_format": torch.contiguous_format}),
    (aten.empty_like.default, (X,), {}),
    (aten.fill.Scalar, (X, 2), {}),
    (aten.fill.Tensor, (X, torch.randn(())), {}),
    (aten.zero.default, (X,), {}),
    (aten.scalar_tensor.default, (3.0,), {}),
    (aten.scalar_tensor.default, (0,), {}),
    (aten.arange.default, (7,), {}),
    (aten.arange.default, (7,), BF16),
    (aten.arange.default, (2.5,), {}),
    (aten.arange.start, (-3, 6), {"dtype": torch.int32}),
    (aten.arange.start_step, (1, 12, 3), {}),
    (aten.arange.start_step, (5, -6, -2), {}),
    (aten.arange.start_step, (0, 1, 0.1), {}),
    (aten.linspace.default, (0.0, 1.0, 7), {}),
    (aten.logspace.default, (0.0, 1.0, 5), {}),
    (aten.eye.default, (5,), {}),
    (aten.eye.m, (3, 6), {"dtype": torch.int64}),
    (aten.tril_indices.default, (3, 4, 1), {}),
    (aten.triu_indices.default, (4, 3), {}),
]
IDS = [f"{op.__name__}-{i}" for i, (op, _, _) in enumerate(CASES)]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=IDS)
@pytest.mark.parametrize("axis_size", [1, 2, 3, 4])
def test_listed_signatures_are_exact(op: Callable, args, kwargs, axis_size: int) -> None:
    assert wrong_signatures(op, args, kwargs, RULES[op], axis_size) == []


@pytest.mark.parametrize(("op", "args", "kwargs"), [c for c in CASES if "empty" not in c[0].__name__])
def test_no_plain_signature_is_missing(op: Callable, args, kwargs) -> None:
    """Ones of dtype bool are their own sum, which is of no use."""
    missing = missing_signatures(op, args, kwargs, RULES[op], 2)
    assert [one for one in missing if not (kwargs.get("dtype") == torch.bool and P in one.outputs)] == []


@pytest.mark.parametrize(("op", "args", "kwargs"), [c for c in CASES if "tensor" not in c[0].__name__])
def test_two_axes_along_one_dim(op: Callable, args, kwargs) -> None:
    inputs = tuple(B for one in args if isinstance(one, torch.Tensor))
    if op is aten.fill.Tensor:
        inputs = (S(0), B)
    one = Signature(inputs, (S(0),))
    prove_nd(op, args, kwargs, [one, one], (2, 3), RULES[op])


def listed(op: Callable, *args: Any, **kwargs: Any) -> set[Signature]:
    call = describe(op, args, kwargs)
    return set(RULES[op].signatures(call, 2, [[] for _ in call.inputs]))


def test_zeros_can_be_partial_and_other_numbers_cannot() -> None:
    nothing = Signature((), (P,))
    assert nothing in listed(aten.zeros.default, [3]) and nothing in listed(aten.full.default, [3], 0)
    assert nothing not in listed(aten.ones.default, [3]) and nothing not in listed(aten.full.default, [3], 1)
    assert Signature((S(0),), (P,)) in listed(aten.new_zeros.default, X, [3])


def test_a_tensor_that_is_looked_at_may_lie_anyhow() -> None:
    found = listed(aten.ones_like.default, X)
    assert {Signature((i,), (o,)) for i in (S(0), S(1), P) for o in (S(0), S(1), B)} <= found
    call = describe(aten.zeros_like.default, (torch.zeros(4, 8),), {})
    assert Signature((S(1, 2),), (S(1, 2),)) in RULES[call.op].signatures(call, 2, [[S(1, 2)]])


def local_args(op: Callable, args: tuple[Any, ...], rank: int) -> tuple[Callable, tuple[Any, ...]]:
    """What rank `rank` of 4 runs when a result of ten elements is S(0)."""
    shard = TensorShard(TensorMeta((10,), torch.int64), (S(0),), (4,), (rank,))
    local = RULES[op].local
    assert local is not None
    run, local_args_, _ = local(LocalCall(op, args, {}, [], [shard]))
    return run, local_args_


def test_ranges_start_at_the_offset_of_the_rank() -> None:
    assert local_args(aten.arange.default, (10,), 1) == (aten.arange.start_step, (3, 6, 1))
    assert local_args(aten.arange.default, (10,), 3) == (aten.arange.start_step, (9, 10, 1))
    assert local_args(aten.arange.start_step, (5, 25, 2), 2) == (aten.arange.start_step, (17, 23, 2))
    assert local_args(aten.zeros.default, ([10],), 3) == (aten.zeros.default, ([1],))


def test_a_blocked_range_is_taken_from_the_whole() -> None:
    shard = TensorShard(TensorMeta((8,), torch.int64), (S(0, 2),), (2,), (1,))
    local = RULES[aten.arange.default].local
    assert local is not None
    run, args, kwargs = local(LocalCall(aten.arange.default, (8,), {}, [], [shard]))
    assert run(*args, **kwargs).tolist() == [2, 3, 6, 7]


def test_a_range_of_integers_is_not_linear_in_its_ends() -> None:
    op = aten.linspace.Tensor_Tensor
    args, both = (torch.tensor(-3.0), torch.tensor(4), 9), Signature((P, P), (P,))
    for dtype, is_linear in ((torch.int64, False), (torch.float32, False)):
        call = describe(op, args, {"dtype": dtype})
        assert (both in RULES[op].signatures(call, 2, [(), ()])) == is_linear
        assert wrong_signatures(op, args, {"dtype": dtype}, RULES[op], 3) == []
    call = describe(op, (torch.tensor(-3.0), torch.tensor(4.0), 9), {})
    assert both in RULES[op].signatures(call, 2, [(), ()])
