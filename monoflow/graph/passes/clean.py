"""clean: drop ops that only pass their input on. In a functional graph a copy is its source, and so is what
views of it lead back to.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..rewrite import copied, finished
from ..step_graph import StepGraph

aten = torch.ops.aten

_NO_IDENTIFIER = re.compile(r"\W", re.ASCII)

_ALWAYS = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}
#: ops that pass their input on when nothing of it changes; and which argument that is
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
#: views of which a second one like the first, back to the shape that was, is no change
_UNDO_THEMSELVES = (aten.t.default, aten.transpose.int, aten.view.default)


def clean(graph: StepGraph) -> StepGraph:
    """Removes aliases, copies and shape ops that change nothing; calls placeholders after their inputs."""
    edited = copied(graph, _source)
    placeholders = [node for node in edited.nodes if node.op == "placeholder"]
    for one, node in zip(graph.inputs, placeholders, strict=True):
        node._rename(_NO_IDENTIFIER.sub("_", one.name))
    return finished(graph, edited)


def _drop_empty(node: fx.Node) -> None:
    """torch lets a 1-D tensor of no elements stand in any cat; such a part adds nothing but its dtype."""
    parts: Any = node.args[0]
    kept = [part for part in parts if part.meta["val"].shape != (0,)]
    if len(kept) < len(parts) and any(part.meta["val"].dtype == node.meta["val"].dtype for part in kept):
        node.args = (kept, *node.args[1:])


def _source(node: fx.Node) -> fx.Node | None:
    """What the node only passes on, if it does."""
    if node.target in _ALWAYS:
        return node.args[0]  # pyright: ignore[reportReturnType]
    if node.target is aten.cat.default:
        _drop_empty(node)
        parts: Any = node.args[0]
        return parts[0] if len(parts) == 1 and _same(parts[0], node) else None
    position = _IF_SAME.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]
    source = node.args[position] if position is not None else None
    if isinstance(source, fx.Node) and _same(source, node):
        return source
    return _undone(node)


def _undone(node: fx.Node) -> fx.Node | None:
    """What the node's own source is a view of, if the node undoes that view."""
    if node.target not in _UNDO_THEMSELVES:
        return None
    view: Any = node.args[0]
    if view.target is not node.target:
        return None
    if node.target is aten.transpose.int and _dims(view) != _dims(node):
        return None
    source = view.args[0]
    return source if _same(source, node) else None


def _dims(transpose: fx.Node) -> set[int]:
    """The dims that a transpose swaps, counted from the front."""
    dims: Any = transpose.args[1:]
    return {dim % max(1, transpose.meta["val"].dim()) for dim in dims}


def _same(source: fx.Node, node: fx.Node) -> bool:
    """Whether both are tensors of one shape, dtype, device and order of elements in memory."""
    before, after = source.meta["val"], node.meta["val"]
    return (
        before.shape == after.shape
        and before.dtype == after.dtype
        and before.device == after.device
        and _strides(before) == _strides(after)
    )


def _strides(value: torch.Tensor) -> list[int]:
    """The strides that are ever taken."""
    return [
        stride
        for stride, extent in zip(value.stride(), value.shape, strict=True)
        if extent > 1 and value.numel()
    ]
