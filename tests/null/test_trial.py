"""Trial by running: what is proven for ops that nobody wrote a rule for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from monoflow.sbp.layout import B, P, S
from monoflow.sbp.oracle import describe
from monoflow.sbp.signature import OpCall, Signature, TensorMeta
from monoflow.sbp.trial import Found, confirm, refusal, search
from monoflow.sbp.trial_args import SIZES, Shrink, find_arguments

from .rule_trial import values


def operator(function: Callable) -> torch._ops.OpOverload:
    """The function as an operator of torch.library."""
    torch.library.custom_op(f"trial_tests::{function.__name__}", function, mutates_args=())
    return getattr(torch.ops.trial_tests, function.__name__).default


def found(op: Callable, *args: object, axis_size: int = 2) -> Found:
    return search(describe(op, args, {}), axis_size)


def listed(op: Callable, *args: object, axis_size: int = 2) -> set[str]:
    return set(map(str, found(op, *args, axis_size=axis_size).signatures))


def single(*shape: int) -> Tensor:
    return values(*shape, dtype=torch.float32)


@operator
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


@operator
def scaled_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad * weight, (grad * x).sum(0)


def test_splits_sums_and_linearity_are_found() -> None:
    assert listed(scaled, single(32, 48), single(48)) == {
        "S(0), B -> S(0)",
        "S(1), S(0) -> S(1)",
        "B, P(sum) -> P(sum)",
        "P(sum), B -> P(sum)",
    }
    backward = listed(scaled_backward, single(32, 48), single(32, 48), single(48))
    assert {"S(0), S(0), B -> S(0), P(sum)", "S(1), S(1), S(0) -> S(1), S(0)"} <= backward
    assert not {one for one in backward if one.startswith(("S(0), B", "B, S(0)"))}


def test_uneven_and_empty_shards_and_wide_axes_are_proven_at_the_size_of_the_call() -> None:
    assert "S(0), B -> S(0)" in listed(scaled, single(7, 6), single(6), axis_size=3)
    assert "S(0), B -> S(0)" in listed(scaled, single(3, 6), single(6), axis_size=8)
    assert "S(1), S(0) -> S(1)" in listed(scaled, single(512, 8192), single(8192), axis_size=16)


@operator
def pair_sums(x: Tensor) -> Tensor:
    return x.reshape(-1, 2, x.shape[1]).sum(1)


@operator
def by_groups(x: Tensor) -> Tensor:
    parts = x.reshape(x.shape[0], -1, 64)
    return (parts / parts.abs().amax(-1, keepdim=True)).reshape(x.shape)


def test_what_holds_only_for_some_sizes_is_listed_only_there() -> None:
    assert "S(0) -> S(0)" in listed(pair_sums, single(32, 5))
    assert "S(0) -> S(0)" not in listed(pair_sums, single(30, 5))  # shards of 15 rows: pairs are torn
    assert "S(0) -> S(0)" not in listed(pair_sums, single(32, 5), axis_size=3)
    assert "S(1) -> S(1)" in listed(by_groups, single(5, 256))
    assert "S(1) -> S(1)" not in listed(by_groups, single(5, 192))
    assert "S(0) -> S(0)" in listed(by_groups, single(5, 192))


@operator
def clamped(x: Tensor) -> Tensor:
    return x.clamp(-100, 100)


@operator
def soft_capped(x: Tensor) -> Tensor:
    return 1000 * torch.tanh(x / 1000)


@operator
def row_mean(x: Tensor) -> Tensor:
    return x.mean(0)


@operator
def above(x: Tensor) -> Tensor:
    return (x > 100).any(1)


@operator
def turned(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[1]).cos()[None, :, None]


@operator
def cut_off(x: Tensor) -> Tensor:
    kept = x.clone()
    kept[1000:] = 0
    return kept


@operator
def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


@operator
def num_positive(x: Tensor) -> Tensor:
    return (x > 0).sum()


@operator
def first_of_each_kind(x: Tensor) -> Tensor:
    """A capacity: rows beyond a share of the whole batch are dropped."""
    kind, kept = x.argmax(1), torch.zeros_like(x)
    for one in range(x.shape[1]):
        rows = (kind == one).nonzero().flatten()[: max(1, x.shape[0] // x.shape[1])]
        kept[rows] = x[rows] * (one + 1)
    return kept


@pytest.mark.parametrize(
    ("op", "shape", "expected"),
    [
        (clamped, (32, 48), {"S(0) -> S(0)", "S(1) -> S(1)"}),  # linear only where it does not clamp
        (soft_capped, (32, 48), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        (row_mean, (32, 48), {"S(1) -> S(0)", "P(sum) -> P(sum)"}),  # a mean of parts is no part of the mean
        (above, (32, 48), {"S(0) -> S(0)"}),  # the flag of a part is no flag of the whole
        (turned, (8, 64, 48), {"S(0) -> S(0)", "S(2) -> S(2)", "P(sum) -> P(sum)"}),  # positions
        (cut_off, (2048, 6), {"S(1) -> S(1)", "P(sum) -> P(sum)"}),  # right for small sizes only
        (standardized, (32, 48), {"S(1) -> S(1)"}),
        (num_positive, (32, 48), {"S(0) -> P(sum)", "S(1) -> P(sum)"}),
        (first_of_each_kind, (64, 8), set()),
    ],
)
def test_nothing_is_listed_that_holds_by_chance(
    op: Callable, shape: tuple[int, ...], expected: set[str]
) -> None:
    assert listed(op, single(*shape)) == expected


@operator
def looked_up(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


@operator
def heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(*x.shape[:-1], num_heads, -1).transpose(-2, -3).contiguous()


@operator
def packed(x: Tensor, weight: Tensor) -> Tensor:
    assert x.shape[1] == 2 * weight.shape[0], "two columns to a row"
    return x[:, ::2] @ weight


@operator
def logarithm(x: Tensor) -> Tensor:
    assert (x > 0).all(), "x must be positive"
    return x.log()


def test_arguments_are_found_that_the_op_takes() -> None:
    index = torch.zeros(8, 64, dtype=torch.int64)
    assert listed(looked_up, single(1000, 48), index) == {
        "B, S(0) -> S(0)",
        "B, S(1) -> S(1)",
        "S(1), B -> S(2)",
        "P(sum), B -> P(sum)",
    }
    assert {"S(0) -> S(0)", "S(1) -> S(2)"} <= listed(heads, single(8, 64, 48), 12)
    assert {"S(0), B -> S(0)", "S(1), S(0) -> P(sum)"} <= listed(packed, single(8, 64), single(32, 40))
    assert listed(logarithm, single(8, 64).abs() + 1) == {"S(0) -> S(0)", "S(1) -> S(1)"}


@operator
def norm_in_single(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_and_ops_that_compute_in_another_one(dtype: torch.dtype) -> None:
    meta = TensorMeta((8, 64, 48), dtype)
    call = OpCall(norm_in_single, (meta, TensorMeta((48,), dtype)), {}, (meta,))
    assert set(map(str, search(call, 2).signatures)) == {"S(0), B -> S(0)", "S(1), B -> S(1)"}


@operator
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


_CALLS = [0]


@operator
def counting(x: Tensor) -> Tensor:
    _CALLS[0] += 1
    return x * _CALLS[0]


@operator
def silent(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@operator
def never(x: Tensor) -> Tensor:
    raise RuntimeError("needs another device")


def test_random_stateful_constant_and_failing_ops_are_refused_with_the_reason() -> None:
    meta = TensorMeta((8, 6), torch.float32)

    def tried(op: Callable, one: TensorMeta = meta) -> Found:
        return search(OpCall(op, (one,), {}, (one,)), 2)

    state = torch.random.get_rng_state()
    assert tried(noisy) == Found((), "it draws random numbers")
    assert torch.equal(state, torch.random.get_rng_state())  # the user's random numbers are untouched
    assert tried(counting) == Found((), "it gives another result when it is run again")
    assert tried(silent).signatures == () and "do not change" in tried(silent).reason
    assert tried(never).signatures == () and "needs another device" in tried(never).reason
    assert "complex32" in tried(scaled, TensorMeta((8, 6), torch.complex32)).reason
    assert refusal(torch.ops.aten.add_.Tensor) == "it mutates its arguments"
    assert refusal(torch.ops.aten.bernoulli.default) == "it draws random numbers"
    assert refusal(torch.ops.aten.nonzero.default) == "its output's size depends on data"
    assert refusal(torch.add) == "it is not an operator of torch.library"


def test_no_context_of_the_user_is_seen_by_a_trial() -> None:
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        call = OpCall(row_mean, (TensorMeta((6, 8), torch.float32),), {}, (TensorMeta((8,), torch.float32),))
        assert set(map(str, search(call, 2).signatures)) == {"S(1) -> S(0)", "P(sum) -> P(sum)"}


def test_a_trial_gives_the_same_every_time() -> None:
    call = describe(scaled, (single(32, 48), single(48)), {})
    assert search(call, 2) == search(call, 2)


def test_given_candidates_are_kept_where_they_are_right() -> None:
    call = describe(row_mean, (single(32, 48),), {})
    wrong, right = Signature((S(0),), (P,)), Signature((S(1),), (S(0),))
    assert confirm(call, 2, [wrong, right]).signatures == (right,)
    assert confirm(call, 2, [wrong, Signature((S(0),), (B,))]) == Found((), "no layout but B is exact")


def test_extents_shrink_alike_and_never_to_another() -> None:
    alone = {n: (n, 1) for n in (48, 96, 4096)}
    assert Shrink(frozenset({5}), alone).extents(SIZES["odd"]) == {5: 5, 48: 7, 96: 9, 4096: 11}
    tied = {48: (48, 1), 96: (48, 2), 4096: (4096, 1)}
    assert Shrink(frozenset(), tied).extents(SIZES["odd"]) == {48: 5, 96: 10, 4096: 7}
    assert Shrink(frozenset(), tied).extents(SIZES["odd"], real=[96]) == {48: 48, 96: 96, 4096: 5}
    found = find_arguments(describe(packed, (single(8, 64), single(32, 40)), {}))
    assert not isinstance(found, str)
    given = found.make("odd", seed=0)
    assert given is not None and given[0][0].shape[1] == 2 * given[0][1].shape[0] < 64
