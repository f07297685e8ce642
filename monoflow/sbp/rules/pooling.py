"""Pooling, padding and resampling: batch and channels split, the spatial dims stay whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..layout import Sbp, Split, canonical, fits
from ..registry import Forms, OpRule, aten, letters
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import (
    any_empty,
    argument,
    dim_letters,
    empty_outputs,
    has_argument,
    linear_signature,
    with_arguments,
)


def spatial_signatures(
    spatial: int, linear: bool, call: OpCall, axis_size: int, forms: Forms
) -> list[Signature]:
    """All dims but the last `spatial` ones, the same for every tensor; P through what is linear."""
    groups = [
        "-" if meta is None else dim_letters(meta.shape, range(-spatial, 0))
        for meta in (*call.inputs, *call.outputs)
    ]
    count = len(call.inputs)
    found = letters(call, axis_size, forms, f"{','.join(groups[:count])}->{','.join(groups[count:])}")
    return [*found, linear_signature(call, (0,))] if linear else found


def spatial_local(call: LocalCall) -> LocalOp:
    """A size given as an argument is the shard's; kernels refuse shards without a channel."""
    if any_empty(call):
        return empty_outputs(call, call.args[0])
    if not has_argument(call, "input_size"):
        return call.op, call.args, call.kwargs
    output = call.outputs[0]
    assert output is not None
    args, kwargs = with_arguments(call, input_size=list(output.shape))
    return call.op, args, kwargs


def _pad_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """constant_pad_nd: dims that it leaves alone; linear if it pads with zeros."""
    pad = argument(call, "pad")
    padded = [-1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    group = dim_letters(call.inputs[0].shape, padded)
    found = letters(call, axis_size, forms, f"{group}->{group}")
    return [*found, linear_signature(call, (0,))] if argument(call, "value") == 0 else found


def _shuffle_signatures(
    factor: str, spatial_out: bool, call: OpCall, axis_size: int, forms: Forms
) -> list[Signature]:
    """pixel_shuffle and its inverse: a channel on one side is an area of pixels on the other."""
    rank = len(call.inputs[0].shape)
    edge = argument(call, factor)
    found = spatial_signatures(3, True, call, axis_size, forms)
    for dim, count, many_in in (
        (rank - 3, edge * edge, spatial_out),
        (rank - 2, edge, not spatial_out),
        (rank - 1, edge, not spatial_out),
    ):
        many, one = Split(dim, 1, count), Split(dim)
        laid = _laid(call, (many, one) if many_in else (one, many), axis_size)
        found += [] if laid is None else [laid]
    return found


def _laid(call: OpCall, sides: tuple[Split, Split], axis_size: int) -> Signature | None:
    """The splits of the only input and output, if both fit."""
    laid: list[Sbp] = []
    for meta, split in zip((call.inputs[0], call.outputs[0]), sides, strict=True):
        size = meta.shape[split.dim]  # pyright: ignore[reportOptionalMemberAccess]
        if not fits(size, split, axis_size):
            return None
        laid.append(canonical(size, split, axis_size))
    return Signature((laid[0],), (laid[1],))


def _columns_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """im2col and col2im: the batch splits; channels are merged with kernel positions."""
    batched = len(call.inputs[0].shape) == (4 if "im2col" in str(call.op) else 3)
    groups = [
        ("n" if batched else "_") + "_" * (len(meta.shape) - 1)
        for meta in (call.inputs[0], call.outputs[0])
        if meta is not None
    ]
    return [*letters(call, axis_size, forms, f"{groups[0]}->{groups[1]}"), linear_signature(call, (0,))]


def _dims(template: str) -> list[tuple[str, int]]:
    return [(template.format(n), n) for n in (1, 2, 3)]


_LINEAR = [
    "avg_pool{}d", "avg_pool{}d_backward", "adaptive_avg_pool{}d", "_adaptive_avg_pool{}d",
    "_adaptive_avg_pool{}d_backward",
    "max_pool{}d_with_indices_backward", "adaptive_max_pool{}d_backward", "max_unpool{}d",
    "reflection_pad{}d", "reflection_pad{}d_backward", "replication_pad{}d", "replication_pad{}d_backward",
    "upsample_nearest{}d", "upsample_nearest{}d.vec", "upsample_nearest{}d_backward",
    "_upsample_nearest_exact{}d", "_upsample_nearest_exact{}d.vec", "_upsample_nearest_exact{}d_backward",
]  # fmt: skip
_LINEAR_BY_NAME = {
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_trilinear3d": 3, "upsample_bicubic2d": 2,
    "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2,
}  # fmt: skip
_NOT_LINEAR = ["max_pool{}d_with_indices", "adaptive_max_pool{}d"]


def _spatial(spatial: int, linear: bool, *names: str) -> dict[Callable, OpRule]:
    rule = OpRule(partial(spatial_signatures, spatial, linear), spatial_local)
    return dict.fromkeys(aten(*names), rule)


RULES: dict[Callable, OpRule] = {}
for _linear, _templates in ((True, _LINEAR), (False, _NOT_LINEAR)):
    for _template in _templates:
        for _name, _count in _dims(_template):
            RULES |= _spatial(_count, _linear, _name)
for _name, _count in _LINEAR_BY_NAME.items():
    RULES |= _spatial(_count, True, _name, f"{_name}.vec", f"{_name}_backward")
RULES |= {op: OpRule(_pad_signatures) for op in aten("constant_pad_nd")}
RULES |= {
    op: OpRule(partial(_shuffle_signatures, "upscale_factor", True), spatial_local)
    for op in aten("pixel_shuffle")
}
RULES |= {
    op: OpRule(partial(_shuffle_signatures, "downscale_factor", False), spatial_local)
    for op in aten("pixel_unshuffle")
}
RULES |= {op: OpRule(_columns_signatures, spatial_local) for op in aten("im2col", "col2im")}
