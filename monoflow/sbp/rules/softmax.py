"""Softmax and its backward: any dim but its own splits; its own through the decomposed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..registry import Forms, OpRule, aten, letters
from ..signature import OpCall, Signature
from .common import argument, compute_dtype, dim_letters, linear_signature


def _signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    group = dim_letters(call.inputs[0].shape, (argument(call, "dim"),))
    return letters(call, axis_size, forms, f"{group}->{group}")


def _backward_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    group = dim_letters(call.inputs[0].shape, (argument(call, "dim"),))
    return [*letters(call, axis_size, forms, f"{group},{group}->{group}"), linear_signature(call, (0,))]


def softmax_expand(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """exp(x - max) over its sum."""
    wide = x.to(compute_dtype(x.dtype))
    raised = torch.exp(wide - torch.amax(wide, dim, True))
    return _result(raised / torch.sum(raised, dim, True), x.dtype, half_to_float)


def log_softmax_expand(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """x - max - log(sum(exp(x - max)))."""
    wide = x.to(compute_dtype(x.dtype))
    shifted = wide - torch.amax(wide, dim, True)
    return _result(shifted - torch.sum(torch.exp(shifted), dim, True).log(), x.dtype, half_to_float)


def safe_softmax_expand(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax that gives zeros where a whole row is -inf."""
    result = dtype or x.dtype
    wide = x.to(compute_dtype(result))
    top = torch.amax(wide, dim, True)
    hidden = top == -math.inf
    raised = torch.exp(wide - torch.where(hidden, torch.zeros_like(top), top))
    total = torch.sum(raised, dim, True)
    return (raised / torch.where(hidden, torch.ones_like(total), total)).to(result)


def softmax_backward_expand(
    grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """output * (grad - sum(grad * output))."""
    wide = compute_dtype(output.dtype)
    grad, output = grad.to(wide), output.to(wide)
    return ((grad - torch.sum(grad * output, dim, True)) * output).to(input_dtype)


def log_softmax_backward_expand(
    grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """grad - exp(output) * sum(grad)."""
    wide = compute_dtype(output.dtype)
    grad, output = grad.to(wide), output.to(wide)
    return (grad - torch.exp(output) * torch.sum(grad, dim, True)).to(input_dtype)


def _result(wide: torch.Tensor, dtype: torch.dtype, half_to_float: bool) -> torch.Tensor:
    return wide if half_to_float else wide.to(dtype)


_FORWARD = {
    "_softmax": softmax_expand,
    "_log_softmax": log_softmax_expand,
    "_safe_softmax": safe_softmax_expand,
}
_BACKWARD = {
    "_softmax_backward_data": softmax_backward_expand,
    "_log_softmax_backward_data": log_softmax_backward_expand,
}
RULES: dict[Callable, OpRule] = {
    op: OpRule(signatures, expand=expand)
    for signatures, family in ((_signatures, _FORWARD), (_backward_signatures, _BACKWARD))
    for name, expand in family.items()
    for op in aten(name)
}
