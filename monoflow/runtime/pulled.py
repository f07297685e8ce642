"""Micro-batches that ranks pull from one stream as they are free: who gets which, and what becomes of it.

A walk of k micro-batches on n ranks has n * k units of work, each the micro-batch of one rank. The earliest
micro-batches go first, and those that may be smaller last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed.distributed_c10d import Store, _get_default_store

from ..boxing.collectives import AxisMove
from ..boxing.placed import add_part, has_rows
from ..boxing.route import Move
from .accumulate import accumulated
from .board import number_of_groups

Tensor = torch.Tensor


def coordinate_of(unit: int, mesh: Sequence[int]) -> tuple[int, ...]:
    """Where on a mesh, whose last axis is time, a unit of work lies."""
    *shape, _ = mesh
    place: list[int] = []
    for size in reversed(shape):
        unit, index = divmod(unit, size)
        place.append(index)
    return (*reversed(place), unit)


class Units(Protocol):
    """Hands out the units of walks."""

    def start(self) -> None:
        """A walk begins, on all ranks the same one; the walk before is over."""
        ...

    def pull(self, rank: int, total: int) -> int | None:
        """The next unit for a rank; None if all are given out, which every rank sees once a walk.

        Args:
            total: how many there are.
        """
        ...


class Counter:
    """A count for ranks that are all in this process."""

    def __init__(self) -> None:
        self._given = 0

    def start(self) -> None:
        """See `Units`."""
        self._given = 0

    def pull(self, rank: int, total: int) -> int | None:
        """See `Units`."""
        if self._given == total:
            return None
        self._given += 1
        return self._given - 1


class StoreCounter:
    """A count in a store that all ranks reach, a key for every walk.

    Args:
        name: of what all ranks share and nobody else has.
        num_ranks: that pull.
    """

    def __init__(self, store: Store, name: str, num_ranks: int) -> None:
        self._store, self._name, self._num_ranks = store, name, num_ranks
        self._walk = -1

    @classmethod
    def of_job(cls, num_ranks: int) -> StoreCounter:
        """In the store that the ranks joined through; a transport of theirs was made just before."""
        return cls(_get_default_store(), f"monoflow/units/{number_of_groups()}", num_ranks)

    def start(self) -> None:
        """See `Units`."""
        self._walk += 1

    def pull(self, rank: int, total: int) -> int | None:
        """See `Units`. Raises DistError if the store is gone."""
        key = f"{self._name}/{self._walk}"
        count = self._store.add(key, 1)
        if count == total + self._num_ranks:  # the last rank to see the end
            self._store.delete_key(key)
        return count - 1 if count <= total else None


def folded(move: Move, given: list[Tensor], unit: int, is_first: bool) -> Tensor:
    """What a rank has of a tensor after one more unit.

    Args:
        move: along time, from what a unit makes to the ranks' sum.
        given: what it had before, if this is not its first unit, and the unit's part; emptied.
    """
    place = coordinate_of(unit, move.mesh)
    if not has_rows(move):
        return accumulated(AxisMove.of(move, place), given, 0 if is_first else 1)
    part = given.pop()
    return add_part(move, part.new_zeros(move.shape) if is_first else given.pop(), part, place)
