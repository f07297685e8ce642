"""Which optimizer updates may run in place: those whose state nothing reads any more, behind the gate.

A view reads the memory it was made from, so a state and all views of it, through any number of ops and local
moves, count as one. Tasks that read them before the update must be done when it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..graph.step_graph import Role
from .facts import may_share_memory
from .order import IN_PLACE
from .plan import Plan
from .schedule import Box, LaidOut, Op, Schedule


@dataclass(frozen=True)
class Donations:
    """What runs in place.

    Attributes:
        nodes: the updates that may write what they read.
        values: the inputs of the program that they overwrite.
        readers: per overwritten input, the tasks that read it or a view of it before.
    """

    nodes: frozenset[fx.Node]
    values: frozenset[LaidOut]
    readers: Mapping[LaidOut, tuple[int, ...]]


def donations(plan: Plan, made: Schedule, tasks: Sequence[Iterable[Op | Box]]) -> Donations:
    """Decides for every update of a schedule, cut into tasks, whether it may run in place."""
    names = {node: name for name, node in plan.graph.placeholders.items()}
    roles = plan.graph.input_of
    state = {one for one in made.inputs if roles[names[one.node]].role in (Role.PARAM, Role.STATE)}
    origin: dict[LaidOut, LaidOut] = {}
    uses: dict[LaidOut, list[tuple[int, int, Op | Box]]] = {}
    updates: list[tuple[int, Op]] = []
    number = 0
    for task, items in enumerate(tasks):
        for item in items:
            number += 1
            for value in item.inputs:
                uses.setdefault(origin.get(value, value), []).append((number, task, item))
            for value, source in shares_memory(item):
                origin[value] = origin.get(source, source)
            if isinstance(item, Op) and item.node.target in IN_PLACE:
                updates.append((number, item))
    handed_out = {origin.get(value, value) for _, value in made.outputs}
    nodes: set[fx.Node] = set()
    readers: dict[LaidOut, tuple[int, ...]] = {}
    for when, update in updates:
        written = overwritten(update)
        if when > made.gate and all(
            value in state and value not in handed_out and all(at <= when for at, _, _ in uses[value])
            for value in written
        ):
            nodes.add(update.node)
            for value in written:
                own = next(task for at, task, _ in uses[value] if at == when)
                readers[value] = tuple(sorted({task for _, task, _ in uses[value]} - {own}))
    return Donations(frozenset(nodes), frozenset(readers), readers)


def leaves_apart(plan: Plan, made: Schedule) -> bool:
    """Whether each output that replaces an input can be put where that is as soon as nobody reads the input.

    So it shares memory with no other output, and no other output is what the input was.
    """
    names = {node: name for name, node in plan.graph.placeholders.items()}
    origin: dict[LaidOut, LaidOut] = {}
    for item in made.items:
        for value, source in shares_memory(item):
            origin[value] = origin.get(source, source)
    given = {names[value.node]: value for value in made.inputs}
    left = [(one.replaces, origin.get(value, value)) for one, value in made.outputs]
    counts = Counter(memory for _, memory in left)
    replaced = {given[name] for name, _ in left if name in given}
    return all(
        (counts[memory] == 1 or not name) and (memory not in replaced or memory == given.get(name))
        for name, memory in left
    )


def overwritten(update: Op) -> list[LaidOut]:
    """The values that the in-place form of an update writes (never the gradients)."""
    op = IN_PLACE[update.node.target]
    flat, written = iter(update.inputs), []
    for argument, given in zip(op._schema.arguments, update.node.args, strict=False):
        values = [next(flat) for _ in given] if isinstance(given, (list, tuple)) else []
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
            written += values
    return written


def shares_memory(item: Op | Box) -> list[tuple[LaidOut, LaidOut]]:
    """(view, what it is a view of) of everything that may share memory with what an item reads."""
    if isinstance(item, Box):
        return [(item.target, item.source)] if item.is_local and item.gives else []
    if not item.inputs or not may_share_memory(item.node.target):
        return []
    return [(value, item.inputs[0]) for value in item.outputs]
