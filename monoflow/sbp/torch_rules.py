"""torch's table of rules for DTensor, read as signatures. torch's private interfaces stay in this file.

The table holds for some ops what is exact along one mesh axis. Rules in it have been wrong, so what is read
here is a candidate: `sources` hands on only what a trial proves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor._dtensor_spec import TensorMeta as TorchMeta
from torch.utils import _pytree as pytree

from .layout import B, Partial, Sbp, Split
from .signature import OpCall, Signature, TensorMeta


class TorchMoved(RuntimeError):
    """torch's private table of rules is not where this version of monoflow looks for it."""


def torch_table() -> Mapping[Callable, Any]:
    """torch's single-axis strategies by overload.

    Raises:
        TorchMoved: this torch keeps them elsewhere.
    """
    try:
        return DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    except AttributeError as error:
        raise TorchMoved(
            f"torch {torch.__version__} has no DTensor._op_dispatcher.sharding_propagator."
            f"op_single_dim_strategy_funcs ({error}); adapt monoflow/sbp/torch_rules.py to it"
        ) from error


def torch_signatures(call: OpCall) -> list[Signature]:
    """What torch's table lists for a call, as far as it can be said in signatures; [] if it has no entry.

    Left out: partials that are averages, products or masked, and strategies that torch refuses for the call.
    """
    try:
        info = torch_table().get(call.op)
        if info is None:
            return []
        args, kwargs = pytree.tree_map_only(TensorMeta, _torch_meta, (call.args, dict(call.kwargs)))
        strategies = info.func(call.op, args, kwargs)
    except Exception:  # an entry that cannot read this call, or another torch: then it has no rule of torch's
        return []
    found: dict[Signature, None] = {}
    for strategy in strategies:
        one = _signature(call, strategy)
        if one is not None and any(sbp != B for sbp in (*one.inputs, *one.outputs)):
            found[one] = None
    return list(found)


def overload_of(op: Any) -> torch._ops.OpOverload | None:
    """The overload that a user means by it, by a packet with one overload, or by a custom op's definition."""
    if isinstance(op, torch._ops.OpOverload):
        return op
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = op.overloads()
        return getattr(op, names[0]) if len(names) == 1 else None
    found = getattr(op, "_opoverload", None)  # torch.library.custom_op gives this back
    return found if isinstance(found, torch._ops.OpOverload) else None


def _torch_meta(meta: TensorMeta) -> Any:
    return TorchMeta(torch.Size(meta.shape), _strides(meta.shape), meta.dtype)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _signature(call: OpCall, strategy: Sequence[Any]) -> Signature | None:
    """A list of placements, outputs before inputs, as a signature; None if it cannot be said as one."""
    num_outputs = len(call.outputs)
    if len(strategy) != num_outputs + len(call.inputs):
        return None
    metas = [*call.outputs, *call.inputs]
    layouts = [_sbp(one, meta) for one, meta in zip(strategy, metas, strict=True)]
    if any(one is None for one in layouts):
        return None
    return Signature(tuple(layouts[num_outputs:]), tuple(layouts[:num_outputs]))  # pyright: ignore


def _sbp(placement: Any, meta: TensorMeta | None) -> Sbp | None:
    if meta is None:
        return B  # an output that the call does not have
    if type(placement) is Replicate:
        return B
    if type(placement) is TorchPartial:
        known = ("sum",) if meta.dtype.is_complex else ("sum", "max", "min")
        return Partial(placement.reduce_op) if placement.reduce_op in known else None
    if type(placement) is Shard or (
        # torch's placeholder for any kind of split along a dim
        not isinstance(placement, Placement) and isinstance(getattr(placement, "dim", None), int)
    ):
        rank = len(meta.shape)
        return Split(placement.dim % rank) if -rank <= placement.dim < rank else None
    return None
