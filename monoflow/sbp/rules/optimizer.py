"""Optimizer steps: fused and foreach ops over lists; every dim of all the lists' tensors splits alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ..layout import B, P, Sbp, Split, canonical, fits
from ..registry import Forms, OpRule, aten
from ..signature import OpCall, Signature, TensorMeta
from .common import argument, tensor_names

#: Arguments (and returns, with "_out") that hold one number for a whole parameter.
_SCALARS = frozenset({"state_steps", "lr", "grad_scale", "found_inf"})


def _candidates(call: OpCall, forms: Forms) -> list[Split]:
    rank = max((len(meta.shape) for meta in call.inputs), default=0)
    travelling = {one for form in forms for one in form if one.dim < rank}
    return sorted(travelling | {Split(dim) for dim in range(rank)})


def _laid(
    split: Split, metas: Sequence[TensorMeta | None], whole: Sequence[bool], axis_size: int
) -> tuple[Sbp, ...] | None:
    """The split on every tensor that is not to stay whole; None where one of them cannot have it."""
    laid: list[Sbp] = []
    for meta, is_whole in zip(metas, whole, strict=True):
        if meta is None or is_whole:
            laid.append(B)
        elif len(meta.shape) > split.dim and fits(meta.shape[split.dim], split, axis_size):
            laid.append(canonical(meta.shape[split.dim], split, axis_size))
        else:
            return None
    return tuple(laid)


def _split_alike(
    call: OpCall, axis_size: int, forms: Forms, whole_in: Sequence[bool], whole_out: Sequence[bool]
) -> Iterator[Signature]:
    for split in _candidates(call, forms):
        inputs = _laid(split, call.inputs, whole_in, axis_size)
        outputs = _laid(split, call.outputs, whole_out, axis_size)
        if inputs is not None and outputs is not None:
            yield Signature(inputs, outputs)


def fused_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A fused step updates parameter, gradient and moments element by element; steps and lr are whole."""
    whole_in = [name in _SCALARS for name in tensor_names(call)]
    # The op returns its lists in the order of its arguments, so a count of steps at the end is told by place.
    whole_out = _whole_outputs(call)
    return list(dict.fromkeys(_split_alike(call, axis_size, forms, whole_in, whole_out)))


def _whole_outputs(call: OpCall) -> list[bool]:
    """Of every tensor output: whether it is a number per parameter."""
    schema = call.op._schema  # pyright: ignore[reportFunctionMemberAccess]
    sizes = {one.name: len(value) for one, value in zip(schema.arguments, call.args, strict=False)}
    sizes |= {name: len(value) for name, value in call.kwargs.items() if isinstance(value, (list, tuple))}
    flags: list[bool] = []
    for returned in schema.returns:
        name = returned.name.removesuffix("_out")
        flags += [name in _SCALARS] * sizes[name]
    assert len(flags) == len(call.outputs), call.op
    return flags


def foreach_signatures(linear: bool, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """An elementwise op over lists: position by position the shapes must agree, and all split alike."""
    names = tensor_names(call)
    # A lone tensor beside the lists is a number for all of them.
    whole_in = [not isinstance(argument(call, name), (list, tuple)) for name in names]
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, meta, whole in zip(names, call.inputs, whole_in, strict=True):
        if not whole:
            shapes.setdefault(name, []).append(meta.shape)
    if len({tuple(one) for one in shapes.values()}) > 1:
        return []
    found = list(_split_alike(call, axis_size, forms, whole_in, [False] * len(call.outputs)))
    if linear:
        inputs = tuple(B if whole else P for whole in whole_in)
        found.append(Signature(inputs, (P,) * len(call.outputs)))
    return list(dict.fromkeys(found))


#: Jointly linear in all their lists.
_FOREACH_LINEAR = [
    "_foreach_add.List", "_foreach_sub.List", "_foreach_neg", "_foreach_lerp.Scalar", "_foreach_clone",
    "_foreach_mul.Scalar", "_foreach_mul.ScalarList", "_foreach_mul.Tensor",
    "_foreach_div.Scalar", "_foreach_div.ScalarList", "_foreach_div.Tensor",
]  # fmt: skip
#: The other elementwise ones, by name.
_FOREACH = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac
    lerp lgamma log log10 log1p log2 maximum minimum mul pow reciprocal round rsqrt sigmoid sign sin sinh sqrt
    sub tan tanh trunc
"""


def _foreach(name: str) -> list[torch._ops.OpOverload]:
    """The functional overloads of a foreach op."""
    packet = getattr(torch.ops.aten, f"_foreach_{name}", None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return [op for op in overloads if not op._schema.is_mutable and not op._schema.name.endswith("_out")]


_FUSED = ["_fused_adamw", "_fused_adam", "_fused_sgd", "_fused_adagrad"]
RULES: dict[Callable, OpRule] = {
    **dict.fromkeys(
        (op for name in _FOREACH.split() for op in _foreach(name)), OpRule(partial(foreach_signatures, False))
    ),
    **dict.fromkeys(aten(*_FOREACH_LINEAR), OpRule(partial(foreach_signatures, True))),
    **dict.fromkeys(aten(*_FUSED, *(f"{name}.tensor_lr" for name in _FUSED)), OpRule(fused_signatures)),
}
