"""Images read at given points: samples, channels, and the points themselves split; pixels stay whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..registry import Forms, OpRule, aten, letters, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import any_empty, argument, empty_outputs, linear_signature, named, with_arguments

_POINTS = {2: "hw", 3: "dhw"}


def _grid_signatures(spatial: int, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """grid_sampler: input (n, c, pixels), grid (n, points, 2 or 3) -> (n, c, points)."""
    points = _POINTS[spatial]
    groups = {"input": "nc" + "_" * spatial, "grid": f"n{points}_"}
    return named(call, axis_size, forms, groups, [f"nc{points}"], linear=[("input",)])


def _grid_backward_signatures(spatial: int, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Gradients of the input, a sum over points, and of the grid, a sum over channels."""
    points, image = _POINTS[spatial], "nc" + "_" * spatial
    groups = {"grad_output": f"nc{points}", "input": image, "grid": f"n{points}_"}
    return named(call, axis_size, forms, groups, [image, f"n{points}_"], linear=[("grad_output",)])


def _affine_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """affine_grid_generator: one matrix per sample."""
    points = "_" * (len(argument(call, "size")) - 1)
    return [*letters(call, axis_size, forms, f"n__->n{points}"), linear_signature(call, (0,))]


def _affine_local(call: LocalCall) -> LocalOp:
    """The size's samples are the shard's."""
    size = [call.inputs[0].shape[0], *argument(call, "size")[1:]]
    args, kwargs = with_arguments(call, size=size)
    return empty_outputs(call, call.args[0]) if any_empty(call) else (call.op, args, kwargs)


def _fractional_signatures(spatial: int, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Fractional pooling: every sample and channel has its own random numbers, (n, c, spatial)."""
    batched = len(call.inputs[0].shape) == spatial + 2
    image, numbers = ("nc", "nc_") if batched else ("c", "_c_")
    image += "_" * spatial
    return letters(call, axis_size, forms, f"{image},{numbers}->{image},{image}")


def _fractional_backward_signatures(
    spatial: int, call: OpCall, axis_size: int, forms: Forms
) -> list[Signature]:
    image = ("nc" if len(call.inputs[0].shape) == spatial + 2 else "c") + "_" * spatial
    found = letters(call, axis_size, forms, f"{image},{image},{image}->{image}")
    return [*found, linear_signature(call, (0,))]


def _local(call: LocalCall) -> LocalOp:
    """Kernels refuse images without a channel."""
    return empty_outputs(call, call.args[0]) if any_empty(call) else own_op(call)


RULES: dict[Callable, OpRule] = {
    op: OpRule(partial(signatures, spatial), _local)
    for template, signatures in (
        ("grid_sampler_{}d", _grid_signatures),
        ("grid_sampler_{}d_backward", _grid_backward_signatures),
        ("fractional_max_pool{}d", _fractional_signatures),
        ("fractional_max_pool{}d_backward", _fractional_backward_signatures),
    )
    for spatial in (2, 3)
    for op in aten(template.format(spatial))
}
RULES |= {op: OpRule(_affine_signatures, _affine_local) for op in aten("affine_grid_generator")}
