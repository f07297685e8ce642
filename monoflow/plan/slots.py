"""How many micro-batches of a tensor a rank of a pipeline keeps at a time.

As many as are under way between who makes it and who reads it last, when the rank does its work in the order
of its rounds: with S stages, one each, what forward of stage s leaves for its backward has S - s slots. That
order follows from them (Narayanan et al., "PipeDream", 2019): a rank without room for another forward waits
for a backward. What another stage sends has one slot more, so that it comes while the rank is at something
else. All other tensors are read before the next micro-batch makes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from .items import Box, LaidOut, Schedule
from .rounds import Kind, Rounds, Unit


def kept(own: Schedule, rank: int) -> dict[LaidOut, int]:
    """The slots of what one rank makes or receives; what is left out has one.

    Args:
        own: the rank's part of the schedule.
        rank: its place along the axis of stages.
    """
    rounds = own.rounds
    assert rounds is not None, "a rank without stages keeps one micro-batch"
    made: dict[LaidOut, Unit] = {}
    received: dict[LaidOut, None] = {}
    slots: dict[LaidOut, int] = {}
    known: dict[tuple[Unit, Unit], int] = {}
    for item in own.items:
        if not item.walked:
            continue
        assert item.unit is not None, f"{item} is of no unit"
        for value in item.inputs:
            if value in made:
                pair = made[value], _read_by(item.unit, rounds, rank)
                if pair not in known:
                    known[pair] = rounds.live(*pair)
                slots[value] = max(slots.get(value, 1), known[pair])
        if isinstance(item, Box) and not item.is_local and not item.gives:
            if rounds.rank_of(item.unit) != rank:
                received |= dict.fromkeys(item.outputs)
            made |= dict.fromkeys(item.outputs, _arrives_with(item.unit, rounds, rank))
        elif not (isinstance(item, Box) and item.folds):
            made |= dict.fromkeys(item.outputs, item.unit)
    slots |= {value: min(slots.get(value, 1) + 1, rounds.micro_batches) for value in received}
    return {value: count for value, count in slots.items() if count > 1}


def slots_of(own: Schedule, coordinate: Sequence[int]) -> dict[LaidOut, int]:
    """The slots of a rank by its place in the placement; without stages none has more than one."""
    return {} if own.rounds is None else kept(own, coordinate[own.rounds.axis])


def _arrives_with(unit: Unit, rounds: Rounds, rank: int) -> Unit:
    """What another rank makes is there with this rank's next stage on the way, whichever reads it."""
    ways = range(rank, rounds.stages, rounds.ranks)
    if unit.kind is Kind.FORWARD:
        return Unit(unit.kind, min((one for one in ways if one >= unit.stage), default=unit.stage))
    return Unit(unit.kind, max((one for one in ways if one <= unit.stage), default=rank))


def _read_by(unit: Unit, rounds: Rounds, rank: int) -> Unit:
    """A reader as one of the rank's own units: what others ask for in backward, they do before its last."""
    return unit if rounds.rank_of(unit) == rank else Unit(Kind.BACKWARD, rank)
