"""What a plan may do to the captured graph before it lays it out. A saved plan does the same again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import fx

from ..errors import PlanError
from ..graph.passes.prepare import prepare_per_phase
from ..graph.passes.recompute import recompute
from ..graph.rewrite import copied, finished, insert_traced
from ..graph.step_graph import StepGraph
from ..graph.verify import verify
from ..sbp.registry import OpRule

#: What is done, and to which nodes.
Rewrite = tuple[str, tuple[str, ...]]

PREPARE = ("prepare-per-phase", ())
#: What has the shape of another tensor is made from that shape, without waiting for the tensor.
FACTORIES = ("factories", ())

aten = torch.ops.aten
#: Of these: the value, given their arguments.
_LIKE: Mapping[Callable, Callable[..., float]] = {
    aten.zeros_like.default: lambda _: 0,
    aten.new_zeros.default: lambda _, size: 0,
    aten.ones_like.default: lambda _: 1,
    aten.new_ones.default: lambda _, size: 1,
    aten.full_like.default: lambda _, value: value,
    aten.new_full.default: lambda _, size, value: value,
}

#: A classifier's loss: in simpler ops the layer before it may stay split by the vocabulary.
LOSSES = frozenset({torch.ops.aten._log_softmax.default, torch.ops.aten._log_softmax_backward_data.default})


def rewritten(graph: StepGraph, rewrites: Iterable[Rewrite], rules: Mapping[Callable, OpRule]) -> StepGraph:
    """The graph after some rewrites, each checked.

    Raises:
        PlanError: a rewrite that this version does not know.
    """
    for kind, names in rewrites:
        if kind == PREPARE[0]:
            graph = prepare_per_phase(graph)
        elif kind == FACTORIES[0]:
            graph = made_anew(graph)
        elif kind == "expand":
            graph = expand(graph, names, rules)
        elif kind == "recompute":
            graph = recompute(graph, frozenset(names))
        else:
            raise PlanError(f"the plan rewrites its graph by {kind!r}, which this version does not know")
        graph = verify(graph, kind)
    return graph


def made_anew(graph: StepGraph) -> StepGraph:
    """The graph with ops such as ones_like as ops that read no tensor, where they make a contiguous one."""
    edited = copied(graph)
    for node in edited.nodes:
        if node.target in _LIKE and node.meta["val"].is_contiguous():
            value, made = _LIKE[node.target](*node.args), node.meta["val"]
            node.target = aten.full.default
            node.args = (list(made.shape), value)
            node.kwargs = {"dtype": made.dtype, "device": made.device}
    return finished(graph, edited)


def expansion(node: fx.Node, rules: Mapping[Callable, OpRule]) -> Callable | None:
    """A function that computes what a node does from simpler ops, if its rule has one."""
    rule = rules.get(node.target)  # type: ignore[arg-type]
    return rule.expand if rule is not None else None


def expand(graph: StepGraph, names: Sequence[str], rules: Mapping[Callable, OpRule]) -> StepGraph:
    """The graph with some nodes in their simpler form."""
    edited = copied(graph)
    chosen = set(names)
    for node in list(edited.nodes):
        if node.name in chosen:
            function = expansion(node, rules)
            assert function is not None, node
            given = (list(node.args), dict(node.kwargs))
            _replace(edited, node, insert_traced(edited, node, _bound(function, node), given))
    return finished(graph, edited)


def _bound(function: Callable, node: fx.Node) -> Callable:
    def call(args: list, kwargs: dict) -> object:
        return function(*args, **kwargs)

    call.__name__ = node.name
    return call


def _replace(graph: fx.Graph, node: fx.Node, results: object) -> None:
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        assert isinstance(results, (list, tuple))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])  # pyright: ignore
            graph.erase_node(user)
    graph.erase_node(node)
