"""The order in which a graph's nodes run: as captured, but for updates, which run as soon as they can.

An update right after its gradient is made, and after the last reader of what it overwrites, frees the
gradient at once; where the gradients' common norm is needed first, updates wait for it as captured. What is
computed is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.step_graph import Phase
from .facts import Facts

aten = torch.ops.aten

#: Functional fused updates and their in-place forms.
IN_PLACE: Mapping[Any, Any] = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for name in ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
    if hasattr(aten, name)
    for overload in ("default", "tensor_lr")
    if overload in getattr(aten, name).overloads() and overload in getattr(aten, f"{name}_").overloads()
}


def ordered(nodes: Sequence[fx.Node], facts: Facts, gates: Collection[fx.Node] = ()) -> list[fx.Node]:
    """The nodes in the order in which they run.

    Args:
        nodes: those that run, in the graph's order; getitem nodes are none of them.
        gates: nodes that all updates come after.
    """
    due: dict[int, list[fx.Node]] = {}
    for update, position in _earliest(nodes, facts, gates).items():
        due.setdefault(position, []).append(update)
    result: dict[fx.Node, None] = {}
    for position in range(-1, len(nodes)):
        if position >= 0:
            result[nodes[position]] = None
        for update in due.get(position, ()):
            _place(update, facts, result)
    return list(result)


def _earliest(nodes: Sequence[fx.Node], facts: Facts, gates: Collection[fx.Node]) -> dict[fx.Node, int]:
    """For every update, the position of the last node that it must come after."""
    position = {node: number for number, node in enumerate(nodes)}
    last_read = _last_reads(nodes, facts)
    gate = max((position[one] for one in gates if one in position), default=-1)
    after: dict[fx.Node, int] = {}  # of nodes of the update phase: the last node before it that they need
    found: dict[fx.Node, int] = {}
    for node in nodes:
        if facts[node].phase is not Phase.UPDATE:
            continue
        needs = [after.get(source, position.get(source, -1)) for source, _ in facts[node].sources]
        if node.target in IN_PLACE:
            needs += [gate, *(last_read[value] for value in facts[node].sources if value in last_read)]
            found[node] = max(needs, default=-1)
        after[node] = max(needs, default=-1)
    return found


def _last_reads(nodes: Sequence[fx.Node], facts: Facts) -> dict[tuple[fx.Node, int], int]:
    """Of every input of the step, the position of its last reader that is no update; views read too."""
    root: dict[tuple[fx.Node, int], tuple[fx.Node, int]] = {}
    found: dict[tuple[fx.Node, int], int] = {}
    for number, node in enumerate(nodes):
        own = facts[node]
        for value in own.sources:
            origin = root.get(value, value)
            if origin[0].op == "placeholder" and node.target not in IN_PLACE:
                found[origin] = number
        if own.is_view and own.sources:
            origin = root.get(own.sources[0], own.sources[0])
            root |= {(node, index): origin for index in range(len(own.metas))}
    return found


def _place(node: fx.Node, facts: Facts, result: dict[fx.Node, None]) -> None:
    """Appends a node, after what it needs of the update phase that is not there yet."""
    stack = [(node, False)]
    while stack:
        one, is_ready = stack.pop()
        if one in result or one.op == "placeholder":
            continue
        if is_ready:
            result[one] = None
            continue
        stack.append((one, True))
        stack += [(source, False) for source, _ in reversed(facts[one].sources)]
