"""clean: drop ops that only pass their input on. In a functional graph a copy is its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..rewrite import copied, finished
from ..step_graph import StepGraph, metas_of

aten = torch.ops.aten

_ALWAYS = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}
#: ops that pass their input on when shape and dtype stay; and which argument that is
_IF_SAME: dict[Callable, int] = {
    aten.copy.default: 1,
    aten.view.default: 0,
    aten._unsafe_view.default: 0,
    aten.expand.default: 0,
    aten._to_copy.default: 0,
    aten.slice.Tensor: 0,
    aten.squeeze.dim: 0,
    aten.squeeze.dims: 0,
}


def clean(graph: StepGraph) -> StepGraph:
    """Removes aliases, copies and shape ops that change nothing."""
    edited = copied(graph)
    for node in list(edited.nodes):
        if node.target is aten.cat.default:
            _drop_empty(node)
        source = _source(node)
        if source is not None:
            node.replace_all_uses_with(source)
            edited.erase_node(node)
    return finished(graph, edited)


def _drop_empty(node: fx.Node) -> None:
    """torch lets a 1-D tensor of no elements stand in any cat; such a part adds nothing."""
    parts: Any = node.args[0]
    kept = [part for part in parts if metas_of(part)[0].shape != (0,)]  # pyright: ignore
    if kept and len(kept) < len(parts):
        node.args = (kept, *node.args[1:])


def _source(node: fx.Node) -> fx.Node | None:
    if node.target in _ALWAYS:
        return node.args[0]  # pyright: ignore[reportReturnType]
    if node.target is aten.cat.default and len(node.args[0]) == 1:  # pyright: ignore[reportArgumentType]
        return node.args[0][0]  # pyright: ignore
    position = _IF_SAME.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]
    if position is None:
        return None
    source = node.args[position]
    if isinstance(source, fx.Node) and metas_of(source) == metas_of(node):
        return source
    return None
