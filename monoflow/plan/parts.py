"""What one rank does of a schedule: all of it, but for what lies at other stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ..boxing.route import Move
from ..sbp.layout import At, B, is_held
from .rounds import Rounds, Unit
from .schedule import Box, LaidOut, Op, Schedule


class Parts:
    """The parts of a schedule by stage. Without stages every rank's part is the schedule itself."""

    def __init__(self, made: Schedule) -> None:
        self.made = made
        self.axes = sorted(
            {
                axis
                for item in made.items
                for value in (item.outputs if isinstance(item, Op) else (item.source, item.target))
                for axis, one in enumerate(value.layout)
                if isinstance(one, At)
            }
        )
        self._known: dict[tuple[int, ...], Schedule] = {}

    def key(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """What tells the part of one rank from another's: its stage."""
        return tuple(coordinate[axis] for axis in self.axes)

    def of(self, coordinate: Sequence[int]) -> Schedule:
        """The items that the rank at a coordinate runs or takes part in, in the same order.

        What every stage could compute, it computes only if it reads it.

        Args:
            coordinate: the rank's place in the placement; a micro-batch makes no difference.
        """
        if not self.axes:
            return self.made
        key = self.key(coordinate)
        if key not in self._known:
            along = max(len(value.layout) for item in self.made.items for value in item.outputs)
            self._known[key] = _part(self.made, (*coordinate, *(0,) * (along - len(coordinate))))
        return self._known[key]

    def stages(self, mesh: Sequence[int]) -> list[tuple[int, ...]]:
        """A coordinate of every stage, one of those with the largest shards."""
        extents = (range(size) if axis in self.axes else (0,) for axis, size in enumerate(mesh))
        return list(itertools.product(*extents))


def _part(made: Schedule, coordinate: Sequence[int]) -> Schedule:
    taking = [one for item in made.items if (one := _share(item, coordinate)) is not None]
    outputs = tuple((one, value) for one, value in made.outputs if is_held(value.layout, coordinate))
    read = {value for _, value in outputs}
    items: list[Op | Box] = []
    for item in reversed(taking):
        meets = isinstance(item, Box) and not item.is_local
        if meets or any(value in read for value in item.outputs):
            items.append(item)
            read.update(item.inputs)
    items.reverse()
    if made.rounds is not None:
        items = _with_readers(items, made.rounds, coordinate[made.rounds.axis])
    return Schedule(tuple(items), tuple(one for one in made.inputs if one in read), outputs, made.rounds)


def _with_readers(items: Sequence[Op | Box], rounds: Rounds, rank: int) -> list[Op | Box]:
    """Does what any rank can compute right before the first of this rank's units that reads it."""
    readers: dict[LaidOut, Unit] = {}
    units: dict[int, Unit] = {}  # of such items
    for at in reversed(range(len(items))):
        item, unit = items[at], items[at].unit
        if unit is None:
            continue
        is_local = isinstance(item, Op) or item.is_local
        if is_local and rounds.rank_of(unit) != rank:
            used = [readers[value] for value in item.outputs if value in readers]
            unit = units[at] = min(used, key=lambda one: one.place, default=Unit(unit.kind, rank))
        for value in item.inputs:
            readers[value] = min(readers.get(value, unit), unit, key=lambda one: one.place)
    held: dict[Unit, list[Op | Box]] = {}
    result: list[Op | Box] = []
    last = max((at for at, item in enumerate(items) if item.walked), default=-1)
    for at, item in enumerate(items):
        if at in units:
            held.setdefault(units[at], []).append(replace(item, unit=units[at]))
        else:
            result += held.pop(item.unit, ()) if item.unit is not None else ()
            result.append(item)
        if at == last:
            result += [one for unit in sorted(held, key=lambda one: one.place) for one in held[unit]]
    return result


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
