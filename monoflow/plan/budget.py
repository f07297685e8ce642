"""How long planning may take: in work, not by the clock, so that all ranks and runs stop at the same plan."""

from __future__ import annotations

from dataclasses import dataclass

#: Ops planned a second on a slow core: of a plan made of another and predicted, or a template an axis.
RATE = 1500.0


@dataclass
class Budget:
    """Work that may be done, in ops planned.

    Attributes:
        total: all of it.
        spent: so far; what is begun is ended, so it may be more.
        left_out: plans that were not looked at for want of it.
    """

    total: float
    spent: float = 0.0
    left_out: int = 0

    @staticmethod
    def of(seconds: float) -> Budget:
        """What so many seconds of a slow core are worth."""
        return Budget(seconds * RATE)

    def allows(self) -> bool:
        """Whether there is some left to look at one more plan."""
        is_left = self.spent < self.total
        self.left_out += not is_left
        return is_left
