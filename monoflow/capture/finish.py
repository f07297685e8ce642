"""From the functional graph to the StepGraph: a role for every input and output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..graph.rewrite import drop_unused
from ..graph.step_graph import Input, Output, Phase, Role, StepGraph, info_of, meta_of
from .lift import Lifted

aten = torch.ops.aten


def step_graph(
    module: fx.GraphModule, lifted: Lifted, outputs: Sequence[tuple[str, str, bool]], name: str, source: str
) -> StepGraph:
    """The graph with its roles; inputs that nothing uses are dropped.

    Args:
        outputs: (name, name of the input it replaces or "", whether only observed) per result of the graph.
    """
    graph = module.graph
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    placeholders = dict(zip(lifted.fakes, nodes, strict=True))
    outputs = _lift_writes(graph, placeholders, outputs)
    drop_unused(graph)
    _check_functional(graph)
    inputs = []
    for key, node in placeholders.items():
        if node.users:
            inputs.append(Input(key, lifted.roles[key], meta_of(node.meta["val"]), lifted.of[key]))
        else:
            graph.erase_node(node)
    used = {one.name: lifted.constants[one.name] for one in inputs if one.role is Role.CONSTANT}
    _mark_update(graph)
    results: Sequence[fx.Node] = graph.output_node().args[0]  # pyright: ignore[reportAssignmentType]
    made = tuple(
        Output(own, meta_of(node.meta["val"]), replaces, observed)
        for (own, replaces, observed), node in zip(outputs, results, strict=True)
    )
    return StepGraph(graph, tuple(inputs), made, name, source, used)


def _lift_writes(
    graph: fx.Graph, placeholders: Mapping[str, fx.Node], outputs: Sequence[tuple[str, str, bool]]
) -> list[tuple[str, str, bool]]:
    """Turns the final copy_ to an input into an output that replaces it."""
    names = {node: name for name, node in placeholders.items()}
    outputs, written = list(outputs), []
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target is aten.copy_.default]:
        name, value = names[node.args[0]], node.args[1]
        outputs.append((f"{name}:next", name, False))
        written.append(value)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    output = graph.output_node()
    given: Any = output.args[0]
    results: list[Any] = [*given, *written]
    for i, (_, _, observed) in enumerate(outputs):
        if observed and results[i].target is aten.clone.default:  # nothing is written any more
            results[i] = results[i].args[0]
    output.args = (tuple(results),)
    return outputs


def _check_functional(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            writes = schema is not None and schema.is_mutable
            assert not writes, f"{node.target} writes in place, from {info_of(node).source}"


def _mark_update(graph: fx.Graph) -> None:
    """What depends on gradients, outside the backward pass and autograd, prepares the update (clipping)."""
    after: set[fx.Node] = set()
    for node in graph.nodes:
        info = info_of(node)
        if info.phase is Phase.BACKWARD or any(a in after for a in node.all_input_nodes):
            after.add(node)
            if info.phase is Phase.FORWARD and info.sequence == -1 and node.op == "call_function":
                node.meta["info"] = replace(info, phase=Phase.UPDATE)
