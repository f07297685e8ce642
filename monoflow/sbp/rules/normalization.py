"""Layer, RMS, group and batch norm: splits of dims that are not normalized; the others by expansion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from string import ascii_lowercase
from typing import Any

import torch

from ...errors import LayoutError
from ..layout import B, P, Split, canonical, fits, text
from ..registry import Forms, OpRule, aten, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import (
    any_empty,
    argument,
    compute_dtype,
    dim_letters,
    empty_outputs,
    has_argument,
    named,
    new_zeros,
    tensor_names,
    with_arguments,
)

Mask = Sequence[bool]
Tensors = tuple[torch.Tensor | None, ...]


def _layer_groups(call: OpCall) -> tuple[str, str, str]:
    """Letters of a layer norm's input, statistics and parameters."""
    normalized = len(argument(call, "normalized_shape"))
    rank = len(call.inputs[tensor_names(call).index("input")].shape)
    lead = ascii_lowercase[: rank - normalized]
    return lead + "_" * normalized, lead + "_" * normalized, "_" * normalized


def _layer_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """layer_norm and rms_norm: the dims before the normalized ones."""
    whole, statistics, _ = _layer_groups(call)
    outs = [whole] + [statistics] * (len(call.outputs) - 1)
    return named(call, axis_size, forms, {"input": whole}, outs)


def _layer_backward_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Gradients of weight and bias are sums over the dims before the normalized ones."""
    whole, statistics, parameter = _layer_groups(call)
    groups = {"grad_out": whole, "input": whole, "mean": statistics, "rstd": statistics}
    outs = [whole] + [parameter] * (len(call.outputs) - 1)
    return named(call, axis_size, forms, groups, outs, linear=[("grad_out",)])


def _statistics_dtype(x: torch.Tensor, *parameters: torch.Tensor | None) -> torch.dtype:
    """On CPU statistics have the input's dtype unless parameters are wider; elsewhere they are float32."""
    if x.device.type == "cpu" and all(one is None or one.dtype == x.dtype for one in parameters):
        return x.dtype
    return compute_dtype(x.dtype)


def _sum(x: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """A sum over exactly `dims`: none of them if there are none (torch takes that for all)."""
    return torch.sum(x, tuple(dims), keepdim) if dims else x


def _last(count: int, rank: int) -> tuple[int, ...]:
    return tuple(range(rank - count, rank))


def layer_norm_expand(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """native_layer_norm from sums and pointwise ops (Ba et al. 2016, eq. 4)."""
    dims, count = _last(len(normalized_shape), input.ndim), math.prod(normalized_shape)
    wide = compute_dtype(input.dtype)
    x = input.to(wide)
    mean = _sum(x, dims, True) / count
    centered = x - mean
    rstd = torch.rsqrt(_sum(centered * centered, dims, True) / count + eps)
    out = centered * rstd
    if weight is not None:
        out = out * weight.to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    kept = _statistics_dtype(input, weight, bias)
    return out.to(input.dtype), mean.to(kept), rstd.to(kept)


def layer_norm_backward_expand(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Mask,
) -> Tensors:
    """native_layer_norm_backward: with g the gradient of xhat = (x - mean) * rstd,

    grad_input = rstd * (g - (sum(g) + xhat * sum(g * xhat)) / count).
    """
    wide = compute_dtype(input.dtype)
    xhat = (input.to(wide) - mean.to(wide)) * rstd.to(wide)
    grad = grad_out.to(wide)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        dims, count = _last(len(normalized_shape), input.ndim), math.prod(normalized_shape)
        inner = grad if weight is None else grad * weight.to(wide)
        along = _sum(inner * xhat, dims, True)
        grad_input = (inner - (_sum(inner, dims, True) + xhat * along) / count) * rstd.to(wide)
        grad_input = grad_input.to(input.dtype)
    batch = range(input.ndim - len(normalized_shape))
    if output_mask[1] and weight is not None:
        grad_weight = _sum(grad * xhat, batch).to(weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = _sum(grad, batch).to(bias.dtype)
    return grad_input, grad_weight, grad_bias


def rms_norm_expand(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """_fused_rms_norm from sums and pointwise ops (Zhang and Sennrich 2019, eq. 4)."""
    dims, count = _last(len(normalized_shape), input.ndim), math.prod(normalized_shape)
    wide = compute_dtype(input.dtype)
    x = input.to(wide)
    rstd = torch.rsqrt(_sum(x * x, dims, True) / count + (torch.finfo(wide).eps if eps is None else eps))
    out = x * rstd
    if weight is not None:
        out = out * weight.to(wide)
    return out.to(input.dtype), rstd


def rms_norm_backward_expand(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Mask,
) -> Tensors:
    """_fused_rms_norm_backward: grad_input = rstd * (g - xhat * sum(g * xhat) / count)."""
    wide = compute_dtype(input.dtype)
    xhat = input.to(wide) * rstd.to(wide)
    grad = grad_out.to(wide)
    grad_input = grad_weight = None
    if output_mask[0]:
        dims, count = _last(len(normalized_shape), input.ndim), math.prod(normalized_shape)
        inner = grad if weight is None else grad * weight.to(wide)
        along = _sum(inner * xhat, dims, True)
        grad_input = ((inner - xhat * along / count) * rstd.to(wide)).to(input.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = _sum(grad * xhat, range(input.ndim - len(normalized_shape))).to(weight.dtype)
    return grad_input, grad_weight


def _group_split(call: OpCall, axis_size: int) -> tuple[Split, Split] | None:
    """Whole groups over the ranks: the split of channels (their dim 0) and that of groups."""
    channels, groups = argument(call, "C"), argument(call, "group")
    by_channel, by_group = Split(0, 1, channels // groups), Split(0)
    if not fits(channels, by_channel, axis_size):
        return None
    return canonical(channels, by_channel, axis_size), canonical(groups, by_group, axis_size)


def _group_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """native_group_norm and its backward: samples, and channels by whole groups."""
    backward = "grad_out" in tensor_names(call)
    sample, per_group = _group_letters(call)
    groups = {"grad_out": sample, "input": sample, "mean": per_group, "rstd": per_group}
    outs = [sample, "_", "_"] if backward else [sample, per_group, per_group]
    found = named(call, axis_size, forms, groups, outs, linear=[("grad_out",)] if backward else ())
    split = _group_split(call, axis_size)
    if split is not None:
        found.append(_by_group(call, *split, backward))
    return found


def _group_letters(call: OpCall) -> tuple[str, str]:
    """Letters of the image and of the statistics: samples only."""
    rank = len(call.inputs[tensor_names(call).index("input")].shape)
    return "n" + "_" * (rank - 1), "n_"


def _by_group(call: OpCall, channel: Split, group: Split, backward: bool) -> Signature:
    second = Split(1, channel.blocks, channel.unit)
    layout = {
        "grad_out": second,
        "input": second,
        "mean": Split(1, group.blocks, group.unit),
        "rstd": Split(1, group.blocks, group.unit),
        "weight": channel,
        "bias": channel,
    }
    inputs = tuple(layout[name] for name in tensor_names(call))
    kinds = ("input", "weight", "bias") if backward else ("input", "mean", "rstd")
    outputs = zip(kinds, call.outputs, strict=True)
    return Signature(inputs, tuple(B if out is None else layout[kind] for kind, out in outputs))


def _group_local(call: LocalCall) -> LocalOp:
    """The sizes given as arguments are the shard's; the kernels refuse shards without a group."""
    backward = "grad_out" in tensor_names(call)
    statistics = call.inputs[2] if backward else call.outputs[1]
    assert statistics is not None
    samples, groups = statistics.shape
    channels = call.inputs[0].shape[1]
    # Each axis alone splits by whole groups; several axes over the same few groups may not.
    if channels * argument(call, "group") != groups * argument(call, "C"):
        raise LayoutError(f"{text(call.inputs[0].sbp)}: {channels} channels are not {groups} whole groups")
    if samples == 0 or groups == 0:
        return empty_outputs(call, call.args[0])
    args, kwargs = with_arguments(call, N=samples, C=channels, group=groups)
    return call.op, args, kwargs


def group_norm_expand(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """native_group_norm as sums over (channels of a group, positions)."""
    wide = compute_dtype(input.dtype)
    x = input.to(wide).reshape(N, group, C // group, HxW)
    count = C // group * HxW
    mean = torch.sum(x, (2, 3), True) / count
    centered = x - mean
    rstd = torch.rsqrt(torch.sum(centered * centered, (2, 3), True) / count + eps)
    out = centered * rstd
    if weight is not None:
        out = out * weight.to(wide).reshape(1, group, C // group, 1)
    if bias is not None:
        out = out + bias.to(wide).reshape(1, group, C // group, 1)
    kept = _statistics_dtype(input, weight, bias)
    mean, rstd = mean.reshape(N, group).to(kept), rstd.reshape(N, group).to(kept)
    return out.reshape(input.shape).to(input.dtype), mean, rstd


def group_norm_backward_expand(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Mask,
) -> Tensors:
    """native_group_norm_backward: layer norm's, over (channels of a group, positions)."""
    wide = compute_dtype(input.dtype)
    shape = (N, group, C // group, HxW)
    scale = rstd.to(wide).reshape(N, group, 1, 1)
    xhat = (input.to(wide).reshape(shape) - mean.to(wide).reshape(N, group, 1, 1)) * scale
    grad = grad_out.to(wide).reshape(shape)
    grad_input = grad_weight = grad_bias = None
    kept = input.dtype if weight is None else weight.dtype
    if output_mask[0]:
        inner = grad if weight is None else grad * weight.to(wide).reshape(1, group, C // group, 1)
        along = torch.sum(inner * xhat, (2, 3), True)
        mixed = (torch.sum(inner, (2, 3), True) + xhat * along) / (C // group * HxW)
        grad_input = ((inner - mixed) * scale).reshape(input.shape).to(input.dtype)
    if output_mask[1]:
        grad_weight = torch.sum(grad * xhat, (0, 3)).reshape(C).to(kept)
    if output_mask[2]:
        grad_bias = torch.sum(grad, (0, 3)).reshape(C).to(kept)
    return grad_input, grad_weight, grad_bias


def _batch_signatures(backward: bool, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Channels always; with running statistics (eval) every other dim too."""
    names = tensor_names(call)
    flag = "train" if backward else "training"
    training = has_argument(call, flag) and argument(call, flag)
    whole = call.inputs[names.index("input")].shape
    group = dim_letters(whole, [d for d in range(len(whole)) if d != 1] if training else ())
    channel = group[1]
    groups = {
        name: group if name in ("grad_out", "input") else channel if meta.shape == whole[1:2] else "_"
        for name, meta in zip(names, call.inputs, strict=True)
    }
    outs = [
        group if i == 0 else channel if out is not None and out.shape == whole[1:2] else "-"
        for i, out in enumerate(call.outputs)
    ]
    found = named(call, axis_size, forms, groups, outs, linear=[("grad_out",)] if backward else ())
    if backward:
        return found
    # Statistics that come from no sample (those of eval) are the same on every rank, not parts of a sum.
    return [replace(one, outputs=tuple(B if s == P else s for s in one.outputs)) for one in found]


def _empty_local(call: LocalCall) -> LocalOp:
    """Kernels refuse (or divide by) empty shards: gradients are then sums of nothing, results empty."""
    return empty_outputs(call, call.args[0]) if any_empty(call) else own_op(call)


def _functional_local(call: LocalCall) -> LocalOp:
    """Running statistics that no sample changes are still the running statistics."""
    if not any_empty(call):
        return own_op(call)
    _, args, _ = empty_outputs(call, call.args[0])
    return empty_batch_norm, (*args, argument(call, "running_mean"), argument(call, "running_var")), {}


def empty_batch_norm(
    like: torch.Tensor, shapes: Sequence[Any], dtypes: Sequence[Any], mean: torch.Tensor, var: torch.Tensor
) -> Tensors:
    """A batch norm of no sample: empty outputs, and running statistics as they are."""
    return *new_zeros(like, shapes[:3], dtypes[:3]), mean.clone(), var.clone()


def _weight_norm_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """_weight_norm_interface and its backward: the dim that keeps a norm of its own."""
    rank = len(call.inputs[0].shape)
    dim = argument(call, "dim") % rank
    group = dim_letters(call.inputs[0].shape, [d for d in range(rank) if d != dim])
    backward = "grad_w" in tensor_names(call)
    groups = dict.fromkeys(tensor_names(call), group)
    linear = [("grad_w",)] if backward else ()
    return named(call, axis_size, forms, groups, [group, group], linear=linear)


def weight_norm_expand(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """_weight_norm_interface: v * (g / norm of v over all dims but one) (Salimans and Kingma 2016, eq. 2)."""
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    wide = v.to(compute_dtype(v.dtype))
    norms = _sum(wide * wide, others, True).sqrt()
    return (wide * (g.to(wide.dtype) / norms)).to(v.dtype), norms


def weight_norm_backward_expand(
    grad_w: torch.Tensor, saved_v: torch.Tensor, saved_g: torch.Tensor, saved_norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_g = sum(grad_w * v) / norm; grad_v = g / norm * (grad_w - v * grad_g / norm) (same, eq. 3)."""
    others = [d for d in range(saved_v.ndim) if d != dim % saved_v.ndim]
    wide = compute_dtype(saved_v.dtype)
    grad, v, g, norms = (one.to(wide) for one in (grad_w, saved_v, saved_g, saved_norms))
    grad_g = _sum(grad * v, others, True) / norms
    grad_v = g / norms * (grad - v * grad_g / norms)
    return grad_v.to(saved_v.dtype), grad_g.to(saved_g.dtype)


_Rule = tuple[Callable, Callable | None, Callable | None]
_FAMILY: dict[str, _Rule] = {
    "native_layer_norm": (_layer_signatures, None, layer_norm_expand),
    "native_layer_norm_backward": (_layer_backward_signatures, None, layer_norm_backward_expand),
    "_fused_rms_norm": (_layer_signatures, None, rms_norm_expand),
    "_fused_rms_norm_backward": (_layer_backward_signatures, None, rms_norm_backward_expand),
    "native_group_norm": (_group_signatures, _group_local, group_norm_expand),
    "native_group_norm_backward": (_group_signatures, _group_local, group_norm_backward_expand),
    "_weight_norm_interface": (_weight_norm_signatures, _empty_local, weight_norm_expand),
    "_weight_norm_interface_backward": (_weight_norm_signatures, _empty_local, weight_norm_backward_expand),
    "_native_batch_norm_legit_no_training": (
        partial(_batch_signatures, False), _empty_local, None,
    ),
    "native_batch_norm": (partial(_batch_signatures, False), _empty_local, None),
    "_native_batch_norm_legit.no_stats": (partial(_batch_signatures, False), _empty_local, None),
    "_native_batch_norm_legit_functional": (partial(_batch_signatures, False), _functional_local, None),
    "native_batch_norm_backward": (partial(_batch_signatures, True), _empty_local, None),
}  # fmt: skip
RULES: dict[Callable, OpRule] = {
    op: OpRule(signatures, local, expand)
    for name, (signatures, local, expand) in _FAMILY.items()
    for op in aten(name)
}
