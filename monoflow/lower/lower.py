"""Lowering: cut the schedule into tasks at the moves, and give every rank its local form of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..graph.step_graph import Phase, Role, metas_of
from ..plan.donate import Donations, donations, leaves_apart, overwritten
from ..plan.parts import Parts
from ..plan.plan import Plan
from ..plan.rounds import Kind, Unit
from ..plan.schedule import Box, LaidOut, Op, Schedule, schedule
from ..plan.slots import slots_of
from ..runtime.program import Port, Program, Rate, Register, Task, gated, verify
from ..sbp.layout import local_shape
from ..sbp.registry import OpRule
from ..sbp.sources import RuleBook
from .body import Where, body
from .micro import alike, num_work_units

#: Inputs that every step has a copy of.
_FRESH = (Role.BATCH, Role.HYPER, Role.RANDOM)


@dataclass(frozen=True)
class Lowered:
    """The programs of all ranks that were asked for, and what they were made from."""

    plan: Plan
    programs: Mapping[int, Program]
    schedule: Schedule


def lower(
    plan: Plan,
    ranks: Sequence[int],
    device: torch.device,
    observe: bool = False,
    rules: Mapping[Callable, OpRule] | None = None,
) -> Lowered:
    """The programs of `ranks`. Every rank lowers its own shapes; the order of collectives is one for all.

    Args:
        observe: also give out the observed outputs (gradients as the optimizer sees them).
    """
    rules = RuleBook() if rules is None else rules
    made = schedule(plan, observe)
    parts = Parts(made)
    cuts: dict[tuple[int, ...], tuple] = {}  # by stage
    programs = {}
    for rank in ranks:
        coordinate = plan.placement.coordinate(rank)
        key = parts.key(coordinate)
        if key not in cuts:
            own = parts.of(coordinate)
            segments = _segments(own, plan.is_pulled)
            given = donations(plan, own, [segment.items for segment in segments])
            cuts[key] = own, segments, given, slots_of(own, coordinate)
        programs[rank] = _RankLowering(plan, *cuts[key], rules, rank, device).program()
    return Lowered(plan, programs, made)


@dataclass
class _Segment:
    """What runs between two moves that are not local, or one such move or bundle of them; walked or not.

    Without items, it pulls the next unit of work for those after it.
    """

    items: list[Op | Box] = field(default_factory=list)
    reads: list[LaidOut] = field(default_factory=list)
    writes: list[LaidOut] = field(default_factory=list)

    @property
    def collective(self) -> Box | None:
        first = self.items[0] if self.items else None
        return first if isinstance(first, Box) and not first.is_local else None

    @property
    def is_walked(self) -> bool:
        return not self.items or self.items[0].walked

    @property
    def unit(self) -> Unit | None:
        return self.items[0].unit if self.items else None

    def goes_with(self, item: Op | Box) -> bool:
        """Whether an item is done as often as those that are here, and with the same stage's work."""
        return self.is_walked == item.walked and self.unit == item.unit

    def takes_with(self, box: Box) -> bool:
        """Whether a move goes with those that are here, as one collective."""
        last = self.items[-1]
        return isinstance(last, Box) and last.bundle >= 0 and last.bundle == box.bundle


def _segments(made: Schedule, is_pulled: bool) -> list[_Segment]:
    """Cuts the schedule at its moves and where the walk begins and ends; works out what crosses every cut.

    Args:
        is_pulled: whether there is to be a segment that pulls before what is walked.
    """
    segments: list[_Segment] = []
    for at, item in enumerate(made.items):
        is_collective = isinstance(item, Box) and not item.is_local
        before = segments[-1] if segments else None
        together = isinstance(item, Box) and before is not None and before.takes_with(item)
        if not together and (
            is_collective
            or before is None
            or before.collective
            or not before.goes_with(item)
            or at == made.gate  # what may be held back is a task of its own
        ):
            segments.append(_Segment())
        segments[-1].items.append(item)
    last_use: dict[LaidOut, int] = {one: len(segments) for _, one in made.outputs}
    for position, segment in enumerate(segments):
        for item in segment.items:
            for value in item.inputs:
                last_use[value] = max(last_use.get(value, 0), position)
    for position, segment in enumerate(segments):
        own = {value for item in segment.items for value in item.outputs}
        segment.reads = list(dict.fromkeys(v for item in segment.items for v in item.inputs if v not in own))
        segment.writes = [
            value for item in segment.items for value in item.outputs if last_use.get(value, -1) > position
        ]
    if is_pulled:
        first = next(at for at, segment in enumerate(segments) if segment.is_walked)
        segments.insert(first, _Segment())
    return segments


class _RankLowering:
    """One rank's program."""

    def __init__(
        self,
        plan: Plan,
        made: Schedule,
        segments: Sequence[_Segment],
        given: Donations,
        slots: Mapping[LaidOut, int],
        rules: Mapping[Callable, OpRule],
        rank: int,
        device: torch.device,
    ) -> None:
        self.plan, self.made, self.segments, self.rules = plan, made, segments, rules
        self.given, self.slots, self.rank = given, slots, rank
        self.where = Where(plan, rank, device)
        self.classes = alike(plan, made)
        self.unit: tuple[int, ...] = ()  # the register of the number of what was pulled
        self.registers: list[Register] = []
        self.register_of: dict[LaidOut, int] = {}
        self.turns: dict[Unit, tuple[int, ...]] = {}
        self.backward: dict[int, int] = {}  # by stage: the last task of its backward

    def program(self) -> Program:
        """The rank's program, checked."""
        names = {node: name for name, node in self.plan.graph.placeholders.items()}
        roles = self.plan.graph.input_of
        for value in self.made.inputs:
            self._register(value)
        tasks = [
            self._timed(self._task(position, segment), segment)
            for position, segment in enumerate(self.segments)
        ]
        in_place = {
            position
            for position, segment in enumerate(self.segments)
            if any(isinstance(item, Op) and item.node in self.given.nodes for item in segment.items)
        }
        gates = tuple(self.register_of[value] for one, value in self.made.outputs if one.checked)
        assert len(gates) == sum(one.checked for one in self.plan.graph.outputs), (
            f"rank {self.rank} does not get every scalar that says whether state may change"
        )
        return verify(
            Program(
                self.rank,
                self.plan.placement,
                gated(tasks, gates, in_place),
                tuple(self.registers),
                tuple(
                    Port(
                        names[one.node],
                        self.register_of[one],
                        donated=one in self.given.values,
                        fresh=roles[names[one.node]].role in _FRESH,
                    )
                    for one in self.made.inputs
                ),
                tuple(
                    Port(one.name, self.register_of[value], one.replaces) for one, value in self.made.outputs
                ),
                self.plan.micro_batches,
                num_work_units(self.plan),
                gates,
                leaves_apart(self.plan, self.made),
            )
        )

    def _register(self, value: LaidOut, rate: Rate = Rate.STEP) -> int:
        meta = metas_of(value.node)[value.index]
        assert meta is not None, f"{value.name} is absent"
        place = self.where.walking(0) if rate is Rate.MICRO else self.where.own
        shape = local_shape(meta.shape, value.layout, self.plan.mesh, place)
        slots = self.slots.get(value, 1) if rate is Rate.MICRO else 1
        self.registers.append(Register(len(self.registers), value.name, shape, meta.dtype, slots, rate))
        self.register_of[value] = len(self.registers) - 1
        return len(self.registers) - 1

    def _pull(self, position: int) -> Task:
        """Asks for a unit of work once all that comes before the walk is done: late, so that others may."""
        self.registers.append(Register(len(self.registers), "unit", (), torch.int64, rate=Rate.MICRO))
        self.unit = (len(self.registers) - 1,)
        return Task(
            position, "pull", str(Phase.FORWARD), (), self.unit,
            after=tuple(range(position)), rate=Rate.MICRO, pulls=True,
        )  # fmt: skip

    def _timed(self, task: Task, segment: _Segment) -> Task:
        """A task with its turn in a pipeline, and whom it lets go first."""
        rounds, unit = self.made.rounds, segment.unit
        if rounds is None:
            return task
        if unit is None:
            is_after = any(one.is_walked for one in self.segments[: task.index])
            return replace(task, turns=(rounds.end,)) if is_after else task
        if unit not in self.turns:
            self.turns[unit] = rounds.turns(unit)
        task = replace(task, turns=self.turns[unit])
        if task.move is not None:
            return task
        if unit.kind is Kind.BACKWARD:
            self.backward[unit.stage] = task.index
        delay = rounds.lets_first(unit)
        return (
            replace(task, behind=(self.backward[unit.stage], delay))
            if delay and unit.stage in self.backward
            else task
        )

    def _task(self, position: int, segment: _Segment) -> Task:
        if not segment.items:
            return self._pull(position)
        rate = Rate.MICRO if segment.is_walked else Rate.STEP
        unit = self.unit if rate is Rate.MICRO else ()
        box = segment.collective
        if box is not None:
            filled = Rate.STEP if box.folds else rate
            boxes = [one for one in segment.items if isinstance(one, Box)]
            return Task(
                position, f"{box.move.kind}:{box.source.name}", str(box.phase),
                (*(self.register_of[value] for one in boxes for value in one.inputs), *unit),
                tuple(self._register(value, filled) for one in boxes for value in one.outputs),
                move=box.move, order=box.order, rate=rate, bundled=tuple(one.move for one in boxes[1:]),
            )  # fmt: skip
        modules = [
            body(
                segment.items, self._named(segment), segment.writes, self.where, times, self.given, self.rules
            )
            for times in (self.classes if rate is Rate.MICRO else self.classes[:1])
        ]
        reads = (*(self.register_of[value] for value in segment.reads), *unit)
        writes = tuple(self._register(value, rate) for value in segment.writes)
        after = {
            reader
            for item in segment.items
            if isinstance(item, Op) and item.node in self.given.nodes
            for value in overwritten(item)
            for reader in self.given.readers[value]
        }
        phase = next((str(item.phase) for item in segment.items), "")
        first = next((item.node.name for item in segment.items if isinstance(item, Op)), "moves")
        others = {
            time: module
            for module, times in zip(modules[1:], self.classes[1:], strict=False)
            for time in times
        }
        return Task(
            position, first, phase, reads, writes,
            compute=modules[0], after=tuple(sorted(after)), rate=rate, others=others,
        )  # fmt: skip

    def _named(self, segment: _Segment) -> Mapping[LaidOut, str]:
        """What a task reads, by the name of its register."""
        return {value: f"r{self.register_of[value]}" for value in segment.reads}
