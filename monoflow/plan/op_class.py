"""What kind of work an op is, and how much of it: what a cost is looked up by.

A class says what bounds its ops and in what their amount is counted: arithmetic in FLOPs for products, bytes
moved for what streams through memory, elements where each takes a fixed effort (a tanh, a random number).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from ..sbp.signature import TensorMeta

Metas = Sequence[TensorMeta | None]


class OpClass(StrEnum):
    """Ops that cost alike."""

    FREE = "free"  # views, and what only names a value
    PRODUCT = "product"  # FLOPs
    CONVOLUTION = "convolution"  # FLOPs
    CONVOLUTION_BACKWARD = "convolution_backward"  # FLOPs
    STRIDED_BACKWARD = "strided_convolution_backward"  # FLOPs: of a convolution whose stride is not 1
    ATTENTION = "attention"  # FLOPs
    ATTENTION_BACKWARD = "attention_backward"  # FLOPs
    STREAM = "stream"  # bytes: pointwise arithmetic and copies
    FACTORS = "factors"  # bytes that a product of few rows reads and writes
    SPREAD = "spread"  # elements: pointwise with a tensor of which one element goes with many in a row
    CONVERT = "convert"  # elements: another dtype, comparisons, choices by a mask
    TRANSCENDENTAL = "transcendental"  # elements
    REDUCTION = "reduction"  # bytes
    SOFTMAX = "softmax"  # elements
    NORM = "norm"  # bytes
    POOL = "pool"  # elements of the larger side
    GATHER = "gather"  # bytes of what is picked, twice
    SCATTER = "scatter"  # bytes: what is added, and the whole result that is filled and written
    RANDOM = "random"  # elements
    OPTIMIZER = "optimizer"  # bytes: every tensor read and written
    SORT = "sort"  # elements


#: Classes whose amount is FLOPs; they have a rate per dtype.
ARITHMETIC = frozenset(
    {
        OpClass.PRODUCT,
        OpClass.CONVOLUTION,
        OpClass.CONVOLUTION_BACKWARD,
        OpClass.STRIDED_BACKWARD,
        OpClass.ATTENTION,
        OpClass.ATTENTION_BACKWARD,
    }
)

_NAMES: dict[OpClass, str] = {
    OpClass.FREE: """view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice
        select split split_with_sizes unbind alias detach as_strided unfold diagonal
        lift_fresh view_as_real view_as_complex""",
    OpClass.PRODUCT: "mm bmm addmm baddbmm mv addmv dot linear _grouped_mm addbmm",
    OpClass.CONVOLUTION: "convolution _convolution",
    OpClass.CONVOLUTION_BACKWARD: "convolution_backward",
    OpClass.ATTENTION: """attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention""",
    OpClass.ATTENTION_BACKWARD: """attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention_backward""",
    OpClass.CONVERT: """_to_copy eq ne lt le gt ge where bitwise_and bitwise_or
        bitwise_xor bitwise_not logical_and logical_or logical_not logical_xor isnan
        isinf masked_fill threshold_backward""",
    OpClass.TRANSCENDENTAL: """tanh exp expm1 log log1p log2 log10 sin cos tan erf erfc erfinv pow gelu
        gelu_backward silu silu_backward sigmoid sigmoid_backward tanh_backward
        softplus softplus_backward mish mish_backward elu elu_backward
        log_sigmoid_forward log_sigmoid_backward atan atan2 asin acos sinh cosh logit
        xlogy binary_cross_entropy binary_cross_entropy_backward""",
    OpClass.REDUCTION: """sum mean amax amin max min prod any all argmax argmin var var_mean std
        linalg_vector_norm norm logsumexp nll_loss_forward mse_loss cumsum cumprod
        count_nonzero""",
    OpClass.SOFTMAX: """_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data""",
    OpClass.NORM: """native_layer_norm native_layer_norm_backward native_group_norm
        native_group_norm_backward native_batch_norm native_batch_norm_backward
        _fused_rms_norm _fused_rms_norm_backward batch_norm batch_norm_backward
        cudnn_batch_norm cudnn_batch_norm_backward""",
    OpClass.POOL: """max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
        avg_pool2d_backward max_pool3d_with_indices max_pool3d_with_indices_backward
        avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
        upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d
        upsample_bilinear2d_backward""",
    OpClass.GATHER: "embedding gather index index_select take _embedding_bag _embedding_bag_forward_only",
    OpClass.SCATTER: """embedding_dense_backward index_put _unsafe_index_put scatter scatter_add
        scatter_reduce index_add index_copy nll_loss_backward
        _embedding_bag_dense_backward index_fill""",
    OpClass.RANDOM: "uniform normal bernoulli rand randn randint native_dropout exponential random",
    OpClass.OPTIMIZER: """_fused_adamw _fused_adam _fused_sgd _fused_adagrad _fused_adamw_ _fused_adam_
        _fused_sgd_ _fused_adagrad_""",
    OpClass.SORT: "sort topk argsort kthvalue median mode unique_dim",
}
_CLASS_OF = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def class_of(op: Callable) -> OpClass:
    """The class of an op; what has none of its own streams its tensors through memory."""
    if op is operator.getitem:
        return OpClass.FREE
    schema = getattr(op, "_schema", None)
    name = schema.name.rpartition("::")[2] if schema is not None else getattr(op, "__name__", "")
    return _CLASS_OF.get(name, OpClass.STREAM)


def special_class(kind: OpClass, inputs: Metas, outputs: Metas, args: Sequence[Any]) -> OpClass:
    """The class of a call of which others of its class cost much less; its own if it is none of these."""
    if kind is OpClass.CONVOLUTION_BACKWARD:
        strides = args[4] if len(args) > 4 and isinstance(args[4], (list, tuple)) else ()
        return OpClass.STRIDED_BACKWARD if any(one != 1 for one in strides) else kind
    result = outputs[0] if outputs and kind in (OpClass.STREAM, OpClass.CONVERT) else None
    spreads = result is not None and any(_is_spread(one.shape, result.shape) for one in _present(inputs))
    return OpClass.SPREAD if spreads else kind


def _is_spread(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Whether one element of several goes with many of the result's in a row."""
    several = any(extent > 1 for extent in shape)
    return several and len(result) >= len(shape) > 0 and shape[-1] == 1 < result[-1]


def amount_of(op: Callable, kind: OpClass, inputs: Metas, outputs: Metas, args: Sequence[Any] = ()) -> float:
    """How much of its class' work one call is.

    Args:
        inputs, outputs: shapes and dtypes of the tensor arguments in flattened order, and of the results.
        args: the call's own arguments; only plain values (groups, transposed) are looked at.
    """
    if kind in ARITHMETIC:
        return num_flops(kind, inputs, outputs, args)
    if kind is OpClass.FREE:
        return 0.0
    if kind in (OpClass.CONVERT, OpClass.SPREAD, OpClass.TRANSCENDENTAL, OpClass.SOFTMAX, OpClass.RANDOM):
        return float(sum(meta.numel for meta in _present(outputs)))
    if kind in (OpClass.POOL, OpClass.SORT):
        return float(max((meta.numel for meta in (*_present(inputs), *_present(outputs))), default=0))
    if kind is OpClass.GATHER:  # of the table only the rows that are read
        return 2.0 * sum(meta.num_bytes for meta in _present(outputs)[:1])
    if kind is OpClass.SCATTER:
        return _scatter_bytes(inputs, outputs)
    return float(sum(meta.num_bytes for meta in (*_present(inputs), *_present(outputs))))


def num_flops(kind: OpClass, inputs: Metas, outputs: Metas, args: Sequence[Any] = ()) -> float:
    """Multiply-adds times two, of products, convolutions and attention."""
    first = inputs[0]
    assert first is not None, "a product has a first factor"
    if kind is OpClass.PRODUCT:
        return _product_flops(inputs, outputs)
    if kind is OpClass.CONVOLUTION:
        return _convolution_flops(inputs[:2], outputs[0], args[6] if len(args) > 6 else False)
    if kind in (OpClass.CONVOLUTION_BACKWARD, OpClass.STRIDED_BACKWARD):
        once = _convolution_flops(inputs[1:3], first, args[7] if len(args) > 7 else False)
        return once * sum(meta is not None for meta in outputs[:2])
    # Attention: queries (..., Tq, D), keys (..., Tk, D), values (..., Tk, Dv). Two products, five backward; a
    # causal mask is not counted off, as kernels skip at most half of it.
    at = 1 if kind is OpClass.ATTENTION_BACKWARD else 0
    query, key, value = inputs[at], inputs[at + 1], inputs[at + 2]
    assert query is not None and key is not None and value is not None
    rows = query.numel // max(query.shape[-1], 1)
    wide, deep = query.shape[-1], value.shape[-1]
    per_pair = wide + deep if at == 0 else 3 * wide + 2 * deep
    return 2.0 * rows * key.shape[-2] * per_pair


def _product_flops(inputs: Metas, outputs: Metas) -> float:
    """Twice the output's elements times the length of the contracted dim."""
    result, present = outputs[0], _present(inputs)
    assert result is not None
    # In addmm and the like the first argument is what is added.
    left, right = present[-2:] if len(present) > 1 else (present[0], present[0])
    if len(present) == 3 and len(left.shape) == len(right.shape) + 1 and left.shape[-1] != right.shape[0]:
        left = present[0]  # linear(input, weight, bias)
    return 2.0 * result.numel * (left.shape[-1] if left.shape else 1)


def _convolution_flops(inputs: Metas, output: TensorMeta | None, transposed: bool) -> float:
    source, weight = inputs
    assert source is not None and weight is not None and output is not None
    over = source if transposed else output
    return 2.0 * over.numel * (weight.numel / max(weight.shape[0], 1))


def _scatter_bytes(inputs: Metas, outputs: Metas) -> float:
    """The result is read and written as a whole; what is added is read, and its place read and written."""
    result, first, *others = outputs[0], *_present(inputs)
    assert result is not None, "a scatter has a result"
    if first.shape != result.shape:
        return float(result.num_bytes + 3 * first.num_bytes)  # a gradient is added into zeros
    added = [one.numel for one in others if one.dtype == result.dtype] or [one.numel for one in others]
    return float(2 * result.num_bytes + 3 * min(added, default=0) * result.dtype.itemsize)


def _present(metas: Metas) -> list[TensorMeta]:
    return [meta for meta in metas if meta is not None]
