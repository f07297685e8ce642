"""When every stage is done: the parts of one step's schedule side by side, meeting at their moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .items import Box, Op, Schedule
from .walking import Work, walk

#: A stage's rank, as `Parts` tells them apart by a coordinate.
Stage = tuple[int, ...]


class Clock(NamedTuple):
    """One stage's rank over a step.

    Attributes:
        end: seconds after the step's begin at which it is done.
        waits: phase -> seconds in which it has nothing to do, up to its last item.
    """

    end: float
    waits: Mapping[str, float]


def clocks(
    parts: Mapping[Stage, Schedule], seconds: Mapping[Stage, Sequence[float]], micro_batches: int
) -> dict[Stage, Clock]:
    """Runs the parts of all stages by the clock.

    What is done once a step is done in order. A collective begins when the last of its stages is there; a
    stage that sends goes on when it has sent; the one that receives has what is sent no sooner. What is
    walked goes as slots and turns let it, sends beside compute.

    Args:
        seconds: of every item of every part, done once.
    """
    found = _Clocks(parts, seconds)
    walked = {stage: [at for at, one in enumerate(part.items) if one.walked] for stage, part in parts.items()}
    if any(walked.values()):
        found.advance({stage: own[0] if own else _idle_from(parts, stage) for stage, own in walked.items()})
        works = {stage: Work(parts[stage], own, seconds[stage]) for stage, own in walked.items()}
        found.now, waits = walk(works, found.now, micro_batches)
        for stage, own in walked.items():
            found.add_waits(stage, waits[stage])
            found.next_item[stage] = own[-1] + 1 if own else found.next_item[stage]
    found.advance({stage: len(part.items) for stage, part in parts.items()})
    return {stage: Clock(found.now[stage], found.waits[stage]) for stage in parts}


def _idle_from(parts: Mapping[Stage, Schedule], stage: Stage) -> int:
    """The item that a stage, at which nothing is walked, comes to while others walk."""
    orders = [
        one.order for part in parts.values() for one in part.items if isinstance(one, Box) and one.walked
    ]
    last = max(orders, default=-1)
    own = parts[stage].items
    return next((at for at, one in enumerate(own) if isinstance(one, Box) and one.order > last), len(own))


class _Clocks:
    """How far every stage is."""

    def __init__(self, parts: Mapping[Stage, Schedule], seconds: Mapping[Stage, Sequence[float]]) -> None:
        self.parts, self.seconds = parts, seconds
        self.now = dict.fromkeys(parts, 0.0)
        self.next_item = dict.fromkeys(parts, 0)
        self.waits: dict[Stage, dict[str, float]] = {stage: {} for stage in parts}

    def add_waits(self, stage: Stage, waits: Mapping[str, float]) -> None:
        own = self.waits[stage]
        for phase, waited in waits.items():
            own[phase] = own.get(phase, 0.0) + waited

    def advance(self, ends: Mapping[Stage, int]) -> None:
        """Does all items up to the given ones, in order."""
        meetings: dict[int, list[Stage]] = {}
        for stage, part in self.parts.items():
            for item in part.items[self.next_item[stage] : ends[stage]]:
                if isinstance(item, Box) and item.order >= 0:
                    meetings.setdefault(item.order, []).append(stage)
        for order in sorted(meetings):
            met = {stage: self._next_move(stage, ends[stage]) for stage in meetings[order]}
            for stage, item in met.items():
                assert isinstance(item, Box) and item.order == order, (
                    f"{stage} comes to {item}, not move {order}"
                )
            self._meet({stage: item for stage, item in met.items() if isinstance(item, Box)})
        for stage in self.parts:
            self._next_move(stage, ends[stage])

    def _next_move(self, stage: Stage, end: int) -> Op | Box | None:
        """Runs a stage up to its next move, which is returned."""
        items = self.parts[stage].items
        while self.next_item[stage] < end:
            position = self.next_item[stage]
            item = items[position]
            self.next_item[stage] += 1
            if isinstance(item, Box) and item.order >= 0:
                return item
            self.now[stage] += self.seconds[stage][position]
        return None

    def _meet(self, met: Mapping[Stage, Box]) -> None:
        begin = max(self.now[stage] for stage, item in met.items() if item.gives)
        everyone = max(self.now[stage] for stage in met)
        for stage, item in met.items():
            start = max(self.now[stage], begin) if item.move.kind == "send" else everyone
            self.add_waits(stage, {str(item.phase): start - self.now[stage]})
            self.now[stage] = start + self.seconds[stage][self.next_item[stage] - 1]
