"""Which of the actors that could fire goes first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

#: An actor that could fire: step, turn, task index, number in the network.
Entry = tuple[int, int, int, int]


class Ready:
    """Actors that could fire; the first of them goes."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.heap = list(entries)  # looked at directly where every call counts
        heapq.heapify(self.heap)

    def push(self, entry: Entry) -> None:
        """Adds an actor."""
        heapq.heappush(self.heap, entry)

    def pop(self) -> Entry:
        """Takes out the actor that fires next."""
        return heapq.heappop(self.heap)

    def __len__(self) -> int:
        return len(self.heap)
