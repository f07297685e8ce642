"""join-norms: the norm of the norms of many tensors becomes one root of one sum of squares.

`clip_grad_norm_` takes a root per parameter, which is not linear: with sharded gradients every root would
cost a collective of its own. The sum of squares costs one. Changes rounding, not the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..rewrite import editable, finished, insert_copy, insert_traced, traced_on
from ..step_graph import StepGraph

aten = torch.ops.aten
_NORM = aten.linalg_vector_norm.default


def join_norms(graph: StepGraph) -> StepGraph:
    """Rewrites norm(stack([norm(x), norm(y), ...])) as sqrt(sum(stack([sum(x*x), sum(y*y), ...])))."""
    edited = editable(graph)
    squares: dict[tuple, fx.Graph] = {}
    for node in list(edited.nodes):
        stack = node.args[0] if is_full_norm(node) else None
        if not isinstance(stack, fx.Node) or stack.target is not aten.stack.default:
            continue
        parts: Any = stack.args[0]
        if all(is_full_norm(part) for part in parts):
            sums = [_insert_square(edited, node, part.args[0], squares) for part in parts]
            root = insert_traced(edited, node, _root, (sums, node.meta["val"].dtype))
            node.replace_all_uses_with(root)
    return finished(graph, edited)


def _insert_square(graph: fx.Graph, before: fx.Node, source: Any, known: dict[tuple, fx.Graph]) -> fx.Node:
    """Inserts the sum of squares of a tensor; like tensors are traced once."""
    value, dtype = source.meta["val"], before.meta["val"].dtype
    looks = (value.shape, value.stride(), value.dtype, value.device, dtype)
    if looks not in known:
        known[looks] = traced_on(_square, (source, dtype))
    return insert_copy(graph, before, known[looks], (source, dtype))


def is_full_norm(node: Any) -> bool:
    """Whether the node is the 2-norm over all elements of a real tensor, in the tensor's own dtype."""
    if not isinstance(node, fx.Node) or node.target is not _NORM:
        return False
    source: Any = node.args[0]
    if source.meta["val"].is_complex():
        return False
    order: Any = node.args[1] if len(node.args) > 1 else 2
    dims = node.args[2] if len(node.args) > 2 else None
    keepdim = node.args[3] if len(node.args) > 3 else False
    return bool(order == 2) and not dims and not keepdim and node.kwargs.get("dtype") is None


def _square(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = x.to(_accumulation(dtype))
    return aten.sum.default(aten.mul.Tensor(wide, wide))


def _root(squares: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.sqrt(aten.sum.default(torch.stack(squares))).to(dtype)


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
