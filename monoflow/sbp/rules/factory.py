"""Rules of ops that make a tensor from nothing but numbers: a rank makes only its own part.

What they read of a tensor is its shape, dtype and device, so its layout does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..layout import B, P, Partial, Sbp, Split, canonical, fits
from ..registry import Forms, OpRule, aten, letters, splits_of
from ..signature import LocalCall, LocalOp, OpCall, Signature, TensorShard
from .common import argument, has_argument, with_arguments
from .moves import names, output_shape, partial_ops, result_shape, rules, unique

#: The op that makes the same as an `x_like` in any shape.
_IN_ANY_SHAPE: dict[Callable, Callable] = {
    like: new
    for name in ("zeros", "ones", "empty", "full")
    for like, new in zip(aten(f"{name}_like"), aten(f"new_{name}"), strict=True)
} | dict.fromkeys(aten("fill.Scalar"), torch.ops.aten.new_full.default)


def made(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Any split of the result, whatever layout a tensor has that is only looked at; zeros add up too."""
    shape = result_shape(call)
    outputs: list[Sbp] = [B, *(Split(dim) for dim in range(len(shape)))]
    if _is_zero(call):
        outputs.append(P)
    inputs = [_layouts(call, index, axis_size, forms) for index in range(len(call.inputs))]
    found = [Signature(tuple(ins), (out,)) for *ins, out in itertools.product(*inputs, outputs)]
    if call.inputs and call.inputs[0].shape == shape:
        splits = [one for one in inputs[0] if isinstance(one, Split)]
        found += [Signature((one,), (one,)) for one in splits]
    nothing = Signature((B,) * len(call.inputs), (B,))
    return [one for one in unique(found) if one != nothing]


def _layouts(call: OpCall, index: int, axis_size: int, forms: Forms) -> list[Sbp]:
    """Every layout that an input can arrive in."""
    meta = call.inputs[index]
    splits = [
        canonical(size, one, axis_size)
        for dim, size in enumerate(meta.shape)
        for one in splits_of(forms, index, dim)
        if fits(size, one, axis_size)
    ]
    return [B, *splits, *map(Partial, partial_ops(meta))]


def _is_zero(call: OpCall) -> bool:
    """Whether the result is all zeros."""
    if call.op in aten("zeros", "new_zeros", "zeros_like", "zero"):
        return True
    value = next(
        (argument(call, name) for name in ("fill_value", "value", "s") if has_argument(call, name)), None
    )
    return isinstance(value, (bool, int, float, complex)) and value == 0


def local_size(call: LocalCall) -> LocalOp:
    """The op with the local size."""
    return (call.op, *with_arguments(call, size=output_shape(call)))


def local_like(call: LocalCall) -> LocalOp:
    """The op itself where the shard it looks at has the shape of the result, else the same in that shape."""
    shape = output_shape(call)
    if list(call.inputs[0].shape) == shape:
        return call.op, call.args, call.kwargs
    like, *rest = call.args
    kwargs = {name: value for name, value in call.kwargs.items() if name != "memory_format"}
    return _IN_ANY_SHAPE[call.op], (like, shape, *rest), kwargs


def local_zero(call: LocalCall) -> LocalOp:
    """Zeros of the local shape."""
    return torch.ops.aten.new_zeros.default, (call.args[0], output_shape(call)), {}


def local_strided(call: LocalCall) -> LocalOp:
    """The local size, dense, with the dims in the order of the strides."""
    shape, stride = output_shape(call), argument(call, "stride")
    local, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        local[dim] = step
        step *= max(shape[dim], 1)
    return (call.op, *with_arguments(call, size=shape, stride=local))


def split_alone(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Any dim of the only result."""
    numbers = (B,) * len(call.inputs)
    return [Signature(numbers, (Split(dim),)) for dim in range(len(result_shape(call)))]


def local_part(call: LocalCall) -> LocalOp:
    """The rank's part of the whole result, which is small."""
    shard = _result(call)
    split = [dim for dim in range(len(shard.shape)) if shard.is_split(dim)]
    if not split:
        return call.op, call.args, call.kwargs
    runs = [tuple(edge for run in shard.runs(dim) for edge in run) for dim in split]
    return part_of, (call.op, call.args, call.kwargs, split, runs), {}


def part_of(
    op: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dims: Sequence[int],
    runs: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Of `op(*args, **kwargs)` the global `runs` of `dims`, flat: start, stop, start, stop."""
    whole = op(*args, **kwargs)
    for dim, edges in zip(dims, runs, strict=True):
        pairs = zip(edges[::2], edges[1::2], strict=True)
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in pairs]
        whole = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
    return whole


def local_arange(call: LocalCall) -> LocalOp:
    """A range of integers from the rank's first; of floats the part, which rounds as the whole does."""
    shard = _result(call)
    start, step = (_given(call, name, value) for name, value in (("start", 0), ("step", 1)))
    numbers = (start, step, argument(call, "end"))
    if len(shard.runs(0)) > 1 or not all(isinstance(one, int) for one in numbers):
        return local_part(call)
    first = start + shard.start(0) * step
    kwargs = {**call.kwargs, "dtype": shard.meta.dtype}
    return torch.ops.aten.arange.start_step, (first, first + shard.shape[0] * step, step), kwargs


def _given(call: LocalCall, name: str, default: Any) -> Any:
    return argument(call, name) if has_argument(call, name) else default


def local_eye(call: LocalCall) -> LocalOp:
    """Ones where the global row and column are the same."""
    shard = _result(call)
    if not (shard.is_split(0) or shard.is_split(1)):
        return call.op, call.args, call.kwargs
    kwargs = {"dtype": shard.meta.dtype, "device": call.kwargs.get("device")}
    return eye_part, (*shard.shape, shard.start(0) - shard.start(1)), kwargs


def eye_part(
    rows: int, columns: int, shift: int, *, dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """Part of an identity matrix whose first row lies `shift` further down than its first column right."""
    row = torch.arange(shift, shift + rows, device=device).unsqueeze(1)
    return (row == torch.arange(columns, device=device)).to(dtype)


def filled(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A tensor is looked at for its shape and dtype; the value, a tensor, may be partial."""
    dims = "".join(names(len(call.inputs[0].shape)))
    found = letters(call, axis_size, forms, f"{dims},->{dims}")
    for one in [B, *map(Partial, partial_ops(call.inputs[0]))]:
        found.append(Signature((one, B), (B,)))
        found += [Signature((one, Partial(op)), (Partial(op),)) for op in partial_ops(call.inputs[1])]
    return [one for one in found if one != Signature((B, B), (B,))]


def spaced(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """As split_alone; linear in both ends together where no step is rounded to an integer."""
    dtypes = [meta.dtype for meta in (*call.inputs, *call.outputs) if meta is not None]
    is_linear = len(call.inputs) == 2 and all(one.is_floating_point for one in dtypes)
    both = [Signature((P, P), (P,))] if is_linear else []
    return [*split_alone(call, axis_size, forms), *both]


#: Overloads that take an end of a range as a tensor of one element.
_ENDS = ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")


def _result(call: LocalCall) -> TensorShard:
    (shard,) = call.outputs
    assert shard is not None, call.op
    return shard


RULES: Mapping[Callable, OpRule] = {
    **rules(["full", "zeros", "ones", "empty.memory_format"], made, local_size),
    **rules(["new_full", "new_zeros", "new_ones", "new_empty", "empty_permuted"], made, local_size),
    **rules(["empty_strided", "new_empty_strided"], made, local_strided),
    **rules(["zeros_like", "ones_like", "full_like", "empty_like", "fill.Scalar"], made, local_like),
    **rules(["zero"], made, local_zero),
    **rules(["scalar_tensor"], made),
    **rules(["fill.Tensor"], filled),
    **rules(["arange", "arange.start", "arange.start_step"], split_alone, local_arange),
    **rules(["eye", "eye.m"], split_alone, local_eye),
    **rules(["linspace", "logspace", "tril_indices", "triu_indices"], split_alone, local_part),
    **rules([f"logspace.{ends}" for ends in _ENDS], split_alone, local_part),
    **rules([f"linspace.{ends}" for ends in _ENDS], spaced, local_part),
}
