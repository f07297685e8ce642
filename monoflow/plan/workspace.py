"""What items allocate beside their results while they run: temporaries of kernels and buffers of collectives.

Kernels' figures are for torch's CPU kernels, worked out from measured allocations and held against them in
tests/null/test_memory.py. Kernels of accelerators keep their scratch memory in a pool that is made once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..boxing.route import Move
from ..sbp.layout import Partial, Split, local_dim
from ..sbp.signature import TensorMeta
from .op_class import OpClass
from .schedule import Op
from .strides import captured_contiguous

Metas = Sequence[TensorMeta | None]

#: Threads that CPU kernels are counted with; each has buffers of its own.
_THREADS = 2
#: Elements that a random op of ours works on at a time, in int64, and how many copies of them it holds.
_RANDOM_CHUNK, _RANDOM_COPIES = 1 << 16, 3
#: oneDNN lays channels out in blocks of this many.
_CHANNELS = 16


def op_workspace(item: Op, kind: OpClass, inputs: Metas, outputs: Metas, on_cpu: bool) -> int:
    """Bytes that one call allocates beside its results.

    Args:
        inputs, outputs: the rank's shapes and dtypes, in flattened order; None for an absent output.
    """
    if kind in (OpClass.GATHER, OpClass.SCATTER):
        return _look_up(item, kind, inputs, outputs)
    if not on_cpu:
        return 0
    if kind is OpClass.CONVOLUTION:
        return _convolution(inputs, outputs)
    if kind is OpClass.CONVOLUTION_BACKWARD:
        return _convolution_backward(inputs)
    if kind is OpClass.ATTENTION:
        return _attention(item, inputs, outputs)
    if kind is OpClass.ATTENTION_BACKWARD:
        return _attention_backward(inputs)
    if kind is OpClass.RANDOM and _namespace(item) == "monoflow":
        drawn = max((meta.numel for meta in outputs if meta is not None), default=0)
        return _RANDOM_COPIES * 8 * min(drawn, _RANDOM_CHUNK)
    return 0


def _look_up(item: Op, kind: OpClass, inputs: Metas, outputs: Metas) -> int:
    """Indices are checked and shifted; of a table in parts, rows that others hold are zeroed in a copy."""
    picked = max(
        (one.numel for one in inputs if one is not None and not one.dtype.is_floating_point), default=0
    )
    is_masked = any(isinstance(one, Partial) for value in item.outputs for one in value.layout)
    if not is_masked or kind is OpClass.SCATTER:
        return 8 * picked
    return 17 * picked + sum(meta.num_bytes for meta in outputs if meta is not None)


def _convolution(inputs: Metas, outputs: Metas) -> int:
    """oneDNN reorders source and weight into blocks of channels, and the result out of them."""
    source, weight, result = inputs[0], inputs[1], outputs[0]
    assert source is not None and weight is not None and result is not None
    blocked = _blocked(result)
    return max(source.num_bytes + weight.num_bytes + blocked - result.num_bytes, blocked)


def _convolution_backward(inputs: Metas) -> int:
    """Source and gradient are reordered, and both gradients made, in blocks of channels."""
    grad, source, weight = inputs[:3]
    assert grad is not None and source is not None and weight is not None
    # A single channel is padded to a block; a few are left as they are.
    before = _blocked(source) if source.shape[1] == 1 else source.num_bytes
    return max(before + _blocked(grad), 2 * before - weight.num_bytes) + weight.num_bytes


def _blocked(meta: TensorMeta) -> int:
    """The bytes of (batch, channels, ...) with the channels filled up to whole blocks."""
    channels = max(meta.shape[1], 1)
    return meta.num_bytes // channels * (-(-channels // _CHANNELS) * _CHANNELS)


def _tile(queries: int, keys: int) -> tuple[int, int]:
    """The queries and keys that a thread of torch's flash kernel works on at a time."""
    return (256 if queries >= 768 else 64 if queries >= 192 else 32), min(512, keys)


def _attention(item: Op, inputs: Metas, outputs: Metas) -> int:
    query, key, value = inputs[:3]
    assert query is not None and key is not None and value is not None
    rows, columns = _tile(query.shape[-2], key.shape[-2])
    each = 4 * (rows * columns + 2 * rows + rows * value.shape[-1])
    if query.dtype.itemsize == 2:
        each += 2 * rows * columns
    # The kernel's result follows the query's layout; ours has the heads inside.
    copied = outputs if captured_contiguous(item.inputs[0]) else ()
    return max(_THREADS * each, sum(meta.num_bytes for meta in copied if meta is not None))


def _attention_backward(inputs: Metas) -> int:
    """The gradient of the output and one of the results are copied into the kernel's layout, or out of it."""
    query, key = inputs[1], inputs[2]
    assert query is not None and key is not None
    rows, columns = _tile(query.shape[-2], key.shape[-2])
    width = query.shape[-1]
    each = 4 * (2 * rows * columns + rows)
    if query.dtype.itemsize == 2:
        each += 4 * rows * columns + 4 * (columns + rows) * width
    rest = 4 * (query.numel // max(width, 1))
    return 2 * query.num_bytes + rest + _THREADS * each


def _namespace(item: Op) -> str:
    return getattr(item.node.target, "namespace", "")


# --- moves ------------------------------------------------------------------------------------------


def move_workspace(
    move: Move,
    source: TensorMeta,
    target: TensorMeta,
    coordinate: Sequence[int],
    is_plain: bool,
    on_cpu: bool,
) -> int:
    """Bytes that a move allocates beside its result, as `boxing.collectives` and the transport run it.

    Args:
        source, target: what the rank holds before and after.
        is_plain: whether the source is contiguous; if not, it is copied first.
        on_cpu: Gloo gathers and reduces in a buffer of its own.
    """
    size = move.mesh[move.axis]
    if size == 1 or math.prod(move.shape) == 0:
        return 0
    copied = 0 if is_plain else source.num_bytes
    whole = _padded_bytes(move, source.dtype, coordinate)
    if move.kind in ("all_reduce", "broadcast", "send"):
        return copied
    if move.kind == "all_gather":
        is_joined = _is_joined(move, move.source[move.axis], coordinate)
        return whole if on_cpu or is_joined else copied
    if move.kind == "reduce_scatter":
        stacked = whole if _is_joined(move, move.target[move.axis], coordinate) else copied
        return max(stacked + (whole if on_cpu else 0), 2 * stacked - target.num_bytes)
    if move.kind == "all_to_all":
        return _all_to_all(move, source, target)
    if move.kind == "pad":
        split = move.source[move.axis]
        assert isinstance(split, Split), move
        return 8 * move.shape[split.dim]
    return 0


def bundle_workspace(move: Move, source: TensorMeta, target: TensorMeta) -> int:
    """Bytes of a move's part in the buffers of its bundle: what is sent, and what is received."""
    if move.mesh[move.axis] == 1 or math.prod(move.shape) == 0:
        return 0
    if move.kind == "reduce_scatter":
        return source.num_bytes + max(source.num_bytes, target.num_bytes)  # its parts are stacked first
    return source.num_bytes + target.num_bytes


def received_workspace(move: Move, outputs: Metas) -> int:
    """Bytes that a rank allocates beside the result of a move of which it only receives.

    A broadcast goes out of a tensor of every rank into another one.
    """
    target = outputs[0]
    return target.num_bytes if move.kind == "broadcast" and target is not None else 0


def _all_to_all(move: Move, source: TensorMeta, target: TensorMeta) -> int:
    """What is sent is put together first, what arrives is taken apart; within a dim both are reordered."""
    before, after = move.source[move.axis], move.target[move.axis]
    assert isinstance(before, Split) and isinstance(after, Split), move
    if before.dim != after.dim:
        return max(source.num_bytes, target.num_bytes)
    return source.num_bytes + 2 * target.num_bytes + 8 * move.shape[before.dim]


def _padded_bytes(move: Move, dtype: torch.dtype, coordinate: Sequence[int]) -> int:
    """The bytes that the axis divides, with every shard as large as the largest."""
    shape = list(move.group_shape(coordinate))
    size = move.mesh[move.axis]
    split = move.target[move.axis] if move.kind == "reduce_scatter" else move.source[move.axis]
    if isinstance(split, Split):
        shape[split.dim] = size * local_dim(shape[split.dim], split, size, 0)
    return math.prod(shape) * dtype.itemsize


def _is_joined(move: Move, split: object, coordinate: Sequence[int]) -> bool:
    """Whether parts are copied together or apart: not where they are the tensor's rows in order, and even."""
    assert isinstance(split, Split), move
    rows = move.group_shape(coordinate)[split.dim]
    return split.dim != 0 or split.blocks != 1 or rows % (move.mesh[move.axis] * split.unit) != 0
