"""One node as one rank runs it: local arguments, the device's kernels, updates in place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..graph.step_graph import metas_of
from ..plan.schedule import Op
from ..sbp.registry import OpRule
from ..sbp.signature import LocalCall, LocalOp, TensorShard
from ..sbp.strides import on_shards

aten = torch.ops.aten


def local_op(
    op: Op,
    arguments: list[fx.Node],
    rules: Mapping[Callable, OpRule],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    device: torch.device,
) -> tuple[LocalOp, list[TensorShard | None]]:
    """What a rank runs for a node, and the shards it gives.

    Args:
        arguments: the rank's own nodes for the tensor arguments, in flattened order.
    """
    inputs = []
    for value in op.inputs:
        meta = metas_of(value.node)[value.index]
        assert meta is not None
        inputs.append(TensorShard(meta, value.layout, mesh, coordinate))
    outputs = [
        None if meta is None else TensorShard(meta, value.layout, mesh, coordinate)
        for meta, value in zip(metas_of(op.node), op.outputs, strict=True)
    ]
    given = iter(arguments)
    args, kwargs = pytree.tree_map(
        lambda x: next(given) if isinstance(x, fx.Node) else x, (tuple(op.node.args), dict(op.node.kwargs))
    )
    rule = rules.get(op.node.target)  # type: ignore[arg-type]
    if rule is not None and rule.local is not None:
        target, args, kwargs = rule.local(LocalCall(op.node.target, args, kwargs, inputs, outputs))  # type: ignore[arg-type]
    else:
        target = op.node.target
    if "device" in kwargs and kwargs["device"] is not None:
        kwargs = {**kwargs, "device": device}
    return on_shards(target, args, kwargs), outputs  # type: ignore[arg-type]


def update_in_place(op: Any, *lists: Any, **kwargs: Any) -> tuple[list[torch.Tensor], ...]:
    """Runs an in-place fused update and returns its lists, as the functional form would.

    torch's CPU kernels walk all lists as if they had the parameter's strides; a gradient that was moved in
    one layout and transposed afterwards has others.
    """
    used = [_contiguous(one) for one in lists]
    op(*used, **kwargs)
    for given, own in zip(lists, used, strict=True):
        for before, after in zip(given, own, strict=True) if isinstance(given, list) else ():
            if before is not after:
                before.copy_(after)
    return lists


def _contiguous(given: Any) -> Any:
    return [one.contiguous() for one in given] if isinstance(given, list) else given


def pick(graph: fx.Graph, result: fx.Node, paths: Sequence[tuple[int, ...]]) -> list[fx.Node]:
    """Nodes for every output of a call, given the getitem indices that lead to each."""
    found: dict[tuple[int, ...], fx.Node] = {(): result}
    for path in paths:
        for depth in range(1, len(path) + 1):
            if path[:depth] not in found:
                found[path[:depth]] = graph.call_function(
                    operator.getitem, (found[path[: depth - 1]], path[depth - 1])
                )
    return [found[path] for path in paths]
