"""Embedding tables whose optimizer leaves rows without a gradient as they are: only touched rows are updated.

The dense gradient of a table, most of it zeros, is never made: `gradient, then update` becomes an update of
the rows that the batch looks up, with what it adds to them. Exact: SGD without momentum and weight decay, and
Adagrad without weight decay, subtract 0 from every other row. On a rank that holds a part of the table these
are the rows that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..runtime.program import task_module
from ..sbp.rules.embedding import embedding_backward_shard, shard_index
from .local import update_in_place

aten = torch.ops.aten
Tensor = torch.Tensor
Lists = tuple[list[Tensor], ...]

_SGD = (aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)
_ADAGRAD = tuple(
    getattr(aten._fused_adagrad_, name)
    for name in ("default", "tensor_lr")
    if hasattr(aten, "_fused_adagrad_") and name in aten._fused_adagrad_.overloads()
)


def touched_rows(module: fx.GraphModule) -> fx.GraphModule:
    """A task's function with updates of touched rows; the same one if it has none."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return task_module(graph) if _rewrite(graph) else module


def _rewrite(graph: fx.Graph) -> int:
    """Rewrites a graph; returns how many tables' updates it changed."""
    changed = 0
    for node in list(graph.nodes):
        if node.target is not update_in_place or len(node.args[1]) != 1:
            continue
        update, gradient = _update_of(node), node.args[2][0]
        found = _looked_up(gradient)
        if update is None or found is None or len(gradient.users) != 1:
            continue
        node.target = update
        node.args = (*found, *node.args[1:2], [], *node.args[3:])
        graph.erase_node(gradient)
        changed += 1
    return changed


def _update_of(node: fx.Node) -> Callable[..., Lists] | None:
    """What updates touched rows alone, if that is what the update comes to."""
    op: Any = node.args[0]
    options: Any = node.kwargs
    if options.get("weight_decay", 0.0) != 0.0 or options.get("grad_scale") is not None:
        return None
    if op in _SGD and options.get("momentum", 0.0) == 0.0:
        return sgd_rows
    if op in _ADAGRAD and options["eps"] > 0:  # with 0, a row that never had a gradient would become NaN
        return adagrad_rows
    return None


def _looked_up(gradient: Any) -> tuple[fx.Node, fx.Node, tuple[int, ...] | None, int] | None:
    """Of a table's gradient: that of what was looked up, the index, the runs held, the padding row."""
    if not isinstance(gradient, fx.Node) or gradient.kwargs:
        return None
    if gradient.target is aten.embedding_dense_backward.default:
        grad, index, _, padding, by_frequency = gradient.args
        runs = None
    elif gradient.target is embedding_backward_shard:
        grad, index, _, runs, padding, by_frequency = gradient.args
    else:
        return None
    return None if by_frequency else (grad, index, runs, padding)  # type: ignore[return-value]


def sgd_rows(
    grad: Tensor,
    index: Tensor,
    runs: Sequence[int] | None,
    padding_idx: int,
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffer_list: list[Tensor],
    *,
    lr: Tensor | float,
    maximize: bool,
    **unused: Any,
) -> Lists:
    """SGD on the rows of a table that an index names.

    Args:
        grad: (*index, width) gradient of the rows that were looked up.
        index: which rows, of the whole table; one may come several times.
        runs: the rows of the whole table that `params` holds, flat; None for all.
        padding_idx: a row that has no gradient; -1 for none.
        params: the table.
    """
    table = params[0]
    local, rows = _held(grad, index, runs, padding_idx)
    table.index_put_((local,), rows * (lr if maximize else -lr), accumulate=True)
    return params, grads, momentum_buffer_list


def adagrad_rows(
    grad: Tensor,
    index: Tensor,
    runs: Sequence[int] | None,
    padding_idx: int,
    params: list[Tensor],
    grads: list[Tensor],
    state_sums: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: Tensor | float,
    lr_decay: float,
    eps: float,
    maximize: bool,
    **unused: Any,
) -> Lists:
    """Adagrad on the rows of a table that an index names; see `sgd_rows`."""
    table, sums = params[0], state_sums[0]
    local, rows = _held(grad, index, runs, padding_idx)
    touched, inverse = torch.unique(local, return_inverse=True)
    total = rows.new_zeros(len(touched), rows.shape[1]).index_put_((inverse,), rows, accumulate=True)
    rate = lr / (1 + (state_steps[0] - 1) * lr_decay)
    history = sums[touched].addcmul_(total, total)
    sums[touched] = history
    change = total / (history.sqrt() + eps) * rate
    table.index_put_((touched,), change if maximize else -change, accumulate=True)
    return params, grads, state_sums, state_steps


def _held(grad: Tensor, index: Tensor, runs: Sequence[int] | None, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Where the rows are in the part of the table that is held, and their gradients: (n,), (n, width)."""
    flat, rows = index.reshape(-1), grad.reshape(-1, grad.shape[-1])
    local = flat if runs is None else shard_index(flat, runs)
    if runs is None and padding_idx < 0:
        return local, rows
    held = (local >= 0) & (flat != padding_idx)
    return local[held], rows[held]
