"""The work of a pipeline's stages: to which of it every item belongs, and the order that follows.

Along a micro-batch's way through the stages, everything is forward, backward or gradients of weights of one
stage. The stage before waits for the gradient of what it sent; nobody waits for the gradients of weights
before the last micro-batch. With these after the send, the way back through the stages takes the first alone
(after Qi et al., "Zero Bubble Pipeline Parallelism", 2023). What the gradients of weights read is held until
then, so that where bytes are limited they stay where they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..graph.step_graph import Phase, info_of
from ..sbp.layout import At
from .items import Box, LaidOut, Op
from .plan import Plan
from .positions import positions
from .rounds import Kind, Rounds, Unit

_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)


@dataclass(frozen=True)
class Stages:
    """The stages that a plan cuts the step into.

    Attributes:
        axis: of the placement, whose ranks they lie at.
        of: the stage of every node that is computed at one.
        num: how many there are.
    """

    axis: int
    of: Mapping[fx.Node, int]
    num: int


def stages_of(plan: Plan) -> Stages:
    """The stages of a plan that has some: forward goes on to the next where it goes to another rank.

    One that has lost its only op, to what is done before the micro-batches, is passed over.
    """
    axis = plan.stage_axis
    assert axis is not None, f"{plan.name} has no stages"
    found, size = positions(plan.graph), plan.placement.shape[axis]
    numbers: list[int] = []
    stage = 0
    for node in found.forward:
        rank = _rank(plan, node, axis)
        stage += 0 if rank is None else (rank - stage) % size
        numbers.append(stage)
    return Stages(axis, {node: numbers[at] for node, at in found.of.items()}, size * (stage // size + 1))


def _rank(plan: Plan, node: fx.Node, axis: int) -> int | None:
    outputs = plan.signatures[node.name][axis].outputs
    return next((one.stage for one in outputs if isinstance(one, At)), None)


def by_stage(plan: Plan, items: Sequence[Op | Box]) -> tuple[list[Op | Box], Rounds]:
    """The items with the unit of all that is walked, unit after unit."""
    stages = stages_of(plan)
    rounds = Rounds(stages.axis, plan.mesh[stages.axis], stages.num, plan.micro_batches, plan.zero_bubble)
    units = _Units(plan, stages, items).found()
    marked = [replace(item, unit=units.get(at)) for at, item in enumerate(items)]
    first = next((at for at, item in enumerate(marked) if item.walked), len(marked))
    groups: dict[Unit, list[Op | Box]] = {}
    for item in marked:
        if item.unit is not None:
            groups.setdefault(item.unit, []).append(item)
    ordered = marked[:first]
    for unit in sorted(groups, key=lambda one: one.place):
        is_split = unit.kind is Kind.BACKWARD and not plan.is_frugal
        ordered += _sends_first(groups[unit]) if is_split else groups[unit]
    return ordered + [item for item in marked[first:] if not item.walked], rounds


class _Units:
    """Finds the unit of every item that is walked, from the last one on."""

    def __init__(self, plan: Plan, stages: Stages, items: Sequence[Op | Box]) -> None:
        self.plan, self.stages, self.items = plan, stages, items
        self.readers: dict[LaidOut, list[int]] = {}
        for at, item in enumerate(items):
            for value in item.inputs if item.walked else ():
                self.readers.setdefault(value, []).append(at)
        self.units: dict[int, Unit] = {}

    def found(self) -> dict[int, Unit]:
        """By the number of an item."""
        for at in reversed(range(len(self.items))):
            if self.items[at].walked:
                self.units[at] = self._unit(self.items[at])
        return self.units

    def _unit(self, item: Op | Box) -> Unit:
        used = [self.units[at] for value in item.outputs for at in self.readers.get(value, ())]
        kind, stage = _kind(item.phase), self._stage(item)
        if stage is None:
            return min(used, key=lambda one: one.place, default=Unit(kind, 0))
        waits = kind is Kind.BACKWARD and not self.plan.is_frugal and not leaves(item)
        is_late = waits and all(one == Unit(Kind.WEIGHTS, stage) for one in used)
        return Unit(Kind.WEIGHTS if is_late else kind, stage)

    def _stage(self, item: Op | Box) -> int | None:
        """Where an item is done; None for what goes with whoever reads it.

        A move is done where its tensor is made, but for tensors that are there before.
        """
        if isinstance(item, Op):
            return self.stages.of.get(item.node)
        node, index = item.source.node, item.source.index
        if node not in self.stages.of or node.op == "placeholder":
            return None
        made = self.plan.layouts(node)[index]
        is_there = item.source.layout[self.stages.axis] == made[self.stages.axis]
        return self.stages.of[node] if is_there and _kind(info_of(node).phase) is _kind(item.phase) else None


def _kind(phase: Phase) -> Kind:
    return Kind.BACKWARD if phase in _BACKWARD else Kind.FORWARD


def leaves(item: Op | Box) -> bool:
    """Whether an item takes a tensor from its stage to others."""
    return isinstance(item, Box) and item.move.kind in ("send", "broadcast")


def _sends_first(group: Sequence[Op | Box]) -> list[Op | Box]:
    """One stage's backward with ops held until a move needs what they lead to."""
    made_by = {value: at for at, item in enumerate(group) for value in item.outputs}
    done: dict[int, None] = {}
    for at, item in enumerate(group):
        if leaves(item):
            needed: set[int] = set()
            stack = [at]
            while stack:
                one = stack.pop()
                if one not in needed and one not in done:
                    needed.add(one)
                    stack += [made_by[value] for value in group[one].inputs if value in made_by]
            done |= dict.fromkeys(sorted(needed))
    return [group[at] for at in (*done, *(at for at in range(len(group)) if at not in done))]
