"""The body of a compute task: the ops and local moves of one rank as an fx module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..boxing.collectives import AxisMove, run_local
from ..graph.step_graph import output_paths
from ..plan.donate import IN_PLACE, Donations
from ..plan.plan import Plan
from ..plan.schedule import Box, LaidOut, Op
from ..runtime.program import TIME, task_module
from ..runtime.pulled import coordinate_of
from ..sbp.registry import OpRule
from .local import local_op, pick, update_in_place
from .micro import by_time, is_same


@dataclass(frozen=True)
class Where:
    """The rank and the device that a program is for."""

    plan: Plan
    rank: int
    device: torch.device

    @property
    def own(self) -> tuple[int, ...]:
        """The rank's place in the mesh, in the first micro-batch."""
        place = self.plan.placement.coordinate(self.rank)
        return (*place, 0) if self.plan.has_time else place

    def walking(self, time: int) -> tuple[int, ...]:
        """The place in the mesh of what is walked: of the rank's micro-batch, or of a unit that it pulled."""
        return coordinate_of(time, self.plan.mesh) if self.plan.is_pulled else (*self.own[:-1], time)


def body(
    items: Sequence[Op | Box],
    reads: Mapping[LaidOut, str],
    writes: Sequence[LaidOut],
    where: Where,
    times: Sequence[int],
    given: Donations,
    rules: Mapping[Callable, OpRule],
) -> fx.GraphModule:
    """The module of one task.

    Args:
        items: what it does, in order.
        reads: what it reads, by the names of its placeholders, in order.
        times: the micro-batches, or units, that it is for, whose tensors have the same shapes.
        given: which updates run in place.
    """
    return _Body(reads, where, times, given, rules).build(items, writes)


class _Body:
    def __init__(
        self,
        reads: Mapping[LaidOut, str],
        where: Where,
        times: Sequence[int],
        given: Donations,
        rules: Mapping[Callable, OpRule],
    ) -> None:
        self.where, self.times, self.given, self.rules = where, times, given, rules
        self.graph = fx.Graph()
        self.env = {value: self.graph.placeholder(name) for value, name in reads.items()}
        self.time: fx.Node | None = None

    def build(self, items: Sequence[Op | Box], writes: Sequence[LaidOut]) -> fx.GraphModule:
        """Adds the items and what they write."""
        if items[0].walked:
            self.time = self.graph.placeholder(TIME)
        for item in items:
            if isinstance(item, Op):
                self._op(item)
            else:
                self._local_move(item)
        self.graph.output([self.env[value] for value in writes])
        self.graph.eliminate_dead_code(
            lambda node: node.op != "call_function" or node.target is update_in_place
        )
        return task_module(self.graph)

    def _op(self, item: Op) -> None:
        arguments = [self.env[value] for value in item.inputs]
        target, args, kwargs = form = self._form(item, arguments, self.times[0])
        if item.node in self.given.nodes:
            target, args = update_in_place, (IN_PLACE[item.node.target], *args[1:])
        elif item.walked and self._depends_on_time(item):
            # What differs between micro-batches is where they begin: it does at the second and at the last.
            probed = {time: self._form(item, arguments, time) for time in (*self.times[1:2], self.times[-1])}
            if not all(is_same(form, other) for other in probed.values()):
                forms = {time: self._form(item, arguments, time) for time in self.times}
                target, args, kwargs = by_time(forms, arguments), (self.time, *arguments), {}
        result = self.graph.create_node("call_function", target, args, kwargs, name=item.node.name)  # pyright: ignore
        for value, node in zip(item.outputs, pick(self.graph, result, output_paths(item.node)), strict=True):
            self.env[value] = node

    def _form(self, item: Op, arguments: list[fx.Node], time: int):
        mesh, device = self.where.plan.mesh, self.where.device
        coordinate = self.where.walking(time) if item.walked else self.where.own
        form, _ = local_op(item, arguments, self.rules, mesh, coordinate, device)
        return form

    def _depends_on_time(self, item: Op) -> bool:
        """Whether an op's local form may be another for another micro-batch."""
        rule = self.rules.get(item.node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return len(self.times) > 1 and rule is not None and rule.local is not None

    def _local_move(self, item: Box) -> None:
        move, source = item.move, self.env[item.source]
        if move.mesh[move.axis] == 1 or move.kind == "drop":
            self.env[item.target] = source
            return
        place = self.where.walking(self.times[0]) if item.walked else self.where.own
        axis_move = AxisMove.of(move, place)
        along_time = move.axis == self.where.plan.placement.num_axes
        axis, mesh, of_unit = move.axis, move.mesh, item.walked and self.where.plan.is_pulled

        def cut(tensor: torch.Tensor, number: int) -> torch.Tensor:
            index = coordinate_of(number, mesh)[axis] if of_unit else number
            return run_local(axis_move, index, tensor)

        number = self.time if of_unit or along_time else place[axis]
        self.env[item.target] = self.graph.call_function(cut, (source, number))
