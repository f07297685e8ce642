"""What a plan will cost, before it runs: seconds, bytes sent, and memory at every point in time.

It walks the very schedule that is lowered, on the shapes of a rank with the largest shards. Compute and
communication take turns in today's runtime, so the step's seconds are their sum, less what is `hidden`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..boxing.route import move_bytes
from ..graph.step_graph import StepGraph
from ..sbp.signature import TensorMeta
from .cost import Machine, op_seconds
from .facts import Facts, facts_of
from .memory import CATEGORIES, LocalShapes, Timeline, Walk
from .op_class import ARITHMETIC, class_of
from .plan import Plan
from .schedule import Box, Op, Schedule, schedule

_COPY = torch.ops.aten.clone.default

#: The kinds of time beside an axis' name: an op's own work, and moves that send nothing.
COMPUTE, LOCAL_MOVE = "compute", "local move"


@dataclass(frozen=True)
class Prediction:
    """What one rank with the largest shards will do in a step.

    Attributes:
        seconds: of the whole step.
        seconds_by: phase -> "compute", "local move" or the mesh axis that is sent along -> seconds.
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
    made = made or schedule(plan, facts=facts)
    shapes = LocalShapes(plan, facts, coordinate)
    walk = Walk(plan, made, shapes)
    memory = walk.swept()
    spent, sent, collectives = _spent(plan, made, walk, prices)
    hidden = 0.0  # one thread runs everything; what overlaps is taken off here once lanes do
    total = sum(seconds for by_kind in spent.values() for seconds in by_kind.values()) - hidden
    at = memory.peak
    return Prediction(
        seconds=total,
        seconds_by=spent,
        hidden=hidden,
        peak_bytes=memory.peak_bytes,
        peak_at=at,
        peak_item=_described(made.items[at]) if at >= 0 else "",
        peak_split=dict(zip(CATEGORIES, memory.held[at], strict=True)) if at >= 0 else {},
        sent=sent,
        collectives=dict(collectives),
        memory=memory,
    )


def _spent(
    plan: Plan, made: Schedule, walk: Walk, prices: Prices
) -> tuple[dict[str, dict[str, float]], dict[str, int], Counter[str]]:
    """Seconds by phase and kind, bytes sent by axis, and collectives by kind."""
    links = prices.machine.on(plan.placement.num_axes).links
    axes = plan.placement.axes
    spent: dict[str, dict[str, float]] = {}
    sent = dict.fromkeys(axes, 0)
    collectives: Counter[str] = Counter()
    for position, item in enumerate(made.items):
        inputs, outputs = walk.metas[position]
        if isinstance(item, Op):
            target: Any = item.node.target
            kind, seconds = COMPUTE, prices.op(target, inputs, outputs, item.node.args)
        elif item.is_local or math.prod(item.move.shape) == 0:
            is_copied = bool(walk.begins[position])
            kind, seconds = LOCAL_MOVE, prices.op(_COPY, outputs, outputs, ()) if is_copied else 0.0
        else:
            axis, num_bytes = item.move.axis, _sent_bytes(item, walk.shapes)
            kind, seconds = axes[axis], links[axis].seconds(item.move.kind, num_bytes)
            sent[kind] += num_bytes
            collectives[item.move.kind] += 1
        by_kind = spent.setdefault(str(item.phase), {})
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
    return spent, sent, collectives


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
