"""Figures and tables as plain text."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

_NOTHING = 1e-9  # seconds: the search parts equals by less


def size(num_bytes: float) -> str:
    """Bytes for people, with three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds for people, with three digits."""
    if abs(seconds) < _NOTHING:
        return "0 us"
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def pattern_of(name: str) -> str:
    """A dotted name with `*` for its numbers, so that repeated layers have the same."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def brief(signature: str) -> str:
    """A signature's text with runs of equal SBPs counted: "B, B, B -> S(0)" is "B x3 -> S(0)"."""
    return " -> ".join(", ".join(_runs(_sbps(side))) for side in signature.split(" -> "))


def _sbps(side: str) -> list[str]:
    """The SBPs of one side; a comma within brackets is not between two."""
    found, depth = [""], 0
    for letter in side:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found]


def _runs(names: Sequence[str]) -> list[str]:
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    return [part for name, count in runs for part in ([f"{name} x{count}"] if count > 2 else [name] * count)]


def aligned(rows: Sequence[Sequence[str] | str], right: Collection[int] = ()) -> list[str]:
    """Rows of cells as lines with aligned columns; a row that is a text stays as it is.

    Args:
        right: the columns that are aligned to the right.
    """
    cells = [row for row in rows if not isinstance(row, str)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in rows:
        if isinstance(row, str):
            lines.append(row)
            continue
        parts = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ]
        lines.append("  ".join(parts).rstrip())
    return lines
