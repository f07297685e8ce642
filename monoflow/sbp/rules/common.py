"""What the rules of the compute families share: named arguments, specs by name, forms for empty shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from string import ascii_lowercase
from typing import Any

import torch

from ..layout import B, P, Sbp
from ..registry import Forms, letters
from ..signature import LocalCall, LocalOp, OpCall, Signature

Call = OpCall | LocalCall


@cache
def _parameters(op: Any) -> tuple[tuple[str, bool, Any], ...]:
    """Of every argument of an op's schema: name, whether it holds tensors, default."""
    return tuple((one.name, "Tensor" in str(one.type), one.default_value) for one in op._schema.arguments)


def argument(call: Call, name: str) -> Any:
    """The value of a named argument of the call, its default where the call leaves it out."""
    for position, (own, _, default) in enumerate(_parameters(call.op)):
        if own == name:
            return call.args[position] if position < len(call.args) else call.kwargs.get(name, default)
    raise AssertionError(f"{call.op} has no argument {name}")


def has_argument(call: Call, name: str) -> bool:
    """Whether the op's schema has an argument of this name."""
    return any(own == name for own, _, _ in _parameters(call.op))


def with_arguments(call: LocalCall, **values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's (args, kwargs) with some arguments replaced by name."""
    positions = {own: position for position, (own, _, _) in enumerate(_parameters(call.op))}
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in values.items():
        if positions[name] < len(args):
            args[positions[name]] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def tensor_names(call: Call) -> list[str]:
    """Of every tensor leaf, in flattened order, the name of the argument it belongs to."""
    parameters = _parameters(call.op)
    holds = {name: tensors for name, tensors, _ in parameters}
    given = [(parameters[i][0], value) for i, value in enumerate(call.args)] + list(call.kwargs.items())
    names: list[str] = []
    for name, value in given:
        if holds.get(name):
            leaves = value if isinstance(value, (list, tuple)) else [value]
            names += [name for leaf in leaves if leaf is not None and not _is_number(leaf)]
    return names


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def named(
    call: OpCall,
    axis_size: int,
    forms: Forms,
    inputs: Mapping[str, str],
    outputs: Sequence[str],
    *,
    linear: Iterable[Sequence[str]] = (),
    reduce_op: str = "sum",
) -> list[Signature]:
    """`letters` with the groups given by argument name; a tensor argument that is not named is not split.

    `linear` holds groups of argument names; names that the call leaves out are dropped from a group.
    """
    names = tensor_names(call)
    assert len(names) == len(call.inputs), (names, call)
    ins = [inputs.get(name, "_" * len(meta.shape)) for name, meta in zip(names, call.inputs, strict=True)]
    found = letters(call, axis_size, forms, f"{','.join(ins)}->{','.join(outputs)}", reduce_op=reduce_op)
    for group in linear:
        found.append(linear_signature(call, [i for i, name in enumerate(names) if name in group]))
    return list(dict.fromkeys(found))


def linear_signature(call: OpCall, group: Iterable[int]) -> Signature:
    """All of a group of inputs P(sum), the others B: every output that is there is P(sum)."""
    chosen = set(group)
    return Signature(
        tuple(P if i in chosen else B for i in range(len(call.inputs))),
        tuple(B if meta is None else P for meta in call.outputs),
    )


def contracted_bias(signatures: Iterable[Signature], bias: int | None) -> list[Signature]:
    """An added bias must be P where the product it is added to comes out P."""
    if bias is None:
        return list(signatures)
    return [
        Signature(_put(one.inputs, bias, P), one.outputs) if one.outputs[0] == P else one
        for one in signatures
    ]


def _put(sbp: tuple[Sbp, ...], index: int, value: Sbp) -> tuple[Sbp, ...]:
    return (*sbp[:index], value, *sbp[index + 1 :])


def dim_letters(shape: Sequence[int], fixed: Iterable[int] = ()) -> str:
    """A letter per dim; `fixed` dims (negative ones count from the end) cannot be split."""
    closed = {dim % len(shape) for dim in fixed} if shape else set()
    return "".join("_" if dim in closed else ascii_lowercase[dim] for dim in range(len(shape)))


def broadcast_letters(shape: Sequence[int], group: str, whole: Sequence[int]) -> str:
    """The letters of a tensor that broadcasts to one of shape `whole` and letters `group`."""
    lead = len(whole) - len(shape)
    return "".join(
        group[lead + dim] if lead + dim >= 0 and extent == whole[lead + dim] else "_"
        for dim, extent in enumerate(shape)
    )


def reduced_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """The dims that a reduction removes, from 0: no dim, or an empty list, means all of them."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(rank))
    return tuple(sorted({dim % rank if rank else 0 for dim in ([dims] if isinstance(dims, int) else dims)}))


def empty_outputs(call: LocalCall, like: Any) -> LocalOp:
    """What an op gives on an empty shard, when the kernel refuses it: empty outputs, or sums of nothing."""
    shapes = tuple(None if out is None else out.shape for out in call.outputs)
    dtypes = tuple(None if out is None else out.meta.dtype for out in call.outputs)
    return new_zeros, (like, shapes, dtypes), {}


def new_zeros(like: torch.Tensor, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    """Zeros of the given shapes and dtypes on the device of `like`; None where a shape is None."""
    made = tuple(
        None if shape is None else like.new_zeros(shape, dtype=dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return made[0] if len(made) == 1 else made


def any_empty(call: LocalCall) -> bool:
    """Whether some tensor this rank holds is empty along a dim along which the whole tensor is not."""
    return any(
        held == 0 != extent
        for one in call.inputs
        for held, extent in zip(one.shape, one.meta.shape, strict=True)
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that kernels accumulate in: float32 for 16-bit floats, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def table(ops: Iterable[Callable], rule: Any) -> dict[Callable, Any]:
    """The same rule for many ops."""
    return dict.fromkeys(ops, rule)
