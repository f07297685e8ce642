"""guard: says which scalars must be finite before a step may change state.

They are its losses, and one scalar that is finite exactly if every gradient is. Where the step takes a norm
of all gradients anyway, to clip them, it is that one, and costs nothing. Where it does not, it is the sum of
all absolute values, and added only if that is asked for: updates that wait for all gradients keep them all
until then. (Either also says "not finite" where it overflows itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ..rewrite import Pass, editable, finished, insert_traced
from ..step_graph import Output, Phase, Role, StepGraph, info_of, meta_of
from .norms import is_full_norm

aten = torch.ops.aten
#: The name of the scalar that stands for all gradients.
GRADIENTS = "checked:gradients"


def guard(losses: Sequence[str] = (), every_gradient: bool = False) -> Pass:
    """The pass for a step whose losses are these results.

    Args:
        every_gradient: whether gradients are checked where the step takes no norm of all of them.
    """

    def pass_(graph: StepGraph) -> StepGraph:
        outputs = tuple(replace(one, checked=one.name in losses) for one in graph.outputs)
        graph = replace(graph, outputs=outputs)
        grads = _gradients(graph)
        if not grads:
            return graph
        edited = editable(graph)
        nodes = {node.name: node for node in edited.nodes}
        found = _norm_of_all(edited, [nodes[one.name] for one in grads])
        if found is None and every_gradient:
            found = _sum_of_all(edited, [_itself(nodes[one.name]) for one in grads])
        if found is None:
            return graph
        results: Any = edited.output_node().args[0]
        edited.output_node().args = ((*results, found),)
        added = Output(GRADIENTS, meta_of(found.meta["val"]), checked=True)
        return finished(replace(graph, outputs=(*outputs, added)), edited)

    return pass_


def _gradients(graph: StepGraph) -> list[fx.Node]:
    """What optimizers see as gradients, and what is left in .grad."""
    left = {one.name for one in graph.inputs if one.role is Role.GRAD}
    found = [
        node
        for one, node in zip(graph.outputs, graph.results, strict=True)
        if one.name.endswith((":observed_grad", ":next_grad")) or one.replaces in left
    ]
    return [one for one in dict.fromkeys(found) if one.op == "call_function" and _is_real(one)]


def _is_real(node: fx.Node) -> bool:
    return node.meta["val"].is_floating_point()


def _norm_of_all(graph: fx.Graph, grads: Sequence[fx.Node]) -> fx.Node | None:
    """A norm over the norms of all gradients, as they are, before it scaled them, or before anything did.

    A factor of another origin may be what is not finite: a gradient that it scaled after the norm was taken
    is another gradient.
    """
    for norm in graph.nodes:
        stack = norm.args[0] if is_full_norm(norm) else None
        if isinstance(stack, fx.Node) and stack.target is aten.stack.default:
            parts: Any = stack.args[0]
            if not all(map(is_full_norm, parts)):
                continue
            seen = {one for part in parts for one in _unscaled(part.args[0], lambda scale: True)}
            if all(not seen.isdisjoint(_unscaled(one, partial(_comes_of, norm))) for one in grads):
                return norm
    return None


def _comes_of(norm: fx.Node, scale: fx.Node) -> bool:
    """Whether a scalar is made of a norm and constants, so that it is finite if that is: what clips."""
    seen, stack = {norm}, [scale]
    while stack:  # not by recursion: a scalar of another origin may come of the whole model
        node = stack.pop()
        if node in seen:
            continue
        if node.op != "call_function":
            return False
        seen.add(node)
        stack += node.all_input_nodes
    return True


#: What gives the elements that it is given.
_SAME_ELEMENTS = frozenset(
    {
        aten.alias.default, aten.clone.default, aten.detach.default, aten.permute.default, aten.t.default,
        aten.transpose.int, aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default,
    }
)  # fmt: skip


def _unscaled(node: Any, may: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """A tensor as it is, and before it was multiplied by 0-dim tensors that `may` be taken off."""
    while isinstance(node, fx.Node):
        node = _itself(node)
        yield node
        if node.target is not aten.mul.Tensor:
            return
        one, other = node.args
        scales = [
            isinstance(side, fx.Node) and not side.meta["val"].dim() and node.meta["val"].dim() > 0
            for side in (one, other)
        ]
        if sum(scales) != 1 or not may(one if scales[0] else other):
            return
        node = other if scales[0] else one


def _itself(node: Any) -> Any:
    """The tensor that a node views or copies."""
    while node.target in _SAME_ELEMENTS:
        node = node.args[0]
    return node


def _sum_of_all(graph: fx.Graph, grads: Sequence[fx.Node]) -> fx.Node:
    """Inserts the sum of the absolute values of all gradients behind the last of them."""
    last = max(grads, key={node: at for at, node in enumerate(graph.nodes)}.__getitem__)
    before = last.next
    info = info_of(last)
    known = set(graph.nodes)
    found: fx.Node = insert_traced(graph, before, _sum, (list(grads),))
    for node in graph.nodes:
        if node not in known:
            node.meta["info"] = replace(info, phase=Phase.UPDATE, sequence=-1)
    return found


def _sum(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [torch.linalg.vector_norm(one, 1, dtype=_wide(one.dtype)) for one in grads]
    return torch.stack([one.to(torch.float32) for one in parts]).sum()


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
