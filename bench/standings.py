"""What `bench/auto.py` finds: entries of contests, who was fastest, and tables of them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
from rich.table import Table

from monoflow.plan.calibration import device_name

AUTO = "auto"
#: Auto's seconds over the fastest template's, at most.
GOAL = 1.05


@dataclass(frozen=True)
class Entry:
    """One plan of one model on one number of ranks.

    Attributes:
        like: the first plan of the contest that is equal to it: another's name, or its own.
        grid: the shape of the mesh.
        predicted: seconds of a step, as the machine is calibrated.
        predicted_by: kind of work, or mesh axis -> seconds of it.
        collectives, sent: of a step: how many, and bytes that a rank sends.
        seconds: measured, of every round: the slowest rank's.
        cpu_seconds: of the CPU, likewise, which what else the machine does hardly changes.
        loss: of the first step.
    """

    model: str
    num_ranks: int
    plan: str
    like: str
    grid: tuple[int, ...]
    predicted: float
    predicted_by: dict[str, float]
    collectives: int
    sent: int
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    loss: float

    @property
    def median(self) -> float:
        """Of the measured seconds."""
        return statistics.median(self.seconds)

    @staticmethod
    def of(data: dict[str, Any]) -> Entry:
        """From JSON, which has lists for tuples."""
        fields: dict[str, Any] = {
            key: tuple(one) if isinstance(one, list) else one for key, one in data.items()
        }
        return Entry(**fields)


def grouped(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries of every contest."""
    found: dict[tuple[int, str], list[Entry]] = {}
    for one in entries:
        found.setdefault((one.num_ranks, one.model), []).append(one)
    return list(found.values())


def fastest_template(contest: Sequence[Entry]) -> Entry:
    """By the median."""
    return min((one for one in contest if one.plan != AUTO), key=lambda one: one.median)


def automatic(contest: Sequence[Entry]) -> Entry:
    """The automatic plan's."""
    return next(one for one in contest if one.plan == AUTO)


def ratio(contest: Sequence[Entry]) -> float:
    """Auto's median over the fastest template's."""
    return automatic(contest).median / fastest_template(contest).median


def spread(contest: Sequence[Entry]) -> tuple[float, float]:
    """The quartiles of auto's seconds over the fastest template's, round by round."""
    pairs = zip(automatic(contest).seconds, fastest_template(contest).seconds, strict=True)
    ratios = torch.tensor([mine / theirs for mine, theirs in pairs], dtype=torch.float64)
    low, high = ratios.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
    return low, high


def is_met(contest: Sequence[Entry]) -> bool:
    """Whether auto is the fastest template, or hardly slower: an equal plan differs by noise alone."""
    return automatic(contest).like == fastest_template(contest).like or ratio(contest) <= GOAL


HEAD = (
    "model",
    "plan",
    "mesh",
    "predicted ms",
    "measured ms",
    "CPU ms",
    "collectives",
    "MB sent",
    "auto / best",
)


def cells(one: Entry, contest: Sequence[Entry]) -> list[str]:
    """A row of the table as text."""
    mark = ""
    if one.plan == AUTO:
        low, high = spread(contest)
        mark = f"{ratio(contest):.3f} ({low:.2f} - {high:.2f})"
    elif one is fastest_template(contest):
        mark = "best"
    return [
        one.model,
        one.plan if one.like == one.plan else f"{one.plan} (= {one.like})",
        "x".join(map(str, one.grid)),
        f"{one.predicted * 1e3:.1f}",
        f"{one.median * 1e3:.1f}",
        f"{statistics.median(one.cpu_seconds) * 1e3:.1f}",
        str(one.collectives),
        f"{one.sent / 1e6:.2f}",
        mark,
    ]


def table(entries: Sequence[Entry]) -> Table:
    """For the terminal."""
    made = Table(
        title="the automatic plan against templates",
        caption="medians; in brackets the quartiles of the rounds' ratios",
    )
    for head in HEAD:
        made.add_column(head, justify="left" if head in HEAD[:3] else "right")
    for contest in grouped(entries):
        for one in contest:
            style = ("green" if is_met(contest) else "red") if one.plan == AUTO else ""
            made.add_row(*cells(one, contest), style=style, end_section=one is contest[-1])
    return made


def markdown(entries: Sequence[Entry]) -> str:
    """For RESULTS.md: the machine, the date and the table."""
    rows = [cells(one, contest) for contest in grouped(entries) for one in contest]
    lines = [
        f"{date.today()}, {device_name('cpu')}, torch "
        f"{torch.__version__}, load average {os.getloadavg()[0]:.1f}, {len(entries[0].seconds)} rounds. "
        "Seconds are wall clock, the slowest rank's, the median; behind auto's ratio of medians are "
        "the quartiles of the rounds' ratios. Goal: at most 1.05.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{' --- |' * len(HEAD)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
