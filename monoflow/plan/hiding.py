"""What compute hides of a rank's moves: the schedule by the clock, a lane for compute and one an axis.

Tasks are those that lowering cuts: what is computed between two moves, and a move or a bundle of them. A task
begins when what it reads is there, what it is paced by is done (`runtime.pace`) and its lane is free; of
several that a lane could do, the first in the schedule. What is walked is run once, apart from what comes
before and after it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..boxing.bundle import BESIDE
from .items import Box, LaidOut, Op

#: The lane of compute; those of moves are the axes.
COMPUTE = -1


@dataclass(eq=False)
class Task:
    """What a lane does in one piece: the items from `first` on, before `end`."""

    lane: int
    first: int
    end: int
    seconds: float = 0.0
    needs: set[int] = field(default_factory=set)


class Span(NamedTuple):
    """When a task is done, in seconds."""

    begin: float
    end: float


def hidden(items: Sequence[Op | Box], seconds: Sequence[float]) -> list[float]:
    """Of every item, the seconds in which compute runs beside it; of compute none.

    Args:
        seconds: what every item takes, done once. Of a bundle the first item has all of it.
    """
    found = [0.0] * len(items)
    begin = 0
    for _, group in itertools.groupby(items, key=lambda item: item.walked):
        part = list(group)
        end = begin + len(part)
        tasks = cut(part, seconds[begin:end])
        for task, shown in zip(tasks, _shown(tasks, run(tasks)), strict=True):
            if task.lane != COMPUTE:
                found[begin + task.first] = max(0.0, task.seconds - shown)
        begin = end
    return found


def cut(items: Sequence[Op | Box], seconds: Sequence[float]) -> list[Task]:
    """The tasks of items that are done equally often, with what each waits for."""
    tasks: list[Task] = []
    made_by: dict[LaidOut, int] = {}
    for position, item in enumerate(items):
        lane = _lane(item)
        last = tasks[-1] if tasks else None
        if last is None or lane != last.lane or (lane != COMPUTE and not _together(items[last.first], item)):
            last = Task(lane, position, position)
            tasks.append(last)
        number = len(tasks) - 1
        last.end = position + 1
        last.seconds += seconds[position]
        last.needs.update(made_by[value] for value in item.inputs if value in made_by)
        made_by.update(dict.fromkeys(item.outputs, number))
    for before, after in _paced(tasks):
        tasks[after].needs.add(before)
    for number, task in enumerate(tasks):
        task.needs.discard(number)
    return tasks


def run(tasks: Sequence[Task]) -> list[Span]:
    """When each task is done."""
    waiting = [len(task.needs) for task in tasks]
    then: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for one in task.needs:
            then[one].append(number)
    ready: dict[int, list[int]] = {task.lane: [] for task in tasks}
    for number, task in enumerate(tasks):
        if not task.needs:
            ready[task.lane].append(number)  # in order, so a heap already
    begins, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    running: list[tuple[float, int]] = []
    free, now = set(ready), 0.0
    while True:
        for lane in sorted(free):
            if ready[lane]:
                number = heapq.heappop(ready[lane])
                free.remove(lane)
                begins[number], ends[number] = now, now + tasks[number].seconds
                heapq.heappush(running, (ends[number], number))
        if not running:
            return [Span(*pair) for pair in zip(begins, ends, strict=True)]
        now = running[0][0]
        while running and running[0][0] == now:
            _, done = heapq.heappop(running)
            free.add(tasks[done].lane)
            for number in then[done]:
                waiting[number] -= 1
                if not waiting[number]:
                    heapq.heappush(ready[tasks[number].lane], number)


def _lane(item: Op | Box) -> int:
    """Where an item runs. What goes between two stages is waited for, as `together` has it; a sum over
    micro-batches is compute.
    """
    if not isinstance(item, Box) or item.is_local or item.folds or item.move.kind == "send":
        return COMPUTE
    return item.move.axis


def _together(first: Op | Box, item: Op | Box) -> bool:
    return isinstance(first, Box) and isinstance(item, Box) and first.bundle == item.bundle >= 0


def _paced(tasks: Sequence[Task]) -> Iterator[tuple[int, int]]:
    """Pairs of which the second waits for the first: as `runtime.pace` says, and in turn on an axis."""
    compute = -1
    since: list[list[int]] = [[]]
    before: dict[int, int] = {}
    for number, task in enumerate(tasks):
        if task.lane != COMPUTE:
            if compute >= 0:
                yield compute, number
            if task.lane in before:
                yield before[task.lane], number
            before[task.lane] = number
            since[-1].append(number)
            continue
        if len(since) > BESIDE:
            for move in since.pop(0):
                yield move, number
        compute = number
        since.append([])


def _shown(tasks: Sequence[Task], spans: Sequence[Span]) -> list[float]:
    """Of every move, the seconds in which nothing is computed; of several at once, of the first."""
    shown = [0.0] * len(tasks)
    moves = sorted((spans[n].begin, n) for n, task in enumerate(tasks) if task.lane != COMPUTE)
    computed = sorted(spans[n] for n, task in enumerate(tasks) if task.lane == COMPUTE)
    end = max((span.end for span in spans), default=0.0)
    active: list[int] = []
    at, now = 0, 0.0
    for begin, after in (*computed, Span(end, end)):
        while at < len(moves) and moves[at][0] < begin:
            active.append(moves[at][1])
            at += 1
        for move in active:  # from `now` to `begin` nothing is computed
            piece = min(spans[move].end, begin) - max(spans[move].begin, now)
            if piece > 0:
                shown[move] += piece
                now += piece
        now = max(now, after)
        active = [move for move in active if spans[move].end > now]
    return shown
