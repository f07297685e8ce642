"""Time as columns of a chart: what is in each of them of a step whose items run one after the other."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

_COLUMNS = 240


class Timescale:
    """Columns of equal time over the items of a step.

    Attributes:
        total: seconds of all items.
        starts: per item, when it begins; then when the last one ends.
    """

    def __init__(self, seconds: Sequence[float], num_columns: int = _COLUMNS) -> None:
        has_width = sum(seconds) / num_columns >= sys.float_info.min  # or else all take the same
        given = seconds if has_width else [1.0] * len(seconds)
        self.total = float(sum(seconds))
        self.num_columns = num_columns
        self.starts = [0.0, *itertools.accumulate(given)]
        self._width = (self.starts[-1] or 1.0) / num_columns

    def middle(self, item: int) -> float:
        """Where an item's middle is, in columns."""
        return (self.starts[item] + self.starts[item + 1]) / 2 / self._width

    def columns(self, item: int) -> range:
        """The columns that an item reaches into: one at least."""
        first = min(int(self.starts[item] / self._width), self.num_columns - 1)
        last = min(int(self.starts[item + 1] / self._width * (1 - 1e-12)), self.num_columns - 1)
        return range(first, max(first, last) + 1)

    def highest(self, amounts: Sequence[float]) -> list[int]:
        """In every column, the item of the largest amount: no peak is lost, however short it is."""
        found = [-1] * self.num_columns
        for item, amount in enumerate(amounts):
            for column in self.columns(item):
                if found[column] < 0 or amount > amounts[found[column]]:
                    found[column] = item
        return found

    def busy(self, items: Sequence[tuple[int, float]]) -> tuple[list[float], dict[int, int]]:
        """In every column, the part of its time that some items take, and the one that takes the most of it.

        Args:
            items: (item, seconds).
        """
        share, longest = [0.0] * self.num_columns, {}
        most = [0.0] * self.num_columns
        for item, seconds in items:
            for column in self.columns(item) if seconds > 0 else ():
                begin, end = column * self._width, (column + 1) * self._width
                part = (min(self.starts[item + 1], end) - max(self.starts[item], begin)) / self._width
                share[column] = min(1.0, share[column] + max(0.0, part))
                if part > most[column]:
                    most[column], longest[column] = part, item
        return share, longest

    def runs(self, kinds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(kind, first column, column after the last) where the same kind takes most of the time."""
        time: list[dict[int, float]] = [{} for _ in range(self.num_columns)]
        for item, kind in enumerate(kinds):
            for column in self.columns(item):
                begin, end = column * self._width, (column + 1) * self._width
                part = min(self.starts[item + 1], end) - max(self.starts[item], begin)
                time[column][kind] = time[column].get(kind, 0.0) + max(0.0, part)
        first = 0
        most = [max(column, key=lambda kind: column[kind]) if column else -1 for column in time]
        for kind, run in itertools.groupby(most):
            stop = first + len(list(run))
            if kind >= 0:
                yield kind, first, stop
            first = stop
