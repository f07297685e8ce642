"""Which boxes of which tensors this rank and the others hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..sbp.layout import B, NdSbp, Partial, dim_runs, is_held, text
from ..tensor import from_placements
from .boxes import Box, extents


class Layout(NamedTuple):
    """How a tensor lies on a grid of ranks: the ranks in row-major order, their grid, one SBP per axis."""

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    sbp: NdSbp


class Part(NamedTuple):
    """A box of the whole tensor, and the same elements as a box of what the rank holds."""

    box: Box
    local: Box


@dataclass(frozen=True)
class Held:
    """A global tensor as this rank has it.

    Attributes:
        shape, dtype: of the whole tensor.
        local: this rank's memory of it, cut as `layout` says.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    local: torch.Tensor


def held(tensor: torch.Tensor, ranks: Sequence[int]) -> Held:
    """A DTensor, or a plain tensor that is whole on each of `ranks`. Sends nothing."""
    value = tensor.detach()
    if not isinstance(value, DTensor):
        layout = Layout(tuple(ranks), (len(ranks),), (B,))
        return Held(tuple(value.shape), value.dtype, layout, value)
    grid = value.device_mesh.mesh
    layout = Layout(tuple(grid.flatten().tolist()), tuple(grid.shape), from_placements(value.placements))
    return Held(tuple(value.shape), value.dtype, layout, value.to_local())


class Holders:
    """Works out who holds what, once for tensors of the same shape and layout."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[Part]] = {}

    def parts(self, name: str, shape: Sequence[int], layout: Layout, rank: int) -> list[Part]:
        """What a rank holds of a tensor.

        Raises:
            CheckpointError: the ranks hold partial sums of it.
        """
        if any(isinstance(one, Partial) for one in layout.sbp):
            raise CheckpointError(
                f"{name} is {text(layout.sbp)}: its ranks hold partial values, which a checkpoint cannot; "
                f"redistribute it first"
            )
        if rank not in layout.ranks:
            return []
        key = (tuple(shape), layout, rank)
        if key not in self._known:
            self._known[key] = list(_parts(shape, layout, rank))
        return self._known[key]

    def owners(self, name: str, shape: Sequence[int], layout: Layout) -> Mapping[Box, list[int]]:
        """Every box that some rank holds, with all ranks that hold it; the boxes make up the tensor."""
        found: dict[Box, list[int]] = {}
        for rank in layout.ranks:
            for part in self.parts(name, shape, layout, rank):
                found.setdefault(part.box, []).append(rank)
        return found


def _parts(shape: Sequence[int], layout: Layout, rank: int) -> Iterator[Part]:
    place = np.unravel_index(layout.ranks.index(rank), layout.mesh)
    coordinate = tuple(int(index) for index in place)
    if not is_held(layout.sbp, coordinate):
        return
    by_dim = [dim_runs(size, dim, layout.sbp, layout.mesh, coordinate) for dim, size in enumerate(shape)]
    for box in itertools.product(*(_with_local(one) for one in by_dim)):
        yield Part(tuple(there for there, _ in box), tuple(here for _, here in box))


def _with_local(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of the whole dim, with where they are in the rank's own dim."""
    at = 0
    for start, stop in ranges:
        yield (start, stop), (at, at + stop - start)
        at += stop - start


def memory_of(local: torch.Tensor, part: Part, box: Box) -> torch.Tensor:
    """The memory of a box that lies in a part that this rank holds. A view."""
    slices = tuple(
        slice(at + start - low, at + stop - low)
        for (start, stop), (low, _), (at, _) in zip(box, part.box, part.local, strict=True)
    )
    assert len(slices) == local.dim(), (box, extents(part.local), tuple(local.shape))
    return local[slices]
