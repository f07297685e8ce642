"""hoist-counts: counts that depend on the batch alone move to a prologue over the whole batch.

The number of tokens that are not ignored, say, divides the loss of every micro-batch; it depends on no
parameter, so it can be known before the first of them runs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..rewrite import editable, finished
from ..step_graph import Phase, Role, StepGraph, info_of, metas_of


def hoist_counts(graph: StepGraph) -> StepGraph:
    """Marks batch-only reductions to one element, and what they need, and moves them to the front."""
    edited = editable(graph)
    placeholders = [node for node in edited.nodes if node.op == "placeholder"]
    batch_only: set[fx.Node] = set()
    from_batch: set[fx.Node] = set()
    for one, node in zip(graph.inputs, placeholders, strict=True):
        if one.role in (Role.BATCH, Role.CONSTANT):
            batch_only.add(node)
        if one.role is Role.BATCH:
            from_batch.add(node)
    hoisted: set[fx.Node] = set()
    for node in edited.nodes:
        if node.op != "call_function":
            continue
        if all(source in batch_only for source in node.all_input_nodes):
            batch_only.add(node)
            if any(source in from_batch for source in node.all_input_nodes):
                from_batch.add(node)
        if node in from_batch and _reduces_to_one(node):
            _collect(node, hoisted)
    last = placeholders[-1] if placeholders else edited._root
    for node in list(edited.nodes):
        if node in hoisted:
            last.append(node)
            last = node
            node.meta["info"] = replace(info_of(node), phase=Phase.PROLOGUE)
    return finished(graph, edited)


def _reduces_to_one(node: fx.Node) -> bool:
    outputs = metas_of(node)
    return (
        len(outputs) == 1
        and outputs[0] is not None
        and outputs[0].numel == 1
        and any(
            meta is not None and meta.numel > 1
            for source in node.all_input_nodes
            for meta in metas_of(source)
        )
    )


def _collect(node: fx.Node, into: set[fx.Node]) -> None:
    stack = [node]
    while stack:
        one = stack.pop()
        if one.op == "call_function" and one not in into:
            into.add(one)
            stack.extend(one.all_input_nodes)
