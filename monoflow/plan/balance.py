"""Dynamic balance: ranks pull micro-batches from one stream, so that a slow or busy rank does fewer.

Under a plan whose ranks do not meet while they walk the batch, what is done for micro-batch t of the rank at
coordinate d depends on (d, t) alone: its rows and its random numbers. It is a unit of work that any rank can
do, and adds to the sums that it keeps. Whoever did which, these are P(sum) over the ranks, so that what comes
after the walk makes the same of them. For this

- what the walk reads is whole on every rank, and cut for each unit: the batch is stored B, and what is made
  of it before the walk is gathered;
- a result that has rows of its own (S) is a whole tensor of zeros but for the rows of a rank's units, which
  is P(sum), and reduced to its own layout after the walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from ..errors import PlanError
from ..graph.step_graph import Phase, Role, info_of, op_name
from ..sbp.layout import At, B, Broadcast, NdSbp, P, Partial, Split, text
from .facts import Facts
from .items import Box, LaidOut, Op
from .paths import Paths

if TYPE_CHECKING:
    from .plan import Plan

_ADVICE = 'Use plan="data", or balance="static"'
#: Tell tensors that are gathered for the walk, and those of one unit, from all others of the same layout.
_GATHERED, _OF_UNIT = "gathered", "unit"


def balanced(plan: Plan) -> Plan:
    """The plan with its micro-batches pulled by whichever rank is free; on one device, the plan itself.

    Args:
        plan: one with micro-batches. That its ranks do not meet in the walk is seen when it is scheduled.

    Raises:
        PlanError: it is a pipeline, or has one micro-batch.
    """
    if plan.placement.size == 1:
        return plan
    if plan.has_stages:
        raise PlanError(
            f'balance="dynamic": plan {plan.name!r} on {plan.placement} is a pipeline, whose ranks do '
            f"different work. {_ADVICE}"
        )
    if not plan.has_time:
        raise PlanError(
            f'balance="dynamic": with one micro-batch each of {plan.placement.size} ranks has all its work '
            "at once, and nothing is left to pull. Give micro_batches=4 or more"
        )
    batch = {one.name for one in plan.graph.inputs if one.role is Role.BATCH}
    whole = (B,) * plan.placement.num_axes
    inputs = {name: whole if name in batch else one for name, one in plan.inputs.items()}
    return replace(plan, inputs=inputs, is_pulled=True, predicted=None)


def pulled(
    plan: Plan,
    items: Sequence[Op | Box],
    facts: Facts,
    inputs: Sequence[LaidOut],
    results: Sequence[LaidOut],
) -> list[Op | Box]:
    """The items of a step, in order, changed so that any rank can do any unit of what is walked.

    Args:
        inputs, results: what comes into the step and leaves it.

    Raises:
        PlanError: ranks meet in the walk, or what it makes is no sum over them; names the op, its line and
            the axis.
    """
    return _Pulled(plan, facts).changed(items, inputs, results)


class _Pulled:
    def __init__(self, plan: Plan, facts: Facts) -> None:
        self.plan, self.facts = plan, facts
        self.paths = Paths(plan)
        self.axes = [axis for axis, size in enumerate(plan.placement.shape) if size > 1]
        self.made: set[LaidOut] = set()  # by moves that are put in here

    def changed(
        self, items: Sequence[Op | Box], inputs: Sequence[LaidOut], results: Sequence[LaidOut]
    ) -> list[Op | Box]:
        walked = [item for item in items if item.walked]
        begin = items.index(walked[0])
        before = list(items[:begin])
        known = {one[:3]: one for one in (*inputs, *(value for item in before for value in item.outputs))}
        own = {value for item in walked for value in item.outputs}
        cuts: dict[LaidOut, LaidOut] = {}
        within: list[Op | Box] = []
        then: list[Op | Box] = []
        for item in walked:
            self._check(item)
            for value in item.inputs:
                layout = self._gathered(value.layout)
                if value in own or value in cuts or layout == value.layout:
                    continue
                key = value.node, value.index, layout
                if key not in known:
                    moves = list(self._moves(value, layout, _GATHERED, item.phase))
                    known[key] = moves[-1].target
                    before += moves
                cuts[value] = LaidOut(*value[:3], _OF_UNIT)
                within += self._moves(known[key], value.layout, _OF_UNIT, item.phase, walked=True)
            item = _reading(item, cuts)
            if isinstance(item, Box) and item.folds:
                item, moves = self._folded(item)
                then += moves
            within.append(item)
        after = [item for item in items[begin:] if not item.walked]
        return _read([*before, *within, *then, *after], results)

    def _check(self, item: Op | Box) -> None:
        if isinstance(item, Box) and not item.is_local and not item.folds:
            axis = item.move.axis
            self._refuse(item.source, f"is moved by {item.move.kind}, in every micro-batch", axis)

    def _gathered(self, layout: NdSbp) -> NdSbp:
        """A layout whole along the axes of devices."""
        return tuple(B if axis in self.axes else one for axis, one in enumerate(layout))

    def _moves(
        self, source: LaidOut, layout: NdSbp, key: str, phase: Phase, walked: bool = False
    ) -> Iterator[Box]:
        """The moves of a tensor to another layout; those that were made before for the walk are left out."""
        meta = self.facts[source.node].metas[source.index]
        assert meta is not None, f"{source.name} is absent"
        here = source
        for step in self.paths.of(source.layout, layout, meta).steps:
            then = LaidOut(source.node, source.index, step.target, key)
            if then not in self.made:
                self.made.add(then)
                yield Box(step, here, then, phase, walked=walked)
            here = then

    def _folded(self, item: Box) -> tuple[Box, list[Box]]:
        """A move along time as ranks do it that have some of the units, and what follows after the walk."""
        given, target = item.source.layout, item.target
        for axis in self.axes:
            if isinstance(given[axis], (Broadcast, At)):
                self._refuse(item.source, "is made in every micro-batch and the same on all ranks", axis)
        parts = [given[axis] for axis in (*self.axes, len(given) - 1)]
        if len(set(parts)) == 1 and isinstance(parts[0], Partial):
            return item, []
        for axis, one in zip((*self.axes, len(given) - 1), parts, strict=True):
            if one != P and not (isinstance(one, Split) and one.blocks == 1):
                self._refuse(item.source, "is neither in rows of micro-batches nor their sum", axis)
        layout = tuple(P if axis in self.axes else one for axis, one in enumerate(target.layout))
        if layout == target.layout:
            return item, []
        whole = LaidOut(target.node, target.index, layout, _OF_UNIT)
        moves = list(self._moves(whole, target.layout, _OF_UNIT, item.phase))
        moves[-1] = replace(moves[-1], target=target)
        return replace(item, target=whole, move=replace(item.move, target=layout)), moves

    def _refuse(self, value: LaidOut, what: str, axis: int) -> NoReturn:
        node = value.node
        names = {one: name for name, one in self.plan.graph.placeholders.items()}
        if node in names:
            who = names[node]
        else:
            info = info_of(node)
            where = f" at {info.source}" * bool(info.source) + f" in {info.module!r}" * bool(info.module)
            who = f"%{node.name} = {op_name(node.target)}{where}"
        axes = ", ".join(self.plan.axes)
        raise PlanError(
            f'balance="dynamic": under plan {self.plan.name!r}, {who} {what}, along axis '
            f"{self.plan.axes[axis]!r} (it is {text(value.layout)} along {axes}), so that no rank can do a "
            f"micro-batch by itself. {_ADVICE}"
        )


def _reading(item: Op | Box, instead: dict[LaidOut, LaidOut]) -> Op | Box:
    """An item that reads other tensors where there are some instead."""
    if isinstance(item, Box):
        return replace(item, source=instead.get(item.source, item.source))
    return replace(item, inputs=tuple(instead.get(value, value) for value in item.inputs))


def _read(items: Sequence[Op | Box], results: Sequence[LaidOut]) -> list[Op | Box]:
    """The items without moves that nobody reads any more."""
    read = set(results)
    kept: list[Op | Box] = []
    for item in reversed(items):
        if isinstance(item, Op) or item.target in read:
            kept.append(item)
            read.update(item.inputs)
    return kept[::-1]
