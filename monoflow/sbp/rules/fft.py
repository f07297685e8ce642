"""Fourier transforms: linear, and every dim but the transformed ones splits."""

from __future__ import annotations

from collections.abc import Callable

from ..registry import Forms, OpRule, aten, letters, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import any_empty, argument, dim_letters, empty_outputs, linear_signature


def _signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    group = dim_letters(call.inputs[0].shape, argument(call, "dim"))
    return [*letters(call, axis_size, forms, f"{group}->{group}"), linear_signature(call, (0,))]


def _local(call: LocalCall) -> LocalOp:
    """MKL refuses to transform nothing."""
    return empty_outputs(call, call.args[0]) if any_empty(call) else own_op(call)


RULES: dict[Callable, OpRule] = dict.fromkeys(
    aten("_fft_c2c", "_fft_r2c", "_fft_c2r"), OpRule(_signatures, _local)
)
