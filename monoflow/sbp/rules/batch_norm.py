"""Batch norm over a rank's own rows: exact along channels; along the batch exact by definition only.

These are the only rules without a proof: `S(0)` changes the result, which is what `batch_stats="local"`
means.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import LayoutError
from ..ops.batch_norm import local_batch_norm, local_batch_norm_backward
from ..registry import Forms, OpRule, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import dim_letters, empty_outputs, named, with_arguments


def _groups(call: OpCall, whole: int) -> tuple[str, str]:
    """Letters of an activation and of its channels; only rows and channels can be split."""
    shape = call.inputs[whole].shape
    group = dim_letters(shape, range(2, len(shape)))
    return group, group[1]


def _signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    group, channel = _groups(call, 0)
    return named(
        call,
        axis_size,
        forms,
        {"x": group, "weight": channel, "bias": channel},
        [group, channel, channel],
    )


def _backward_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    group, channel = _groups(call, 1)
    inputs = {"grad_out": group, "x": group, "weight": channel}
    return named(call, axis_size, forms, inputs, [group, channel, channel], linear=[("grad_out",)])


def _local(call: LocalCall) -> LocalOp:
    """A shard's statistics count by its part of the rows, so that P(sum) is their weighted mean."""
    x = call.inputs[0]
    if 0 in x.shape and 0 not in x.meta.shape:
        return empty_outputs(call, call.args[0])
    per_channel = x.shape[0] * (x.meta.numel // (x.meta.shape[0] * x.meta.shape[1]))
    if per_channel == 1:
        raise LayoutError(
            f'batch_stats="local": a rank holds {x.shape[0]} of {x.meta.shape[0]} rows, a single value per '
            'channel, which has no variance; use a larger batch, fewer ranks or batch_stats="global"'
        )
    args, kwargs = with_arguments(call, share=x.shape[0] / x.meta.shape[0])
    return call.op, args, kwargs


def _backward_local(call: LocalCall) -> LocalOp:
    x = call.inputs[1]
    return empty_outputs(call, call.args[0]) if 0 in x.shape and 0 not in x.meta.shape else own_op(call)


RULES: dict[Callable, OpRule] = {
    local_batch_norm: OpRule(_signatures, _local),
    local_batch_norm_backward: OpRule(_backward_signatures, _backward_local),
}
