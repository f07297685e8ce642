"""What one rank does of a schedule: all of it, but for what lies at other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..boxing.route import Move
from ..sbp.layout import At, B, is_held
from .schedule import Box, LaidOut, Op, Schedule


def part_of(made: Schedule, coordinate: Sequence[int]) -> Schedule:
    """The items that the rank at a coordinate of the mesh runs or takes part in, in the same order.

    What every stage could compute, it computes only if it reads it. Without stages that is the schedule.
    """
    if not any(isinstance(one, At) for item in made.items for value in _ends(item) for one in value.layout):
        return made
    taking = [one for item in made.items if (one := _share(item, coordinate)) is not None]
    outputs = tuple((one, value) for one, value in made.outputs if is_held(value.layout, coordinate))
    read = {value for _, value in outputs}
    items: list[Op | Box] = []
    for item in reversed(taking):
        meets = isinstance(item, Box) and not item.is_local
        if meets or any(value in read for value in item.outputs):
            items.append(item)
            read.update(item.inputs)
    return Schedule(tuple(reversed(items)), tuple(one for one in made.inputs if one in read), outputs)


def _ends(item: Op | Box) -> Sequence[LaidOut]:
    return item.outputs if isinstance(item, Op) else (item.source, item.target)


def _share(item: Op | Box, coordinate: Sequence[int]) -> Op | Box | None:
    """An item as one rank takes part in it; None if it does not."""
    if isinstance(item, Op):
        values = item.outputs or item.inputs
        return item if all(is_held(value.layout, coordinate) for value in values) else None
    if not _is_in_group(item.move, coordinate):
        return None
    gives = is_held(item.source.layout, coordinate)
    takes = is_held(item.target.layout, coordinate)
    return replace(item, gives=gives, takes=takes) if takes or (gives and not item.is_local) else None


def _is_in_group(move: Move, coordinate: Sequence[int]) -> bool:
    """Whether the rank's group along the move's axis has a part in the tensor."""
    return is_held((*move.source[: move.axis], B, *move.source[move.axis + 1 :]), coordinate)
