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


def add_call(graph: fx.Graph, target: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> fx.Node:
    """Adds a node, called `name` or like it."""
    # Given at once, fx would look through all arguments for symbolic sizes first: most of what a node costs.
    node = graph.create_node("call_function", target, name=name)
    node.args = tuple(args)
    if kwargs:
        node.kwargs = kwargs
    return node


def editable(graph: StepGraph) -> fx.Graph:
    """The fx graph, free to edit: a draft's own, and of any other a copy."""
    return graph.graph if graph.draft else copied(graph)


def copied(graph: StepGraph, source_of: Callable[[fx.Node], fx.Node | None] = lambda _: None) -> fx.Graph:
    """A copy of the fx graph, free to edit. Node names and metadata are kept.

    Args:
        source_of: for a node just copied (all before it are, too), the node of the copy that it only passes
            on: that takes its place. Replaced afterwards, every node that is an output would cost a walk
            over all outputs.
    """
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)  # type: ignore[misc]
        if node.op == "call_function":
            copy = add_call(new, node.target, args, kwargs, node.name)
        else:
            copy = new.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta.update(node.meta)
        source = source_of(copy)
        if source is not None:
            new.erase_node(copy)
        copies[node] = copy if source is None else source
    return new


def drop_unused(graph: fx.Graph) -> None:
    """Erases the nodes of a functional graph that lead to no output, placeholders excepted."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def finished(graph: StepGraph, edited: fx.Graph) -> StepGraph:
    """The StepGraph with `edited` in place of its graph; unused nodes (never placeholders) are dropped."""
    drop_unused(edited)
    return replace(graph, graph=edited)


def insert_traced(graph: fx.Graph, before: fx.Node, function: Callable, args: Sequence[Any]) -> Any:
    """Inserts the ops of `function(*args)` before a node; returns its results as nodes.

    Args:
        function: works on tensors; traced with fake tensors of the argument nodes.
        args: nodes and plain values, in any nesting.
    """
    return insert_copy(graph, before, traced_on(function, args), args)


def traced_on(function: Callable, args: Sequence[Any]) -> fx.Graph:
    """The ops of `function(*args)`, to insert for these arguments or for others that look like them."""
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
        return make_fx(run)(*(fake(node) for node in nodes)).graph


def insert_copy(graph: fx.Graph, before: fx.Node, traced: fx.Graph, args: Sequence[Any]) -> Any:
    """Inserts what `traced_on` gave before a node, for arguments that look like those it was traced on."""
    nodes = [leaf for leaf in pytree.tree_leaves(tuple(args)) if isinstance(leaf, fx.Node)]
    env: dict[fx.Node, fx.Node] = dict(
        zip((n for n in traced.nodes if n.op == "placeholder"), nodes, strict=True)
    )
    info = info_of(before)
    with graph.inserting_before(before):
        for node in traced.nodes:
            if node.op == "call_function":
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta["info"] = info
            assert node.op != "get_attr", "what is inserted closes over a tensor"
    return pytree.tree_map_only(fx.Node, env.__getitem__, traced.output_node().args[0])
