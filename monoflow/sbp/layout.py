"""SBP: how a tensor lies along one mesh axis, and what a rank then holds of it.

`S(dim, blocks, unit)` sees the dim as (blocks, m, unit) and chunks the m units of every block over the
ranks, as torch.chunk does. `S(0)` is torch's Shard(0). `blocks` arises where an inner dim is merged into
an outer one (and in fused projections), `unit` where an outer dim is merged with an inner one and its
chunks are uneven. `At(stage)` puts the whole tensor on one coordinate of the axis; the others hold nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import LayoutError


@dataclass(frozen=True, order=True)
class Split:
    """Each of the dim's `blocks` equal blocks is chunked over the axis, `unit` elements at a time."""

    dim: int
    blocks: int = 1
    unit: int = 1

    def __str__(self) -> str:
        extra = f",{self.blocks}" if self.blocks != 1 or self.unit != 1 else ""
        return f"S({self.dim}{extra}{f',{self.unit}' if self.unit != 1 else ''})"


@dataclass(frozen=True, order=True)
class Broadcast:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, order=True)
class Partial:
    """The tensor is the elementwise reduction ("sum", "max" or "min") of what the ranks hold."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True, order=True)
class At:
    """One coordinate of the axis, a stage of a pipeline, holds the whole tensor; the others hold nothing."""

    stage: int

    def __str__(self) -> str:
        return f"@{self.stage}"


Sbp = Split | Broadcast | Partial | At
NdSbp = tuple[Sbp, ...]

B = Broadcast()
P = Partial()


def S(dim: int, blocks: int = 1, unit: int = 1) -> Split:
    """A split of `dim`; see `Split`."""
    return Split(dim, blocks, unit)


def chunk_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range that torch.chunk gives part `index` of `total` elements (may be empty)."""
    size = -(-total // parts)
    return min(index * size, total), min((index + 1) * size, total)


def num_units(size: int, split: Split) -> int:
    """How many units each block of a dim of `size` elements has. Raises LayoutError if they do not fit."""
    whole = split.blocks * split.unit
    if size % whole:
        raise LayoutError(f"{split} needs a dim divisible by {whole}, got {size}")
    return size // whole


def is_even(size: int, split: Split, axis_size: int) -> bool:
    """Whether every rank of the axis gets the same share of a dim of `size` elements."""
    whole = split.blocks * split.unit
    return size % whole == 0 and (size // whole) % axis_size == 0


def canonical(size: int, split: Split, axis_size: int) -> Split:
    """The one name of this split: the smallest unit that gives the same shares."""
    if split.unit == 1:
        return split
    if is_even(size, split, axis_size):
        return replace(split, unit=1)
    whole = size // split.blocks
    share = -(-whole // (split.unit * axis_size)) * split.unit
    for unit in range(1, split.unit):
        if whole % unit == 0 and -(-whole // (unit * axis_size)) * unit == share:
            return replace(split, unit=unit)
    return split


def fits(size: int, split: Split, axis_size: int) -> bool:
    """Whether the split is allowed: blocks and units divide the dim, and a blocked split is even."""
    if size % (split.blocks * split.unit):
        return False
    return split.blocks == 1 or is_even(size, split, axis_size)


def local_dim(size: int, split: Split, axis_size: int, index: int) -> int:
    """The extent that rank `index` of the axis holds of a dim of `size` elements."""
    start, stop = chunk_range(num_units(size, split), axis_size, index)
    return split.blocks * (stop - start) * split.unit


def is_held(sbp: Sequence[Sbp], coordinate: Sequence[int]) -> bool:
    """Whether the rank at `coordinate` has a part in a tensor: not if it lies at other stages."""
    return all(not isinstance(one, At) or one.stage == at for one, at in zip(sbp, coordinate, strict=True))


def first_holder(sbp: Sequence[Sbp]) -> tuple[int, ...]:
    """The first coordinate that has a part in a tensor, one of those with the largest."""
    return tuple(one.stage if isinstance(one, At) else 0 for one in sbp)


def local_shape(
    shape: Sequence[int], sbp: Sequence[Sbp], mesh: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The shape that the rank at `coordinate` holds of a tensor of global `shape`; (0,) for nothing."""
    local = list(shape)
    for one, axis_size, index in zip(sbp, mesh, coordinate, strict=True):
        if isinstance(one, At) and index != one.stage:
            return (0,)
        if isinstance(one, Split):
            local[one.dim] = local_dim(local[one.dim], one, axis_size, index)
    return tuple(local)


def take(tensor: torch.Tensor, split: Split, axis_size: int, index: int) -> torch.Tensor:
    """The shard of `tensor` that rank `index` of an axis holds. A view where torch allows one."""
    dim = split.dim
    units = num_units(tensor.shape[dim], split)
    start, stop = chunk_range(units, axis_size, index)
    if split.blocks == 1:
        return tensor.narrow(dim, start * split.unit, (stop - start) * split.unit)
    blocked = tensor.unflatten(dim, (split.blocks, units * split.unit))
    return blocked.narrow(dim + 1, start * split.unit, (stop - start) * split.unit).flatten(dim, dim + 1)


def join(shards: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
    """The inverse of `take`: the whole dim from the shards of every rank of the axis, in axis order."""
    if split.blocks == 1:
        return torch.cat(list(shards), split.dim)
    pieces = [shard.unflatten(split.dim, (split.blocks, -1)) for shard in shards]
    return torch.cat(pieces, split.dim + 1).flatten(split.dim, split.dim + 1)


def shard(
    tensor: torch.Tensor, sbp: Sequence[Sbp], mesh: Sequence[int], coordinate: Sequence[int]
) -> torch.Tensor:
    """What the rank at `coordinate` holds of the global `tensor`.

    Under P(sum) the first rank of the axis holds the value and the others zeros; under P(max) and
    P(min) every rank holds the value. A rank at another stage than the tensor holds an empty one.
    """
    if not is_held(sbp, coordinate):
        return tensor.new_empty(0)
    for one, axis_size, index in zip(sbp, mesh, coordinate, strict=True):
        if isinstance(one, Split):
            tensor = take(tensor, one, axis_size, index)
        elif isinstance(one, Partial) and one.op == "sum" and index:
            tensor = torch.zeros_like(tensor)
    return tensor


def reduce(values: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The elementwise reduction of equally shaped tensors, left to right."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    total = values[0]
    for value in values[1:]:
        total = combine(total, value)
    return total


def unshard(
    locals_: Mapping[tuple[int, ...], torch.Tensor], sbp: Sequence[Sbp], mesh: Sequence[int]
) -> torch.Tensor:
    """The global tensor from what every coordinate holds. Replicas are taken from index 0.

    Coordinates that hold nothing may be left out.
    """

    def build(prefix: tuple[int, ...]) -> torch.Tensor:
        axis = len(prefix)
        if axis == len(mesh):
            return locals_[prefix]
        one = sbp[axis]
        if isinstance(one, Broadcast):
            return build((*prefix, 0))
        if isinstance(one, At):
            return build((*prefix, one.stage))
        parts = [build((*prefix, index)) for index in range(mesh[axis])]
        return join(parts, one) if isinstance(one, Split) else reduce(parts, one.op)

    return build(())


def dim_runs(
    size: int, dim: int, sbp: Sequence[Sbp], mesh: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The global index ranges, in local order, that a rank holds of one dim of `size` elements."""
    index = torch.arange(size if is_held(sbp, coordinate) else 0)
    for one, axis_size, position in zip(sbp, mesh, coordinate, strict=True):
        if isinstance(one, Split) and one.dim == dim:
            index = take(index, replace(one, dim=0), axis_size, position)
    if len(index) == 0:
        return ()
    breaks = (torch.diff(index) != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(index)]
    return tuple((int(index[a]), int(index[b - 1]) + 1) for a, b in itertools.pairwise(edges))


def text(sbp: Sequence[Sbp]) -> str:
    """`(S(0), B)`; one axis alone prints without brackets."""
    return str(sbp[0]) if len(sbp) == 1 else f"({', '.join(map(str, sbp))})"
