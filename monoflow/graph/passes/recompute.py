"""recompute: backward computes some activations anew instead of keeping them.

Chen et al., "Training deep nets with sublinear memory cost", 2016. The copies draw the same random numbers,
since a random op is a function of its key and number. Numerics-preserving; a planner asks for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from ..rewrite import copied, finished
from ..step_graph import Phase, StepGraph, info_of, is_getitem

#: Under this key a copy's metadata names the node that it repeats.
AGAIN = "again"


def recompute(graph: StepGraph, names: Collection[str]) -> StepGraph:
    """Gives backward its own copy of forward nodes, made right before its first reader.

    Args:
        names: forward nodes to compute again. What only views or picks them is copied along.
    """
    edited = copied(graph)
    dropped: set[fx.Node] = set()
    again: dict[fx.Node, fx.Node] = {}
    for node in list(edited.nodes):
        phase = info_of(node).phase
        if node.op != "call_function":
            continue
        if phase is Phase.BACKWARD:
            for source in node.all_input_nodes:
                if source in dropped:
                    node.replace_input_with(source, _again(edited, source, node, dropped, again))
        elif phase is Phase.FORWARD and (node.name in names or (_follows(node) and node.args[0] in dropped)):
            dropped.add(node)
    return finished(graph, edited)


def _follows(node: fx.Node) -> bool:
    """Whether a node holds nothing of its own: a view of its first argument, or one output of it."""
    schema = getattr(node.target, "_schema", None)
    return is_getitem(node) or (
        schema is not None and any(one.alias_info is not None for one in schema.returns)
    )


def _again(
    graph: fx.Graph, node: fx.Node, user: fx.Node, dropped: set[fx.Node], again: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The copy of a dropped node for a user in backward, made before it with all that it needs."""
    stack = [node]
    while stack:
        top = stack[-1]
        missing = [one for one in top.all_input_nodes if one in dropped and one not in again]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        if top not in again:
            with graph.inserting_before(user):
                copy = graph.node_copy(top, lambda one: again.get(one, one))
            copy.meta = dict(top.meta)
            copy.meta["info"] = replace(info_of(top), phase=Phase.RECOMPUTE)
            copy.meta[AGAIN] = top.name
            again[top] = copy
    return again[node]
