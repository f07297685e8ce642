"""prepare-per-phase: backward prepares a parameter anew instead of keeping what forward made of it.

A transposed or cast weight that backward reuses keeps the whole weight alive between the phases. Where a plan
gathers parameters at use, that is all of the model; prepared again from the stored parameter, it is gathered
again instead. Not worth it where parameters are at hand anyway, so a planner asks for it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ..rewrite import copied, finished
from ..step_graph import Phase, Role, StepGraph, info_of

aten = torch.ops.aten

#: ops that only prepare a parameter for the op that uses it
PREPARES = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten._to_copy.default, aten.view.default,
    aten.unsqueeze.default, aten.clone.default, aten.mul.Scalar, aten.expand.default,
}  # fmt: skip


def prepare_per_phase(graph: StepGraph) -> StepGraph:
    """Gives backward its own copy of every chain of ops that prepares a parameter."""
    edited = copied(graph)
    placeholders = [node for node in edited.nodes if node.op == "placeholder"]
    params = {node for node, one in zip(placeholders, graph.inputs, strict=True) if one.role is Role.PARAM}
    prepared: set[fx.Node] = set()
    again: dict[fx.Node, fx.Node] = {}
    for node in list(edited.nodes):
        phase = info_of(node).phase
        sources = node.all_input_nodes
        if node.target in PREPARES and len(sources) == 1 and phase is Phase.FORWARD:
            if sources[0] in params or sources[0] in prepared:
                prepared.add(node)
        elif phase is Phase.BACKWARD and node.op == "call_function":
            for source in sources:
                if source in prepared:
                    node.replace_input_with(source, _again(edited, source, node, prepared, again))
    return finished(graph, edited)


def _again(
    graph: fx.Graph, node: fx.Node, user: fx.Node, prepared: set[fx.Node], again: dict[fx.Node, fx.Node]
) -> fx.Node:
    if node not in prepared:
        return node
    if node not in again:
        source = _again(graph, node.all_input_nodes[0], user, prepared, again)
        with graph.inserting_before(user):
            again[node] = graph.node_copy(node, lambda _: source)
        info = info_of(node)
        again[node].meta["info"] = replace(info, phase=Phase.BACKWARD)
    return again[node]
