"""What passes share: a StepGraph is copied, edited and returned anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .step_graph import StepGraph, info_of

#: A pass: numerics-preserving unless its module says otherwise.
Pass = Callable[[StepGraph], StepGraph]


def copied(graph: StepGraph) -> fx.Graph:
    """A copy of the fx graph, free to edit. Node names and metadata are kept."""
    new = fx.Graph()
    results: Any = new.graph_copy(graph.graph, {}, return_output_node=True)
    value, old_output = results
    new.output(value).meta.update(old_output.meta)
    return new


def finished(graph: StepGraph, edited: fx.Graph) -> StepGraph:
    """The StepGraph with `edited` in place of its graph; unused nodes (never placeholders) are dropped."""
    for node in reversed(edited.nodes):
        if node.op == "call_function" and not node.users:
            edited.erase_node(node)
    return replace(graph, graph=edited)


def insert_traced(graph: fx.Graph, before: fx.Node, function: Callable, args: Sequence[Any]) -> Any:
    """Inserts the ops of `function(*args)` before a node; returns its results as nodes.

    Args:
        function: works on tensors; traced with fake tensors of the argument nodes.
        args: nodes and plain values, in any nesting.
    """
    leaves, spec = pytree.tree_flatten(tuple(args))
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(node: fx.Node) -> FakeTensor:
        value = node.meta["val"]
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)  # type: ignore

    def run(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        full = [next(given) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        return function(*pytree.tree_unflatten(full, spec))

    with torch.no_grad():
        traced = make_fx(run)(*(fake(node) for node in nodes))
    env: dict[fx.Node, fx.Node] = dict(
        zip((n for n in traced.graph.nodes if n.op == "placeholder"), nodes, strict=True)
    )
    info = info_of(before)
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta["info"] = info
            assert node.op != "get_attr", f"{function} closes over a tensor"
    return pytree.tree_map_only(fx.Node, env.__getitem__, traced.graph.output_node().args[0])
