"""Which of the actors that could fire goes first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Ready:
    """Actors that could fire, as (turn, task index, number in the network); the first of them goes."""

    def __init__(self, entries: Iterable[tuple[int, int, int]] = ()) -> None:
        self._heap = list(entries)
        heapq.heapify(self._heap)

    def push(self, entry: tuple[int, int, int]) -> None:
        """Adds an actor."""
        heapq.heappush(self._heap, entry)

    def pop(self) -> tuple[int, int, int]:
        """Takes out the actor that fires next."""
        return heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
