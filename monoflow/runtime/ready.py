"""Which of the actors that could fire goes first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

#: An actor that could fire: step, turn, task index, number in the network.
Entry = tuple[int, int, int, int]


class Ready:
    """Actors that could fire; the first of them goes."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._heap = list(entries)
        heapq.heapify(self._heap)

    def push(self, entry: Entry) -> None:
        """Adds an actor."""
        heapq.heappush(self._heap, entry)

    def pop(self) -> Entry:
        """Takes out the actor that fires next."""
        return heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
