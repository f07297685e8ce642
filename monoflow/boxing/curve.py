"""What was measured: seconds by amount."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Seconds by amount of work or bytes, through measured points.

    Between two points both are interpolated by their logarithms; below the first everything costs what the
    first did, beyond the last in proportion to it.

    Attributes:
        points: (amount, seconds), amounts positive and ascending.

    Raises:
        ValueError: the points are not so.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        if not amounts or amounts != sorted(set(amounts)) or amounts[0] <= 0:
            raise ValueError(f"a curve's amounts must be positive and ascending, got {amounts}")
        if not all(0 < seconds < math.inf for _, seconds in self.points):
            raise ValueError(f"a curve's seconds must be positive, got {self.points}")

    @staticmethod
    def through(measured: Mapping[float, float]) -> Curve:
        """The curve of measured seconds by amount.

        Other programs can only add to what is measured, so a call that took longer than a larger one is
        taken to need no more than that.
        """
        least, points = math.inf, []
        for amount, seconds in sorted(measured.items(), reverse=True):
            least = min(least, seconds)
            points.append((amount, least))
        return Curve(tuple(reversed(points)))

    def seconds(self, amount: float) -> float:
        """The time of an amount."""
        points = self.points
        if amount <= points[0][0]:
            return points[0][1]
        if amount >= points[-1][0]:
            return points[-1][1] * amount / points[-1][0]
        at = bisect_left(points, (amount, 0.0))
        (low, below), (high, above) = points[at - 1], points[at]
        share = math.log(amount / low) / math.log(high / low)
        return below * (above / below) ** share

    def scaled(self, factor: float) -> Curve:
        """The curve of calls that take so many times as long."""
        return Curve(tuple((amount, factor * seconds) for amount, seconds in self.points))
