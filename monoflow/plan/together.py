"""When every stage is done: the parts of one step's schedule side by side, meeting at their moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .schedule import Box, Op, Schedule

#: A stage, as `Parts` tells them apart by a coordinate.
Stage = tuple[int, ...]


class Clock(NamedTuple):
    """One stage over a step.

    Attributes:
        end: seconds after the step's begin at which it is done.
        waits: phase -> seconds in which it has nothing to do, up to its last item.
    """

    end: float
    waits: Mapping[str, float]


def clocks(parts: Mapping[Stage, Schedule], seconds: Mapping[Stage, Sequence[float]]) -> dict[Stage, Clock]:
    """Runs the parts of all stages by the clock.

    A collective begins when the last of its stages is there. A stage that sends goes on when it has sent; the
    one that receives has what is sent no sooner.

    Args:
        seconds: of every item of every part.
    """
    now = dict.fromkeys(parts, 0.0)
    next_item = dict.fromkeys(parts, 0)
    waits: dict[Stage, dict[str, float]] = {stage: {} for stage in parts}
    meetings: dict[int, list[Stage]] = {}
    for stage, part in parts.items():
        for item in part.items:
            if isinstance(item, Box) and item.order >= 0:
                meetings.setdefault(item.order, []).append(stage)

    def advance(stage: Stage) -> Op | Box | None:
        """Runs a stage up to its next move, which is returned."""
        items = parts[stage].items
        while next_item[stage] < len(items):
            position = next_item[stage]
            item = items[position]
            next_item[stage] += 1
            if isinstance(item, Box) and item.order >= 0:
                return item
            now[stage] += seconds[stage][position]
        return None

    for order in sorted(meetings):
        met = {}
        for stage in meetings[order]:
            item = advance(stage)
            assert isinstance(item, Box) and item.order == order, f"{stage} comes to {item}, not move {order}"
            met[stage] = item
        begin = max(now[stage] for stage, item in met.items() if item.gives)
        everyone = max(now[stage] for stage in met)
        for stage, item in met.items():
            start = max(now[stage], begin) if item.move.kind == "send" else everyone
            own = waits[stage]
            own[str(item.phase)] = own.get(str(item.phase), 0.0) + start - now[stage]
            now[stage] = start + seconds[stage][next_item[stage] - 1]
    for stage in parts:
        advance(stage)
    return {stage: Clock(now[stage], waits[stage]) for stage in parts}
