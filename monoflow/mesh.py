"""Placements: a device type and a named grid of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import PlacementError


@dataclass(frozen=True)
class Placement:
    """A device type and a grid of ranks, one name per axis, outermost axis first.

    `ranks` lists the grid in row-major order; `shape` is its extent along each axis.
    """

    device_type: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The rank's position in the grid, one index per axis."""
        if rank not in self.ranks:
            raise PlacementError(f"rank {rank} is not in {self}")
        index, coordinate = self.ranks.index(rank), []
        for extent in reversed(self.shape):
            index, position = divmod(index, extent)
            coordinate.append(position)
        return tuple(reversed(coordinate))

    def group(self, axis: int, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axis`, in axis order (`rank` included)."""
        position = list(self.coordinate(rank))
        members = []
        for index in range(self.shape[axis]):
            position[axis] = index
            members.append(self.rank_at(tuple(position)))
        return tuple(members)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at a grid position."""
        index = 0
        for extent, position in zip(self.shape, coordinate, strict=True):
            index = index * extent + position
        return self.ranks[index]

    def __str__(self) -> str:
        extents = " x ".join(f"{name}={n}" for name, n in zip(self.axes, self.shape, strict=True))
        return f"placement({self.device_type}: {extents}, ranks {list(self.ranks)})"


def placement(device_type: str, ranks: Sequence, axes: Sequence[str] | None = None) -> Placement:
    """A placement from a (nested) list of ranks, as in OneFlow.

    Args:
        device_type: "cpu", "cuda", "xpu", "mps" or another torch device type.
        ranks: ranks as a regular nested list: `[0, 1]` or `[[0, 1], [2, 3]]`.
        axes: one name per axis; "axis0", "axis1", ... when left out.

    Raises:
        PlacementError: the grid is ragged or empty, a rank is repeated or negative, or the number of
            names differs from the number of axes.
    """
    try:
        grid = np.array(ranks)
    except ValueError:
        raise PlacementError(f"the grid of ranks is ragged: {ranks!r}; give rows of equal length") from None
    if grid.size == 0 or grid.ndim == 0 or grid.dtype.kind != "i" or grid.min() < 0:
        raise PlacementError(f"ranks must be a grid of non-negative integers, got {ranks!r}")
    flat = grid.flatten().tolist()
    if len(set(flat)) != len(flat):
        raise PlacementError(f"a rank appears twice in {ranks!r}; every device holds one position")
    names = tuple(axes) if axes is not None else tuple(f"axis{i}" for i in range(grid.ndim))
    if len(names) != grid.ndim:
        raise PlacementError(f"{len(names)} axis names {names} for a grid of {grid.ndim} axes {grid.shape}")
    return Placement(device_type, tuple(flat), grid.shape, names)
