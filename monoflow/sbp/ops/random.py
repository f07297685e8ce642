"""Counter-based randomness: an element depends on (key, op, its flat index in the global tensor) only.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
2014) walked by the element's index, with a start and a second key of its own for every (key, op, lane), so
that streams are not shifted copies of each other. It is written in int64, which torch has on every device:
multiplication wraps, and a logical right shift is an arithmetic one with its sign bits masked away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .library import LIBRARY

Runs = Sequence[tuple[int, int]]

#: Elements worked on at a time: small enough for a CPU's cache, large enough to hide the calls.
_CPU_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 24


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit value."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_A = _signed(0xBF58476D1CE4E5B9)
_MIX_B = _signed(0x94D049BB133111EB)
_STREAM = _signed(0xD1342543DE82EF95)
_MAX = (1 << 63) - 1


def pack_runs(runs: Sequence[Runs]) -> list[int]:
    """The flat form of per-dim index ranges that the ops take: for each dim, its count, then its ranges."""
    flat: list[int] = []
    for ranges in runs:
        flat.append(len(ranges))
        for start, stop in ranges:
            flat += (start, stop)
    return flat


def unpack_runs(flat: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The inverse of `pack_runs`."""
    runs, at = [], 0
    while at < len(flat):
        stop = at + 1 + 2 * flat[at]
        runs.append(list(zip(flat[at + 1 : stop : 2], flat[at + 2 : stop : 2], strict=True)))
        at = stop
    return runs


def _xor_shift(z: torch.Tensor, amount: int) -> torch.Tensor:
    """z ^= z >>> amount, in place."""
    shifted = z >> amount
    return z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - amount)) - 1))


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer, in place."""
    z = _xor_shift(z, 30).mul_(_MIX_A)
    z = _xor_shift(z, 27).mul_(_MIX_B)
    return _xor_shift(z, 31)


def states(key: torch.Tensor, ops: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The generators of several (op, lane) under one key.

    Returns:
        (num, 3) int64: for each its start, its second key, and the step of its walk. The step is the same for
        all; a compiler that knew it would reason about products that wrap.
    """
    assert key.dtype == torch.int64 and key.dim() == 0, f"a key is a 0-dim int64 tensor, not {key}"
    offsets = [_signed((op * _STREAM + lane * _GOLDEN) & (2**64 - 1)) for op, lane in ops]
    start = _mix(_mix(key + _GOLDEN) + torch.tensor(offsets, device=key.device))
    return torch.stack([start, _mix(start + _GOLDEN), torch.full_like(start, _GOLDEN)], 1)


class _Stream:
    """The generator of one (key, op, lane), from its row of `states`."""

    def __init__(self, state: torch.Tensor) -> None:
        self.start, self.second, self.step = state.unbind()

    def raw(self, index: torch.Tensor) -> torch.Tensor:
        """64 bits per index of which the high ones are well mixed. Overwrites and returns `index`."""
        z = index.mul_(self.step).add_(self.start)
        z = _xor_shift(z, 30).mul_(_MIX_A).bitwise_xor_(self.second)
        return _xor_shift(z, 27).mul_(_MIX_B)

    def full(self, index: torch.Tensor) -> torch.Tensor:
        """64 well mixed bits per index. Overwrites and returns `index`."""
        return _xor_shift(self.raw(index), 31)


def _high(z: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` high bits of z as non-negative integers, in place."""
    return z.bitwise_right_shift_(64 - count).bitwise_and_((1 << count) - 1)


def _ids(ranges: Runs, stride: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Positions [start, stop) of the concatenated ranges, times `stride`."""
    parts, at = [], 0
    for low, high in ranges:
        a, b = max(start, at), min(stop, at + high - low)
        if a < b:
            parts.append(torch.arange(low + a - at, low + b - at, device=device))
        at += high - low
    ids = parts[0] if len(parts) == 1 else torch.cat(parts)
    return ids.mul_(stride) if stride != 1 else ids


def _extent(ranges: Runs) -> int:
    return sum(stop - start for start, stop in ranges)


def _merge_whole_dims(runs: Sequence[Runs], shape: Sequence[int]) -> tuple[list[Runs], list[int]]:
    """The same elements with every wholly held dim merged into the dim before it."""
    merged: list[Runs] = [[(0, 1)]]
    sizes = [1]
    for ranges, size in zip(runs, shape, strict=True):
        if list(ranges) == [(0, size)]:
            merged[-1] = [(start * size, stop * size) for start, stop in merged[-1]]
            sizes[-1] *= size
        else:
            merged.append(ranges)
            sizes.append(size)
    return merged, sizes


def _chunks(
    runs: Sequence[Runs], shape: Sequence[int], device: torch.device, chunk: int
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """The global flat indices of a shard seen as (rows, last dim), block by block of `chunk` elements."""
    (*outer, last), sizes = _merge_whole_dims(runs, shape)
    stride = sizes[-1]
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for ranges, size in zip(reversed(outer), reversed(sizes[:-1]), strict=True):
        ids = _ids(ranges, stride, 0, _extent(ranges), device)
        rows = (ids[:, None] + rows).flatten()
        stride *= size
    num_columns = _extent(last)
    height = max(1, chunk // num_columns)
    for left in range(0, num_columns, chunk):
        right = min(left + chunk, num_columns)
        columns = _ids(last, 1, left, right, device)
        for top in range(0, len(rows), height):
            part = rows[top : top + height]
            yield slice(top, top + height), slice(left, right), part[:, None] + columns


def _fill(
    device: torch.device,
    shape: Sequence[int],
    dtype: torch.dtype,
    global_shape: Sequence[int] | None,
    runs: Sequence[int] | None,
    chunk: int | None,
) -> tuple[torch.Tensor, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """The result to fill and, for each block of it, (the block, the global flat indices of its elements)."""
    whole = list(shape if global_shape is None else global_shape)
    ranges = [[(0, size)] for size in whole] if runs is None else unpack_runs(runs)
    held = [_extent(one) for one in ranges]
    assert held == list(shape), f"runs hold a shape of {held}, the result has {list(shape)}"
    out = torch.empty(list(shape), dtype=dtype, device=device)
    if out.numel() == 0:
        return out, iter(())
    if chunk is None:
        chunk = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    grid = out.view(-1, _extent(_merge_whole_dims(ranges, whole)[0][-1]))
    return out, ((grid[r, c], index) for r, c, index in _chunks(ranges, whole, device, chunk))


#: Of every op, how many generators it draws from.
_LANES = {"uniform": 1, "normal": 2, "bits": 1}


def lanes(kind: str, op: int) -> list[tuple[int, int]]:
    """The generators, (op, lane), that an op of a kind ("uniform", "normal", "bits") draws from."""
    return [(op, lane) for lane in range(_LANES[kind])]


def draw(
    kind: str,
    state: torch.Tensor,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.int64,
    global_shape: Sequence[int] | None = None,
    runs: Sequence[int] | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """What the op of a kind gives, from the `states` of its `lanes`.

    Args:
        chunk: elements worked on at a time; None for what suits the device. A compiler has its own blocks.
    """
    out, blocks = _fill(state.device, shape, dtype, global_shape, runs, chunk)
    streams = [_Stream(one) for one in state.unbind()]
    for block, index in blocks:
        _DRAWN[kind](block, index, *streams)
    return out


def _uniform(block: torch.Tensor, index: torch.Tensor, stream: _Stream) -> None:
    dtype = block.dtype
    drawn = _high(stream.raw(index), 53 if dtype == torch.float64 else 24)
    if dtype.itemsize >= 4:
        block.copy_(drawn).mul_(2.0 ** -(53 if dtype == torch.float64 else 24))
    else:  # rounding to a short float could give 1
        block.copy_(drawn.float().mul_(2.0**-24).clamp_(max=1 - torch.finfo(dtype).eps / 2))


def _normal(block: torch.Tensor, index: torch.Tensor, radius: _Stream, angle: _Stream) -> None:
    if block.dtype == torch.float64:
        turns = _high(angle.raw(index.clone()), 53).double().mul_(2.0**-53)
        chance = _high(radius.raw(index), 53).double().add_(0.5).mul_(2.0**-53)
    else:  # 64 bits are enough for both: 40 for the radius (tails to 7.5 sigma), 24 for the angle
        z = radius.full(index)
        turns = (z & ((1 << 24) - 1)).float().mul_(2.0**-24)
        chance = _high(z, 40).float().add_(0.5).mul_(2.0**-40)
    block.copy_(chance.log_().mul_(-2).sqrt_().mul_(turns.mul_(2 * math.pi).cos_()))


def _bits(block: torch.Tensor, index: torch.Tensor, stream: _Stream) -> None:
    block.copy_(stream.full(index).bitwise_and_(_MAX))


_DRAWN = {"uniform": _uniform, "normal": _normal, "bits": _bits}


def _kernel(kind: str) -> Callable[..., torch.Tensor]:
    def op(key: torch.Tensor, op: int, shape: Sequence[int], **options: Any) -> torch.Tensor:
        return draw(kind, states(key, lanes(kind, op)), shape, **options)

    return op


_ARGS = "Tensor key, int op, SymInt[] shape, *"
_PART = "SymInt[]? global_shape=None, SymInt[]? runs=None) -> Tensor"

for _schema in (
    f"uniform({_ARGS}, ScalarType dtype, {_PART}",
    f"normal({_ARGS}, ScalarType dtype, {_PART}",
    f"bits({_ARGS}, {_PART}",
):
    LIBRARY.define(_schema, tags=torch.Tag.pt2_compliant_tag)
for _kind in _LANES:
    LIBRARY.impl(_kind, _kernel(_kind), "CompositeExplicitAutograd")


@torch.library.register_fake("monoflow::uniform", lib=LIBRARY)
@torch.library.register_fake("monoflow::normal", lib=LIBRARY)
def _float_fake(
    key: torch.Tensor,
    op: int,
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    global_shape: Sequence[int] | None = None,
    runs: Sequence[int] | None = None,
) -> torch.Tensor:
    return key.new_empty(shape, dtype=dtype)


@torch.library.register_fake("monoflow::bits", lib=LIBRARY)
def _bits_fake(
    key: torch.Tensor,
    op: int,
    shape: Sequence[int],
    *,
    global_shape: Sequence[int] | None = None,
    runs: Sequence[int] | None = None,
) -> torch.Tensor:
    return key.new_empty(shape, dtype=torch.int64)


#: uniform(key, op, shape, *, dtype, global_shape=None, runs=None): values in [0, 1).
#: normal(...): standard normal values. bits(key, op, shape, *, ...): non-negative int64.
#: `key` is a 0-dim int64 tensor; `op` tells the random ops of a step apart. A shard passes its own `shape`,
#: the `global_shape` and, packed by `pack_runs`, the index ranges it holds of every dim.
uniform = torch.ops.monoflow.uniform.default
normal = torch.ops.monoflow.normal.default
bits = torch.ops.monoflow.bits.default
