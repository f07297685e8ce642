"""Where in a schedule with micro-batches an item stands: before the walk, in it, or after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from ..graph.passes.prepare import PREPARES
from ..graph.step_graph import Role
from ..sbp.layout import Broadcast
from .facts import Facts
from .when import When, when_of

if TYPE_CHECKING:
    from .plan import Plan
    from .schedule import Box, LaidOut, Op


def in_time(
    plan: Plan, facts: Facts, items: Sequence[Op | Box], results: Sequence[LaidOut]
) -> list[Op | Box]:
    """The items in the order of a step with micro-batches, those that are walked marked as such.

    What only the end of the step needs waits for it. A parameter that is gathered for what is walked is
    gathered for every micro-batch, and prepared again: kept, it would be whole on every rank all the while.

    Args:
        results: what leaves the step.
    """
    when = [_when(plan, item, nodes) for nodes in (when_of(plan, facts),) for item in items]
    there: dict[LaidOut, When] = {}
    for number, item in enumerate(items):
        if when[number] is When.BEFORE:
            when[number] = max((there.get(one, When.BEFORE) for one in item.inputs), default=When.BEFORE)
        for value in item.outputs:
            there[value] = When.AFTER if _folds(item) else when[number]
    _delay(plan, facts, items, results, when)
    for number, item in enumerate(items):
        late = [one.name for one in item.inputs if there.get(one) is When.AFTER]
        assert when[number] is When.AFTER or not late, f"{late} are read before the last micro-batch"
    ordered: list[Op | Box] = []
    for part in When:
        ordered += [
            replace(item, walked=part is When.WALKED)
            for item, own in zip(items, when, strict=True)
            if own is part
        ]
    return ordered


def _folds(item: Op | Box) -> bool:
    return getattr(item, "folds", False)


def _when(plan: Plan, item: Op | Box, nodes: dict[fx.Node, When]) -> When:
    """When an item is done, as far as itself says."""
    along = any(not isinstance(one.layout[-1], Broadcast) for one in (*item.inputs, *item.outputs))
    node = getattr(item, "node", None)
    if along:
        return When.WALKED
    return nodes[node] if node is not None else When.BEFORE


def _delay(
    plan: Plan, facts: Facts, items: Sequence[Op | Box], results: Sequence[LaidOut], when: list[When]
) -> None:
    """Moves what could be done before the walk to where it is needed, where that holds less."""
    learnt = prepared(plan, facts)
    readers: dict[LaidOut, set[When]] = {value: {When.AFTER} for value in results}
    again: set[int] = set()
    for number in reversed(range(len(items))):
        item = items[number]
        used = set().union(*(readers.get(value, set()) for value in item.outputs))
        if when[number] is When.BEFORE and used <= {When.AFTER}:
            when[number] = When.AFTER
        if when[number] is When.BEFORE and used == {When.WALKED} and item.outputs[0].node in learnt:
            again.add(number)
        own = When.WALKED if number in again else when[number]
        for value in item.inputs:
            readers.setdefault(value, set()).add(own)
    walked: set[LaidOut] = set()
    for number in sorted(again):
        item = items[number]
        gathers = getattr(item, "is_local", True) is False
        if gathers or any(value in walked for value in item.inputs):
            when[number] = When.WALKED
            walked.update(item.outputs)


def prepared(plan: Plan, facts: Facts) -> set[fx.Node]:
    """Parameters, and what ops that only prepare them make of them."""
    found = {
        node for name, node in plan.graph.placeholders.items() if plan.graph.input_of[name].role is Role.PARAM
    }
    for node, own in facts.items():
        if node.target in PREPARES and own.sources and all(source in found for source, _ in own.sources):
            found.add(node)
    return found
