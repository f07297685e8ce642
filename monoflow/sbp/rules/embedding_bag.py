"""Sums and means of looked-up rows: splits of the row dim, of the vocabulary, and of the bags.

Which indices a bag holds is data, so every rank sees all of them. The other outputs (which bag an index is
in, how many a bag has) depend on indices alone and are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..layout import B
from ..registry import Forms, OpRule, aten, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature, TensorShard
from .common import (
    argument,
    compute_dtype,
    has_argument,
    linear_signature,
    named,
    tensor_names,
    with_arguments,
)
from .embedding import embedding_shard, shard_index

_SUM, _MEAN, _MAX = range(3)

Bags = tuple[int, int]  # the first bag that a rank holds, and the one after its last


def _signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Nothing for maxima, whose places in the table depend on values."""
    if argument(call, "mode") == _MAX:
        return []
    others = len(call.outputs) - 1
    found = named(call, axis_size, forms, {"weight": "vd"}, ["bd", *["-"] * others])
    for name in ("weight", "per_sample_weights"):
        if name in tensor_names(call):
            one = linear_signature(call, [tensor_names(call).index(name)])
            found.append(Signature(one.inputs, (one.outputs[0], *[B] * others)))
    return found


def _local(call: LocalCall) -> LocalOp:
    weight, output = call.inputs[0], call.outputs[0]
    assert output is not None
    if not weight.shape[1]:  # torch's kernel refuses a table without columns, unless it runs in one thread
        return no_columns, (_whole_call(call), output.shape), {}
    bags = _held_bags(output) if output.is_split(0) else None
    if weight.is_split(0):
        options = [argument(call, name) for name in ("mode", "per_sample_weights", "padding_idx")]
        table = (weight.meta.shape[0], _flat_runs(weight))
        return bags_of_shard, (_whole_call(call), *table, output.meta.shape[0], bags, *options), {}
    return (some_bags, (_whole_call(call), bags), {}) if bags is not None else own_op(call)


def _whole_call(call: LocalCall) -> tuple[Any, ...]:
    """Op, arguments by name."""
    return call.op, *call.args[:3], {name: argument(call, name) for name in _OPTIONS}


_OPTIONS = (
    "scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx",
)  # fmt: skip


def _held_bags(shard: TensorShard) -> Bags:
    start = shard.start(0)
    return start, start + shard.shape[0]


def _flat_runs(shard: TensorShard) -> tuple[int, ...]:
    return tuple(edge for run in shard.runs(0) for edge in run)


def no_columns(whole: Sequence[Any], shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The op where this rank holds no column of the table; `shape` is that of its first output."""
    op, weight, indices, offsets, options = whole
    return weight.new_zeros(shape), *_of_indices(op, weight, indices, offsets, options)


def some_bags(whole: Sequence[Any], bags: Bags) -> tuple[torch.Tensor, ...]:
    """The op with only bags [start, stop) in its first output.

    All that lies before them is one more bag, and all that lies behind another; both are dropped.

    Args:
        whole: op, weight, indices, offsets, options by name.
    """
    op, weight, indices, offsets, options = whole
    start, stop = bags
    others = _of_indices(op, weight, indices, offsets, options)
    if start == stop:
        return weight.new_zeros([0, weight.shape[1]]), *others
    end = offsets.new_full([1], indices.shape[0])
    edges = torch.cat([offsets.new_zeros([1]), offsets, end])[[0, *range(start + 1, stop + 2)]]
    options = {**options, "include_last_offset": False}
    return op(weight, indices, edges, **options)[0][1:-1], *others


def bags_of_shard(
    whole: Sequence[Any],
    size: int,
    runs: Sequence[int],
    num_bags: int,
    bags: Bags | None,
    mode: int,
    scale: torch.Tensor | None,
    padding: int,
) -> tuple[torch.Tensor, ...]:
    """Sums (or means) of the rows that a shard of a table of `size` rows holds; those of all shards add up.

    Args:
        whole: op, weight, indices, offsets, options by name.
        runs: the global rows that the shard holds, flat.
        bags: the bags to return; all of the `num_bags` if None.
        scale: a factor for every index, or None.
        padding: the row that does not take part; negative for none.
    """
    op, weight, indices, offsets, options = whole
    others = _of_indices(op, weight, indices, offsets, options)
    wide = compute_dtype(weight.dtype)
    rows = embedding_shard(weight, indices, size, runs).to(wide)
    if padding >= 0:
        rows = torch.where((indices == padding).unsqueeze(1), torch.zeros_like(rows), rows)
    if scale is not None:
        rows = rows * scale.to(wide).unsqueeze(1)
    place = torch.arange(indices.shape[0], dtype=offsets.dtype, device=indices.device)
    bag = torch.searchsorted(offsets[:num_bags].contiguous(), place, right=True) - 1
    total = rows.new_zeros([num_bags, weight.shape[1]]).index_add(0, bag, rows)
    if mode == _MEAN:
        total = total / others[1].clamp(min=1).unsqueeze(1)
    total = total if bags is None else total[bags[0] : bags[1]]
    return total.to(weight.dtype), *others


def _of_indices(
    op: Callable, weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The op's outputs that do not depend on the table: those of a table of one column and two rows."""
    padding = options["padding_idx"]
    index = (indices != padding).to(indices.dtype)
    options = {**options, "padding_idx": 0 if padding >= 0 else -1}
    return op(weight.new_zeros([2, 1]), index, offsets, **options)[1:]


def _backward_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Rows of the gradient that are a bag's; the row dim; the vocabulary."""
    if argument(call, "mode") == _MAX or (has_argument(call, "sparse") and argument(call, "sparse")):
        return []
    runs = [[one for one in form if one.dim != 0 or one.blocks == 1] for form in forms]
    # torch's kernel for CPU divides some rows by the frequency of others: only the whole table has those.
    table = "_d" if argument(call, "scale_grad_by_freq") else "vd"
    return named(call, axis_size, runs, {"grad": "bd"}, [table], linear=[("grad",)])


def _backward_local(call: LocalCall) -> LocalOp:
    grad, output = call.inputs[0], call.outputs[0]
    assert output is not None
    bags = (*_held_bags(grad), grad.meta.shape[0]) if grad.is_split(0) else None
    runs = _flat_runs(output) if output.is_split(0) else None
    if bags is None and runs is None:
        return own_op(call)
    indices = argument(call, "indices")
    if runs is None:
        args, kwargs = call.args, call.kwargs
    else:
        args, kwargs = with_arguments(call, num_weights=output.shape[0] + 1, padding_idx=-1)
    tail = (argument(call, "padding_idx"), bags, runs, output.shape[0])
    return bag_gradient, (call.op, args[0], indices, args[2:], kwargs, *tail), {}


def bag_gradient(
    op: Callable,
    grad: torch.Tensor,
    indices: torch.Tensor,
    rest: Sequence[Any],
    kwargs: dict[str, Any],
    padding: int,
    bags: tuple[int, int, int] | None,
    runs: Sequence[int] | None,
    rows: int,
) -> torch.Tensor:
    """The gradient of a table, or of the `rows` of it that a shard holds as global `runs`.

    Args:
        bags: (first, one after the last, how many there are) where `grad` is of some bags only.
    """
    if bags is not None:
        start, stop, count = bags
        zeros = grad.new_zeros([count, grad.shape[1]])
        grad = torch.cat([zeros[:start], grad, zeros[stop:]])
    if runs is None:
        return op(grad, indices, *rest, **kwargs)
    local = shard_index(indices, runs)
    # Rows that are elsewhere, and the padding row, go to one row past the end, which is then dropped.
    local = torch.where((local < 0) | (indices == padding), torch.full_like(local, rows), local)
    return op(grad, local, *rest, **kwargs).narrow(0, 0, rows)


def _scale_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """The gradient of the factors: a product of gradient and row, summed over the row dim."""
    groups = {"grad": "_d", "weight": "_d"}
    return named(call, axis_size, forms, groups, ["_"], linear=[("grad",), ("weight",)])


RULES: dict[Callable, OpRule] = {
    **dict.fromkeys(aten("_embedding_bag", "_embedding_bag_forward_only"), OpRule(_signatures, _local)),
    **dict.fromkeys(
        aten("_embedding_bag_dense_backward", "_embedding_bag_backward"),
        OpRule(_backward_signatures, _backward_local),
    ),
    **dict.fromkeys(aten("_embedding_bag_per_sample_weights_backward"), OpRule(_scale_signatures)),
}
