"""A measured number beside its goal, and the one table that `bench/all.py` makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """What a bench found.

    Attributes:
        value: a ratio, a share or seconds; None where it was not found, and `what` says why.
        goal: the most that it may be; None where nothing is asked of it.
    """

    what: str
    value: float | None
    goal: float | None = None

    @property
    def is_met(self) -> bool:
        return self.value is not None and (self.goal is None or self.value <= self.goal)


def write(path: Path, figures: Sequence[Figure]) -> None:
    """Writes figures as JSON."""
    path.write_text(json.dumps([asdict(one) for one in figures], indent=1))


def read(path: Path) -> list[Figure]:
    """Reads them back."""
    return [Figure(**one) for one in json.loads(path.read_text())]


def markdown(found: Sequence[tuple[str, Figure]]) -> str:
    """A table of figures, with the bench that each is of."""
    lines = ["| bench | figure | found | goal | |", "| --- | --- | ---: | ---: | --- |"]
    for bench, one in found:
        value = "-" if one.value is None else f"{one.value:.3g}"
        goal = "" if one.goal is None else f"<= {one.goal:.3g}"
        verdict = "" if one.goal is None and one.value is not None else "met" if one.is_met else "**missed**"
        lines.append(f"| {bench} | {one.what} | {value} | {goal} | {verdict} |")
    return "\n".join(lines) + "\n"
