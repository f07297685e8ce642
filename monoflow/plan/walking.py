"""How long a pipeline's ranks walk the micro-batches: a network of their work, gone through by the clock.

It is the network that runs (`runtime.network`), as far as a plan knows it: tasks that wait for what they read
and for a slot of what they write, of which a rank does the one whose turn is first; sends go in
turn beside them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .items import Box, LaidOut, Op, Schedule
from .rounds import Kind, Unit
from .slots import kept

Stage = tuple[int, ...]
_TOGETHER = 1e-12  # relative: what ends so close ends at one time


class Work(NamedTuple):
    """What a rank walks.

    Attributes:
        items: the numbers of its items that are walked.
        seconds: of every item of the part, for one micro-batch.
    """

    part: Schedule
    items: Sequence[int]
    seconds: Sequence[float]


@dataclass(eq=False)
class _Task:
    """Items of one unit that a rank does in one go, or a move between ranks.

    Attributes:
        where: the rank, or the ranks that a move goes between.
        gives, gives_late: edges that get a token at every firing, or at those after so many.
        missing: how many of its edges have no token.
    """

    where: object
    turns: Sequence[int]
    phase: str
    order: int = -1
    seconds: float = 0.0
    fired: int = 0
    missing: int = 0
    is_busy: bool = False
    takes: list[_Edge] = field(default_factory=list)
    gives: list[_Edge] = field(default_factory=list)
    gives_late: list[tuple[_Edge, int]] = field(default_factory=list)


@dataclass(eq=False)
class _Edge:
    target: _Task
    tokens: int


def walk(
    works: Mapping[Stage, Work], begins: Mapping[Stage, float], micro_batches: int
) -> tuple[dict[Stage, float], dict[Stage, dict[str, float]]]:
    """When every rank is done with all micro-batches, and how long it waited in every phase.

    Args:
        begins: when every rank starts.
    """
    return _Run(_Network(works), begins, micro_batches).done()


class _Network:
    """The tasks of all ranks, connected."""

    def __init__(self, works: Mapping[Stage, Work]) -> None:
        self.tasks: list[_Task] = []
        self.meetings = self._meetings(works)
        self.moves: dict[int, _Task] = {}
        for stage, work in works.items():
            self._add(stage, work)

    def _meetings(self, works: Mapping[Stage, Work]) -> dict[int, list[Stage]]:
        found: dict[int, list[Stage]] = {}
        for stage, work in works.items():
            for at in work.items:
                item = work.part.items[at]
                if isinstance(item, Box) and item.order >= 0 and not item.folds:
                    found.setdefault(item.order, []).append(stage)
        return found

    def _add(self, stage: Stage, work: Work) -> None:
        rounds = work.part.rounds
        assert rounds is not None, "what is walked by stages goes in rounds"
        slots = kept(work.part, stage[0])
        made_by: dict[LaidOut, _Task] = {}
        links: dict[tuple[_Task, _Task], int] = {}
        backward: dict[int, _Task] = {}
        for unit, items in self._segments(work):
            task = self._task(stage, work, unit, items)
            for at in items:
                item = work.part.items[at]
                for value in item.inputs:
                    maker = made_by.get(value, task)
                    if maker is not task:
                        pair = maker, task
                        links[pair] = min(links.get(pair, slots.get(value, 1)), slots.get(value, 1))
                made_by |= dict.fromkeys(item.outputs, task)
            if task.order < 0 and unit.kind is Kind.BACKWARD:
                backward[unit.stage] = task
            delay = rounds.lets_first(unit)
            if task.order < 0 and delay and unit.stage in backward:
                backward[unit.stage].gives_late.append((_edge(task, 0), delay))
        for (maker, reader), count in links.items():
            maker.gives.append(_edge(reader, 0))
            reader.gives.append(_edge(maker, count))

    def _segments(self, work: Work) -> Iterator[tuple[Unit, list[int]]]:
        """A rank's items as its program is cut: where units and moves between ranks are, and after sums."""
        folds = itertools.accumulate(getattr(work.part.items[at], "folds", False) for at in (0, *work.items))
        before = dict(zip(work.items, folds, strict=False))

        def key(at: int) -> tuple[Unit | None, int, int]:
            item = work.part.items[at]
            meets = isinstance(item, Box) and len(self.meetings.get(item.order, ())) > 1
            return item.unit, item.order if meets and isinstance(item, Box) else -1, before[at]

        for (unit, *_), items in itertools.groupby(work.items, key):
            assert unit is not None, "what is walked is of no unit"
            yield unit, list(items)

    def _task(self, stage: Stage, work: Work, unit: Unit, items: Sequence[int]) -> _Task:
        rounds, first = work.part.rounds, work.part.items[items[0]]
        assert rounds is not None
        seconds = sum(work.seconds[at] for at in items)
        order = first.order if isinstance(first, Box) and len(self.meetings.get(first.order, ())) > 1 else -1
        if order in self.moves:
            task = self.moves[order]
        else:
            where = stage if order < 0 else _ends(first)
            task = _Task(where, rounds.turns(unit), str(first.phase), order)
            self.tasks.append(task)
            if order >= 0:
                self.moves[order] = task
        task.seconds = max(task.seconds, seconds)
        return task


def _ends(item: Op | Box) -> object:
    """What carries a move between ranks."""
    assert isinstance(item, Box)
    source, target = item.move.source[item.move.axis], item.move.target[item.move.axis]
    return item.move.kind, str(source), str(target)


def _edge(target: _Task, tokens: int) -> _Edge:
    edge = _Edge(target, tokens)
    target.takes.append(edge)
    target.missing += not tokens
    return edge


class _Run:
    """Fires tasks in the order of time."""

    def __init__(self, network: _Network, begins: Mapping[Stage, float], micro_batches: int) -> None:
        self.network, self.num = network, micro_batches
        self.free = dict(begins)
        self.ready: dict[Stage, list[tuple[int, int, _Task]]] = {stage: [] for stage in begins}
        self.waits: dict[Stage, dict[str, float]] = {stage: {} for stage in begins}
        self.number = {task: number for number, task in enumerate(network.tasks)}
        self.events: list[tuple[float, int, _Task | Stage]] = []
        self.count = itertools.count()
        self.instant: list[_Task] = []  # could be done now, in no time
        self.busy: set[object] = set(begins)
        self.queues = self._queues()
        for stage, begin in begins.items():
            heapq.heappush(self.events, (begin, next(self.count), stage))
        for task in network.tasks:
            self._enter(task)

    def _queues(self) -> dict[object, list[_Task]]:
        """Of every channel, its moves in turn, the first one last."""
        due: dict[object, list[tuple[int, int, _Task]]] = {}
        for task in self.network.tasks:
            if task.order >= 0:
                own = due.setdefault(task.where, [])
                own += [(task.turns[time], task.order, task) for time in range(self.num)]
        return {
            where: [task for _, _, task in sorted(own, key=lambda one: one[:2], reverse=True)]
            for where, own in due.items()
        }

    def _enter(self, task: _Task) -> None:
        if task.order < 0 and not task.missing and not task.is_busy and task.fired < self.num:
            assert isinstance(task.where, tuple)
            if task.seconds:
                heapq.heappush(self.ready[task.where], (task.turns[task.fired], self.number[task], task))
            else:
                self.instant.append(task)

    def done(self) -> tuple[dict[Stage, float], dict[Stage, dict[str, float]]]:
        """Goes through all."""
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] <= now * (1 + _TOGETHER):
                _, _, task = heapq.heappop(self.events)
                if isinstance(task, _Task):
                    self._end(task, now)
                else:
                    self.busy.discard(task)
            self._start_all(now)
        late = [task for task in self.network.tasks if task.fired < self.num]
        assert not late, f"{len(late)} tasks of a pipeline cannot finish"
        return self.free, self.waits

    def _start_all(self, now: float) -> None:
        """First what sends bring, and what takes no time: after that, who is first is clear."""
        moves = True
        while moves or self.instant:
            while self.instant:
                task = self.instant.pop()
                self._take(task)
                self._give_all(task)
            moves = False
            for where, queue in self.queues.items():
                if where not in self.busy and queue and not queue[-1].missing:
                    moves = True
                    self._start(queue.pop(), now)
        for stage, ready in self.ready.items():
            if stage not in self.busy and ready:
                _, _, task = heapq.heappop(ready)
                own = self.waits[stage]
                own[task.phase] = own.get(task.phase, 0.0) + now - self.free[stage]
                self._start(task, now)

    def _start(self, task: _Task, now: float) -> None:
        self._take(task)
        if task.seconds:
            self.busy.add(task.where)
            heapq.heappush(self.events, (now + task.seconds, next(self.count), task))
        else:
            self._give_all(task)

    def _end(self, task: _Task, now: float) -> None:
        self.busy.discard(task.where)
        if task.order < 0:
            assert isinstance(task.where, tuple)
            self.free[task.where] = now
        self._give_all(task)

    def _take(self, task: _Task) -> None:
        task.is_busy = True
        for edge in task.takes:
            edge.tokens -= 1
            task.missing += not edge.tokens

    def _give_all(self, task: _Task) -> None:
        task.is_busy = False
        task.fired += 1
        self._enter(task)
        for edge in task.gives:
            self._give(edge, 1)
        for edge, late in task.gives_late:
            if task.fired > late:
                self._give(edge, 1)
            if task.fired == self.num:
                self._give(edge, min(late, self.num))

    def _give(self, edge: _Edge, tokens: int) -> None:
        was_missing = not edge.tokens
        edge.tokens += tokens
        if was_missing and tokens:
            edge.target.missing -= 1
            self._enter(edge.target)
