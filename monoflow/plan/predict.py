"""What a plan will cost, before it runs: seconds, bytes sent, and memory at every point in time.

It walks the very schedule that is lowered, on the shapes of a rank with the largest shards. A step takes the
seconds of its compute and its moves, less what is `hidden`: moves run on lanes of their own, beside compute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ..boxing.route import copied_end, move_bytes
from ..graph.step_graph import Phase, StepGraph
from ..sbp.signature import TensorMeta
from .cost import Machine, op_seconds
from .facts import Facts, facts_of
from .hiding import hidden
from .memory import CATEGORIES, LocalShapes, Timeline, Walk
from .op_class import ARITHMETIC, class_of
from .parts import Parts
from .plan import Plan
from .schedule import Box, Op, Schedule, schedule
from .together import Clock, clocks

_COPY, _ADD = torch.ops.aten.clone.default, torch.ops.aten.add.Tensor

#: The kinds of time beside an axis' name: an op's own work, moves that send nothing, and waiting for others.
COMPUTE, LOCAL_MOVE, WAIT = "compute", "local move", "wait for other stages"


@dataclass(frozen=True)
class Prediction:
    """What one rank with the largest shards will do in a step; of several stages, one that holds most.

    Attributes:
        seconds: of the whole step.
        seconds_by: phase -> "compute", "local move", "wait for other stages" or the mesh axis that is sent
            along -> seconds.
        hidden: seconds of communication that run beside compute; `seconds` is without them.
        peak_bytes: the most that is held at any time.
        peak_at: the number of the schedule's item that holds it.
        peak_item: what that item is, for people.
        peak_split: what it is held for -> bytes.
        sent: mesh axis -> bytes that the rank sends along it.
        collectives: kind -> how many.
        memory: bytes held at every item.
    """

    seconds: float
    seconds_by: Mapping[str, Mapping[str, float]]
    hidden: float
    peak_bytes: int
    peak_at: int
    peak_item: str
    peak_split: Mapping[str, int]
    sent: Mapping[str, int]
    collectives: Mapping[str, int]
    memory: Timeline = field(repr=False)

    def seconds_of(self, kind: str) -> float:
        """Seconds of one kind, over all phases."""
        return sum(kinds.get(kind, 0.0) for kinds in self.seconds_by.values())

    def as_data(self) -> dict[str, Any]:
        """As JSON has it: dicts, lists and numbers."""
        return {
            "seconds": self.seconds,
            "seconds_by": {phase: dict(kinds) for phase, kinds in self.seconds_by.items()},
            "hidden": self.hidden,
            "peak_bytes": self.peak_bytes,
            "peak_at": self.peak_at,
            "peak_item": self.peak_item,
            "peak_split": dict(self.peak_split),
            "sent": dict(self.sent),
            "collectives": dict(self.collectives),
            "memory": {
                "categories": list(CATEGORIES),
                "held": [list(row) for row in self.memory.held],
                "after": list(self.memory.after),
                "before": self.memory.before,
            },
        }


class Prices:
    """Seconds of calls on one machine and facts of graphs, remembered: candidates of a search share them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._facts: tuple[StepGraph, Facts] | None = None
        self._known: dict[tuple, float] = {}

    def facts(self, graph: StepGraph) -> Facts:
        """Facts of a graph; those of the last one are kept."""
        if self._facts is None or self._facts[0] is not graph:
            self._facts = graph, facts_of(graph)
        return self._facts[1]

    def op(
        self,
        target: Callable,
        inputs: Sequence[TensorMeta | None],
        outputs: Sequence[TensorMeta | None],
        args: Sequence[Any],
    ) -> float:
        """Seconds of a call on local shapes."""
        flags = str(args[3:]) if class_of(target) in ARITHMETIC else ""
        key = (target, tuple(inputs), tuple(outputs), flags)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = op_seconds(target, inputs, outputs, self.machine.device, args)
        return found


def predict(
    plan: Plan,
    machine: Machine,
    *,
    made: Schedule | None = None,
    coordinate: Sequence[int] | None = None,
    prices: Prices | None = None,
) -> Prediction:
    """Predicts a plan's step on a machine.

    Args:
        made: the plan's schedule; made here if left out.
        coordinate: the rank that is predicted; one with the largest shards if left out.
        prices: what is already known of the same machine.
    """
    prices = prices or Prices(machine)
    assert prices.machine == machine, f"prices of {prices.machine.device.name}, not {machine.device.name}"
    facts = prices.facts(plan.graph)
    parts = Parts(made or schedule(plan, facts=facts))
    if coordinate is not None or not parts.axes:
        whose = coordinate or (0,) * plan.placement.num_axes
        walk = Walk(plan, parts.of(whose), LocalShapes(plan, facts, coordinate), plan.overlaps)
        costs = item_costs(plan, walk, prices)
        return _of_rank(plan, walk, costs, _hidden(plan, walk, costs, machine))
    walks = {
        parts.key(at): Walk(plan, parts.of(at), LocalShapes(plan, facts, at), plan.overlaps)
        for at in parts.stages(plan.placement.shape)
    }
    costs = {stage: item_costs(plan, walk, prices) for stage, walk in walks.items()}
    hides = {stage: _hidden(plan, walk, costs[stage], machine) for stage, walk in walks.items()}
    each = {stage: _of_rank(plan, walk, costs[stage], hides[stage]) for stage, walk in walks.items()}
    once = {
        stage: [
            (one.seconds - less * (one.collective != "send")) / (plan.micro_batches if item.walked else 1)
            for item, one, less in zip(walk.made.items, costs[stage], hides[stage], strict=True)
        ]
        for stage, walk in walks.items()
    }
    spans = clocks({stage: walk.made for stage, walk in walks.items()}, once, plan.micro_batches)
    stage, worst = max(each.items(), key=lambda pair: pair[1].peak_bytes)
    end = max(clock.end for clock in spans.values())
    return _with_waits(worst, spans[stage], end)


def _with_waits(alone: Prediction, clock: Clock, end: float) -> Prediction:
    """A stage's rank in a step that ends when all are done: what its work and sends do not fill, it waits."""
    spent = {phase: dict(kinds) for phase, kinds in alone.seconds_by.items()}
    waited = end + alone.hidden - sum(seconds for kinds in spent.values() for seconds in kinds.values())
    waits = {**clock.waits, str(Phase.UPDATE): clock.waits.get(str(Phase.UPDATE), 0.0) + end - clock.end}
    idle = sum(waits.values())
    for phase, seconds in waits.items():
        if seconds and waited > 0:
            spent.setdefault(phase, {})[WAIT] = waited * seconds / idle
    return replace(alone, seconds=end, seconds_by=spent, hidden=alone.hidden + max(0.0, -waited))


def fullest(plan: Plan, prices: Prices) -> Walk:
    """The schedule of the rank that holds most, walked."""
    facts = prices.facts(plan.graph)
    parts = Parts(schedule(plan, facts=facts))
    if not parts.axes:
        return Walk(plan, parts.made, LocalShapes(plan, facts))
    walks = (
        Walk(plan, parts.of(at), LocalShapes(plan, facts, at)) for at in parts.stages(plan.placement.shape)
    )
    return max(walks, key=lambda walk: walk.swept().peak_bytes)


class _Cost(NamedTuple):
    """What one item costs a rank: seconds of a kind, bytes that it sends, and which collective it is.

    What is walked counts `times` collectives; seconds and bytes are of all micro-batches.
    """

    phase: str
    kind: str
    seconds: float
    sent: int = 0
    collective: str = ""
    times: int = 1


def _hidden(plan: Plan, walk: Walk, costs: Sequence[_Cost], machine: Machine) -> list[float]:
    """Of every item, the seconds of a step that it takes beside compute without holding that up."""
    part = machine.device.hiding
    if not part or not plan.overlaps:
        return [0.0] * len(costs)
    items = walk.made.items
    times = [plan.micro_batches if item.walked else 1 for item in items]
    once = [one.seconds / count for one, count in zip(costs, times, strict=True)]
    return [part * one * count for one, count in zip(hidden(items, once), times, strict=True)]


def _of_rank(plan: Plan, walk: Walk, costs: Sequence[_Cost], hides: Sequence[float]) -> Prediction:
    memory = walk.swept()
    spent: dict[str, dict[str, float]] = {}
    sent = dict.fromkeys(plan.placement.axes, 0)
    collectives: Counter[str] = Counter()
    for one in costs:
        by_kind = spent.setdefault(one.phase, {})
        by_kind[one.kind] = by_kind.get(one.kind, 0.0) + one.seconds
        if one.sent:
            sent[one.kind] += one.sent
        if one.collective:
            collectives[one.collective] += one.times
    total = sum(seconds for by_kind in spent.values() for seconds in by_kind.values()) - sum(hides)
    at = memory.peak
    return Prediction(
        seconds=total,
        seconds_by=spent,
        hidden=sum(hides),
        peak_bytes=memory.peak_bytes,
        peak_at=at,
        peak_item=_described(walk.made.items[at]) if at >= 0 else "",
        peak_split=dict(zip(CATEGORIES, memory.held[at], strict=True)) if at >= 0 else {},
        sent=sent,
        collectives=dict(collectives),
        memory=memory,
    )


def item_costs(plan: Plan, walk: Walk, prices: Prices) -> list[_Cost]:
    """What every item of a rank's schedule costs it in a step."""
    count = plan.micro_batches
    first = [_cost(plan, walk, position, prices) for position in range(len(walk.made.items))]
    if count == 1:
        return first
    end = Walk(plan, walk.made, walk.shapes.at(count - 1), walk.lanes)
    found = []
    for position, (item, one) in enumerate(zip(walk.made.items, first, strict=True)):
        if item.walked:
            last = _cost(plan, end, position, prices)
            seconds, sent = (count - 1) * one.seconds + last.seconds, (count - 1) * one.sent + last.sent
            one = one._replace(seconds=seconds, sent=sent, times=count)
        found.append(one)
    return found


def _cost(plan: Plan, walk: Walk, position: int, prices: Prices) -> _Cost:
    """What one item costs, done once."""
    item, (inputs, outputs) = walk.made.items[position], walk.metas[position]
    phase = str(item.phase)
    if isinstance(item, Op):
        target: Any = item.node.target
        return _Cost(phase, COMPUTE, prices.op(target, inputs, outputs, item.node.args))
    if item.folds:
        adds = item.move.kind == "all_reduce"
        seconds = (
            prices.op(_ADD, (*outputs, *inputs), outputs, ())
            if adds
            else prices.op(_COPY, inputs, inputs, ())
        )
        return _Cost(phase, LOCAL_MOVE, seconds)
    if item.is_local or math.prod(item.move.shape) == 0:
        is_copied = bool(walk.begins[position])
        return _Cost(phase, LOCAL_MOVE, prices.op(_COPY, outputs, outputs, ()) if is_copied else 0.0)
    kind, axis, num_bytes = item.move.kind, item.move.axis, _sent_bytes(item, walk.shapes)
    sent = num_bytes if item.gives or kind != "send" else 0
    if position != walk.first_of[position]:  # it goes with the first of its bundle, which takes the time
        return _Cost(phase, plan.placement.axes[axis], 0.0, sent)
    members = range(position, walk.last_of[position] + 1)
    together = [one for number in members if isinstance(one := walk.made.items[number], Box)]
    total = sum(_sent_bytes(one, walk.shapes) for one in together)
    seconds = prices.machine.on(plan.placement.num_axes).links[axis].seconds(kind, total)
    # What links of a shipped table achieve is of whole collectives; what was measured is along the first dim.
    for one, number in zip(together, members, strict=True) if prices.machine.device.curves else ():
        end = copied_end(one.move)
        metas = walk.metas[number][end] if end is not None else ()
        seconds += prices.op(_COPY, metas, metas, ()) if metas else 0.0
    return _Cost(phase, plan.placement.axes[axis], seconds, sent, kind)


def _sent_bytes(box: Box, shapes: LocalShapes) -> int:
    """What the rank sends, as `boxing.route` counts it."""
    move = box.move
    held = shapes.of(box.source)
    assert held is not None
    full = math.prod(move.group_shape(shapes.coordinate)) * held.dtype.itemsize
    return move_bytes(move.kind, full, move.mesh[move.axis])


def _described(item: Op | Box) -> str:
    if isinstance(item, Op):
        return f"{item.node.name} ({item.phase})"
    return f"{item.move.kind} of {item.source.name} ({item.phase})"
