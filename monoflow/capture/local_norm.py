"""Batch norm that stays one op over a rank's own rows, for `batch_stats="local"`.

In training torch's ops become `local_batch_norm`; the update of the running statistics is written out, linear
in the batch's, so that each rank's share of them adds up. In evaluation the whole form stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..sbp.ops.batch_norm import local_batch_norm, local_batch_norm_backward

aten = torch.ops.aten

_FORWARD = [
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update.default,
    aten.cudnn_batch_norm.default,
]
_BACKWARD = [
    aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default,
    aten.cudnn_batch_norm_backward.default,
]


def local_forms(whole: Mapping[Any, Callable]) -> dict[Any, Callable]:
    """The local form of every batch norm op. `whole` has the forms over the whole batch."""
    return {op: partial(_forward, op, whole[op]) for op in _FORWARD if op in whole} | {
        op: partial(_backward, op, whole[op]) for op in _BACKWARD if op in whole
    }


def _by_name(op: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments, under one name each where the ops call the same thing differently."""
    aliases = {"exponential_average_factor": "momentum", "epsilon": "eps", "grad_output": "grad_out"}
    aliases |= {"train": "training", "update": "training"}
    names = [one.name for one in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {"training": True} | {aliases.get(name, name): value for name, value in given.items()}


def _forward(op: Any, whole: Callable, *args: Any, **kwargs: Any) -> tuple:
    call = _by_name(op, args, kwargs)
    if not call["training"]:
        return whole(*args, **kwargs)
    x: torch.Tensor = call["input"]
    out, mean, var = local_batch_norm(x, call["weight"], call["bias"], call["eps"], 1.0)
    for running, value in ((call.get("running_mean"), mean), (call.get("running_var"), var)):
        if running is not None:
            momentum = call["momentum"]
            running.copy_(momentum * value.to(running.dtype) + (1 - momentum) * running)
    # What torch saves for its backward op, ours does not read.
    return out, *(x.new_empty(0) for _ in op._schema.returns[1:])


def _backward(op: Any, whole: Callable, *args: Any, **kwargs: Any) -> tuple:
    call = _by_name(op, args, kwargs)
    if not call["training"]:
        return whole(*args, **kwargs)
    grads = local_batch_norm_backward(call["grad_out"], call["input"], call["weight"], call["eps"])
    mask = call.get("output_mask", [True] * 3)
    return tuple(grad if wanted else None for grad, wanted in zip(grads, mask, strict=True))
