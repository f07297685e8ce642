"""Lowering: cut the schedule into tasks at the collectives, and give every rank its local form of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ..boxing.collectives import AxisMove, run_local
from ..graph.step_graph import metas_of, output_paths
from ..plan.donate import IN_PLACE, Donations, donations, overwritten
from ..plan.parts import Parts
from ..plan.plan import Plan
from ..plan.schedule import Box, LaidOut, Op, Schedule, schedule
from ..runtime.program import Port, Program, Register, Task, task_module, verify
from ..sbp.layout import local_shape
from ..sbp.registry import OpRule
from ..sbp.sources import RuleBook
from .local import local_op, pick, update_in_place


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
    cuts: dict[tuple[int, ...], tuple[Schedule, list[_Segment], Donations]] = {}  # by stage
    programs = {}
    for rank in ranks:
        coordinate = plan.placement.coordinate(rank)
        key = parts.key(coordinate)
        if key not in cuts:
            own = parts.of(coordinate)
            segments = _segments(own)
            cuts[key] = own, segments, donations(plan, own, [segment.items for segment in segments])
        programs[rank] = _RankLowering(plan, *cuts[key], rules, rank, device).program()
    return Lowered(plan, programs, made)


@dataclass
class _Segment:
    """What runs between two collectives, or one collective."""

    items: list[Op | Box] = field(default_factory=list)
    reads: list[LaidOut] = field(default_factory=list)
    writes: list[LaidOut] = field(default_factory=list)

    @property
    def collective(self) -> Box | None:
        first = self.items[0]
        return first if isinstance(first, Box) and not first.is_local else None


def _segments(made: Schedule) -> list[_Segment]:
    """Cuts the schedule at its collectives and works out what crosses every cut."""
    segments: list[_Segment] = []
    for item in made.items:
        is_collective = isinstance(item, Box) and not item.is_local
        if is_collective or not segments or segments[-1].collective is not None:
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
    return segments


class _RankLowering:
    """One rank's program."""

    def __init__(
        self,
        plan: Plan,
        made: Schedule,
        segments: Sequence[_Segment],
        given: Donations,
        rules: Mapping[Callable, OpRule],
        rank: int,
        device: torch.device,
    ) -> None:
        self.plan, self.made, self.segments, self.rules = plan, made, segments, rules
        self.given, self.rank, self.device = given, rank, device
        self.mesh = plan.placement.shape
        self.coordinate = plan.placement.coordinate(rank)
        self.registers: list[Register] = []
        self.register_of: dict[LaidOut, int] = {}

    def program(self) -> Program:
        names = {node: name for name, node in self.plan.graph.placeholders.items()}
        for value in self.made.inputs:
            self._register(value)
        tasks = [self._task(position, segment) for position, segment in enumerate(self.segments)]
        return verify(
            Program(
                self.rank,
                self.plan.placement,
                tuple(tasks),
                tuple(self.registers),
                tuple(
                    Port(names[one.node], self.register_of[one], donated=one in self.given.values)
                    for one in self.made.inputs
                ),
                tuple(
                    Port(one.name, self.register_of[value], one.replaces) for one, value in self.made.outputs
                ),
            )
        )

    def _register(self, value: LaidOut) -> int:
        meta = metas_of(value.node)[value.index]
        assert meta is not None, f"{value.name} is absent"
        shape = local_shape(meta.shape, value.layout, self.mesh, self.coordinate)
        self.registers.append(Register(len(self.registers), value.name, shape, meta.dtype))
        self.register_of[value] = len(self.registers) - 1
        return len(self.registers) - 1

    def _task(self, position: int, segment: _Segment) -> Task:
        reads = tuple(self.register_of[value] for value in segment.reads)
        box = segment.collective
        if box is not None:
            targets = tuple(self._register(value) for value in box.outputs)
            name = f"{box.move.kind}:{box.source.name}"
            return Task(position, name, str(box.phase), reads, targets, move=box.move, order=box.order)
        module = _Body(self, segment).build()
        writes = tuple(self._register(value) for value in segment.writes)
        after = {
            reader
            for item in segment.items
            if isinstance(item, Op) and item.node in self.given.nodes
            for value in overwritten(item)
            for reader in self.given.readers[value]
        }
        phase = next((str(item.phase) for item in segment.items), "")
        first = next((item.node.name for item in segment.items if isinstance(item, Op)), "moves")
        return Task(position, first, phase, reads, writes, compute=module, after=tuple(sorted(after)))


class _Body:
    """The fx module of one compute task on one rank."""

    def __init__(self, owner: _RankLowering, segment: _Segment) -> None:
        self.owner, self.segment = owner, segment
        self.graph = fx.Graph()
        self.env: dict[LaidOut, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        for value in self.segment.reads:
            self.env[value] = self.graph.placeholder(f"r{self.owner.register_of[value]}")
        for item in self.segment.items:
            if isinstance(item, Op):
                self._op(item)
            else:
                self._local_move(item)
        self.graph.output([self.env[value] for value in self.segment.writes])
        self.graph.eliminate_dead_code(
            lambda node: node.op != "call_function" or node.target is update_in_place
        )
        return task_module(self.graph)

    def _op(self, item: Op) -> None:
        owner = self.owner
        arguments = [self.env[value] for value in item.inputs]
        (target, args, kwargs), _ = local_op(
            item, arguments, owner.rules, owner.mesh, owner.coordinate, owner.device
        )
        if item.node in owner.given.nodes:
            target, args = update_in_place, (IN_PLACE[item.node.target], *args[1:])
        result = self.graph.create_node("call_function", target, args, kwargs, name=item.node.name)  # pyright: ignore
        for value, node in zip(item.outputs, pick(self.graph, result, output_paths(item.node)), strict=True):
            self.env[value] = node

    def _local_move(self, item: Box) -> None:
        owner, move = self.owner, item.move
        source = self.env[item.source]
        if move.mesh[move.axis] == 1 or move.kind == "drop":
            self.env[item.target] = source
            return
        index = owner.coordinate[move.axis]
        axis_move = AxisMove.of(move, owner.coordinate)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return run_local(axis_move, index, tensor)

        self.env[item.target] = self.graph.call_function(cut, (source,))
