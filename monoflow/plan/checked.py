"""What the check of a plan's programs says, before they run: the bytes that their registers need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Registers(NamedTuple):
    """The registers of one rank's program.

    Attributes:
        count: how many there are.
        num_bytes: the most that the step's inputs, its registers, and what moves work with take at a time,
            whatever the timing of actors; what is needed inside of a computation is not part of it.
        slots: the most micro-batches that one of them keeps.
    """

    count: int
    num_bytes: int
    slots: int


@dataclass(frozen=True)
class Checked:
    """The answer of the check: the programs cannot deadlock, and need no more than this.

    Attributes:
        ranks: of those that were checked, by rank: of several that run the same tasks, one.
    """

    ranks: Mapping[int, Registers]

    @property
    def num_bytes(self) -> int:
        """The most that a rank needs."""
        return max(one.num_bytes for one in self.ranks.values())

    def text(self) -> str:
        """A line on the check, and one a rank."""
        lines = ["registers: no timing of actors deadlocks; at most, with the step's inputs,"]
        for rank, (count, num_bytes, slots) in self.ranks.items():
            kept = f", that keep up to {slots} micro-batches" * (slots > 1)
            lines.append(f"  rank {rank}: {num_bytes:,} bytes in {count} registers{kept}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()
