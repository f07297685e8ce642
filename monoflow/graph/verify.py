"""The verifier of StepGraphs: what every pass and the planner may rely on."""

from __future__ import annotations

import torch
from torch import fx

from .step_graph import NodeInfo, StepGraph, is_getitem, meta_of, metas_of


def verify(graph: StepGraph, after: str) -> StepGraph:
    """Returns `graph` if it is well formed; an AssertionError names what the stage `after` broke."""
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    assert len(placeholders) == len(graph.inputs), f"after {after}: {len(placeholders)} placeholders"
    names = [one.name for one in graph.inputs]
    assert len(set(names)) == len(names), f"after {after}: an input name appears twice"
    for one, node in zip(graph.inputs, placeholders, strict=True):
        assert metas_of(node) == (one.meta,), (
            f"after {after}: input {one.name} is {metas_of(node)}, not {one.meta}"
        )
    seen: set[fx.Node] = set()
    for node in nodes:
        assert all(source in seen for source in node.all_input_nodes), f"after {after}: {node} runs too early"
        seen.add(node)
        if node.op == "call_function":
            _verify_call(node, after)
        else:
            assert node.op in ("placeholder", "output"), f"after {after}: {node} is a {node.op}"
    assert len(graph.results) == len(graph.outputs), f"after {after}: {len(graph.results)} results"
    for one, node in zip(graph.outputs, graph.results, strict=True):
        assert metas_of(node) == (one.meta,), f"after {after}: output {one.name} is {metas_of(node)}"
        if one.replaces in graph.input_of:
            before = graph.input_of[one.replaces].meta
            assert before == one.meta, f"after {after}: {one.replaces} was {before}, becomes {one.meta}"
    return graph


def _verify_call(node: fx.Node, after: str) -> None:
    assert is_getitem(node) or isinstance(node.target, torch._ops.OpOverload), f"after {after}: {node.target}"
    assert isinstance(node.meta.get("info"), NodeInfo), f"after {after}: {node} has no origin"
    assert "val" in node.meta, f"after {after}: {node} has no fake value"
    if isinstance(node.target, torch._ops.OpOverload):
        assert not node.target._schema.is_mutable, f"after {after}: {node} writes in place"
    if is_getitem(node):
        source: fx.Node = node.args[0]  # pyright: ignore[reportAssignmentType]
        assert not is_getitem(source) or isinstance(source.meta["val"], (list, tuple)), node
        assert meta_of(node.meta["val"]) is not None if isinstance(node.meta["val"], torch.Tensor) else True
