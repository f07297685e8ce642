"""Convolutions: samples, output channels, input channels (summed), and whole groups of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...errors import LayoutError
from ..layout import B, Sbp, Split, canonical, fits, text
from ..registry import Forms, OpRule, aten
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import (
    any_empty,
    argument,
    contracted_bias,
    linear_signature,
    named,
    tensor_names,
    with_arguments,
)


def _letters(call: OpCall, image: str) -> tuple[str, str, str]:
    """Letters of input, weight and output; channels only without groups."""
    spatial = "_" * (len(call.inputs[tensor_names(call).index(image)].shape) - 2)
    if argument(call, "groups") != 1:
        return "n_" + spatial, "__" + spatial, "n_" + spatial
    weight = "io" if argument(call, "transposed") else "oi"
    return "ni" + spatial, weight + spatial, "no" + spatial


def _signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """out = conv(input, weight) + bias: a bias is P where the product is."""
    image, weight, result = _letters(call, "input")
    groups = {"input": image, "weight": weight, "bias": result[1]}
    found = named(call, axis_size, forms, groups, [result])
    names = tensor_names(call)
    found = contracted_bias(found, names.index("bias") if "bias" in names else None)
    for factor in ("input", "weight"):
        found.append(linear_signature(call, [i for i, name in enumerate(names) if name in (factor, "bias")]))
    return [*found, *_by_group(call, axis_size, forms)]


def _backward_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Gradients of input, weight and bias; what an output does not carry is summed."""
    image, weight, result = _letters(call, "input")
    groups = {"grad_output": result, "input": image, "weight": weight}
    found = named(call, axis_size, forms, groups, [image, weight, result[1]], linear=[("grad_output",)])
    # The bias gradient does not know input channels: every rank that has the whole output has all of it.
    if call.outputs[2] is not None:
        grad = tensor_names(call).index("grad_output")
        found = [
            replace(one, outputs=(*one.outputs[:2], B)) if one.inputs[grad] == B else one for one in found
        ]
    return [*found, *_by_group(call, axis_size, forms)]


def _channels(call: OpCall) -> tuple[int, int, int]:
    """The groups that the call's tensors hold (outer axes may leave a few of them), and the input and output
    channels of one."""
    names = tensor_names(call)
    weight = call.inputs[names.index("weight")].shape
    if argument(call, "transposed"):
        result = call.inputs[names.index("grad_output")] if "grad_output" in names else call.outputs[0]
        assert result is not None
        groups = result.shape[1] // weight[1]
        return groups, weight[0] // groups, weight[1]
    groups = call.inputs[names.index("input")].shape[1] // weight[1]
    return groups, weight[1], weight[0] // groups


def _by_group(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Whole groups over the ranks, in each of the blocks in which the input or the gradient comes."""
    if argument(call, "groups") == 1:
        return []
    groups, inner, outer = _channels(call)
    if groups == 1:
        return []
    blocks = {1} | {one.blocks for form in forms[:2] for one in form if one.dim == 1}
    found = []
    for count in sorted(blocks):
        layout = _group_layout(call, axis_size, count, inner, outer)
        if layout is not None:
            found.append(layout)
    return found


def _group_layout(call: OpCall, axis_size: int, blocks: int, inner: int, outer: int) -> Signature | None:
    rows = inner if argument(call, "transposed") else outer
    layout = {
        "input": Split(1, blocks, inner),
        "grad_output": Split(1, blocks, outer),
        "weight": Split(0, blocks, rows),
        "bias": Split(0, blocks, outer),
    }
    names = tensor_names(call)
    kinds = ["input", "weight", "bias"] if "grad_output" in names else ["grad_output"]
    pairs = [*zip(names, call.inputs, strict=True), *zip(kinds, call.outputs, strict=True)]
    laid: list[Sbp] = []
    for name, meta in pairs:
        split = layout[name]
        if meta is None:
            laid.append(B)
        elif fits(meta.shape[split.dim], split, axis_size):
            laid.append(canonical(meta.shape[split.dim], split, axis_size))
        else:
            return None
    return Signature(tuple(laid[: len(names)]), tuple(laid[len(names) :]))


def _local_groups(call: LocalCall) -> int:
    """How many groups the shard has: all of them, unless its channels are split by groups."""
    groups = argument(call, "groups")
    if groups == 1:
        return 1
    image = call.inputs[tensor_names(call).index("input")]
    channels, inner = image.shape[1], image.meta.shape[1] // groups
    # Each axis alone splits by whole groups; several axes over the same few groups may not.
    if channels % inner:
        raise LayoutError(f"{text(image.sbp)}: {channels} channels are not whole groups of {inner}")
    return channels // inner


def _local(call: LocalCall) -> LocalOp:
    if any_empty(call):
        output = call.outputs[0]
        assert output is not None
        return empty_convolution, (call.args[0], argument(call, "bias"), output.shape), {}
    args, kwargs = with_arguments(call, groups=_local_groups(call))
    return call.op, args, kwargs


def _backward_local(call: LocalCall) -> LocalOp:
    if any_empty(call):
        shapes = tuple(None if out is None else out.shape for out in call.outputs)
        sizes = tuple(one.shape for one in call.inputs[1:])
        return empty_convolution_backward, (call.args[0], sizes, shapes, *call.args[4:9]), {}
    values: dict[str, object] = {"groups": _local_groups(call)}
    if argument(call, "bias_sizes") is not None:
        values["bias_sizes"] = [call.inputs[0].shape[1]]
    args, kwargs = with_arguments(call, **values)
    return call.op, args, kwargs


def empty_convolution(input: torch.Tensor, bias: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    """A convolution over no element (torch refuses some of them): the bias alone."""
    out = input.new_zeros(shape)
    return out if bias is None else out + bias.reshape(-1, *[1] * (len(shape) - 2))


def empty_convolution_backward(
    grad_output: torch.Tensor,
    sizes: Sequence[Sequence[int]],
    shapes: Sequence[Sequence[int] | None],
    *geometry: object,
) -> tuple[torch.Tensor | None, ...]:
    """Its backward: no sum has a term but the bias gradient, which no input channel takes part in.

    The bias gradient is a replica of what other ranks' kernels sum, so the same kernel sums it, bit by bit.

    Args:
        sizes: of the image and the weight.
        shapes: of the gradients, None where one is not asked for.
        geometry: the op's arguments from its stride to its output padding.
    """
    image, weight = (None if shape is None else grad_output.new_zeros(shape) for shape in shapes[:2])
    if shapes[2] is None:
        return image, weight, None
    if not grad_output.numel():
        return image, weight, grad_output.new_zeros(shapes[2])
    one_channel = [grad_output.new_zeros([max(extent, 1) for extent in size]) for size in sizes]
    bias = torch.ops.aten.convolution_backward.default(
        grad_output, *one_channel, shapes[2], *geometry, 1, [False, False, True]
    )[2]
    return image, weight, bias


RULES: dict[Callable, OpRule] = {
    **dict.fromkeys(aten("convolution"), OpRule(_signatures, _local)),
    **dict.fromkeys(aten("convolution_backward"), OpRule(_backward_signatures, _backward_local)),
}
