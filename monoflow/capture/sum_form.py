"""Decompositions that capture applies: means become sums and counts, list ops one op a tensor.

A mean divides by a size that sharding changes. Written as a sum and a count (of the *global* shape, or a sum
of its own) every rule is linear and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from .local_norm import local_forms

aten = torch.ops.aten

_FROM_TORCH = [
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten._euclidean_dist,
    aten.select_backward,
    aten.slice_backward,
    aten.unfold_backward,
    aten.diagonal_backward,
    aten.split_with_sizes_copy,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
]


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _count(shape: Sequence[int], dims: Sequence[int]) -> int:
    count = 1
    for dim in dims:
        count *= shape[dim]
    return count


def _dims(x: torch.Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [d % x.dim() for d in dims] if x.dim() else []


def mean(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The mean as a sum and a count; half precision accumulates in float32, as torch's kernel does."""
    result = dtype if dtype is not None else x.dtype
    dims = _dims(x, dim)
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=_accumulation(result))
    return (total / _count(x.shape, dims)).to(result)


def _var_mean(x: torch.Tensor, dims: list[int], correction: float, keepdim: bool) -> tuple:
    wide = x.to(_accumulation(x.dtype))
    center = aten.sum.dim_IntList(wide, dims, True) / _count(x.shape, dims)
    square = (wide - center) ** 2
    total = aten.sum.dim_IntList(square, dims, keepdim)
    var = total / max(0.0, _count(x.shape, dims) - correction)
    if not keepdim:
        center = aten.sum.dim_IntList(wide, dims, False) / _count(x.shape, dims)
    return var.to(x.dtype), center.to(x.dtype)


def _correction(correction: float | None) -> float:
    return 1.0 if correction is None else float(correction)


def var(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> torch.Tensor:
    """The variance from a sum of squared deviations."""
    return _var_mean(x, _dims(x, dim), _correction(correction), keepdim)[0]


def std(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> torch.Tensor:
    """The standard deviation from a sum of squared deviations."""
    return torch.sqrt(var(x, dim, correction=correction, keepdim=keepdim))


def var_mean(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple:
    """Variance and mean from sums."""
    return _var_mean(x, _dims(x, dim), _correction(correction), keepdim)


def std_mean(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple:
    """Standard deviation and mean from sums."""
    variance, center = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return torch.sqrt(variance), center


def index_put(
    x: torch.Tensor, indices: Sequence, values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """A write of one value through a mask is a choice between two values."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or values.numel() != 1 or accumulate:
        return NotImplemented
    mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    return torch.where(mask, values.reshape(()).to(x.dtype), x)


def _foreach(op: Any) -> Callable | None:
    """A _foreach_ op as the plain op on every tensor."""
    packet = op._schema.name.removeprefix("aten::_foreach_")
    if packet == "norm":
        return lambda xs, ord=2, dtype=None: [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in xs]
    plain = getattr(torch, packet, None)
    if plain is None or packet.endswith("_"):
        return None
    lists = [i for i, argument in enumerate(op._schema.arguments) if str(argument.type) == "List[Tensor]"]
    per_item = [
        i for i, argument in enumerate(op._schema.arguments) if str(argument.type).startswith("List[")
    ]

    def each(*args: Any, **kwargs: Any) -> list:
        return [
            plain(*(value[k] if i in per_item else value for i, value in enumerate(args)), **kwargs)
            for k in range(len(args[lists[0]]))
        ]

    return each


def table(batch_stats: str = "global") -> dict[Any, Callable]:
    """The decompositions, by overload; with "local" `batch_stats`, batch norm stays an op of its own."""
    found: dict[Any, Callable] = dict(get_decompositions([op for op in _FROM_TORCH if op is not None]))
    found |= {
        aten.index_put.default: index_put,
        aten.mean.default: mean,
        aten.mean.dim: mean,
        aten.var.correction: var,
        aten.std.correction: std,
        aten.var_mean.correction: var_mean,
        aten.std_mean.correction: std_mean,
    }
    for name in dir(aten):
        if name.startswith("_foreach_"):
            packet = getattr(aten, name)
            for overload in packet.overloads():
                op = getattr(packet, overload)
                each = _foreach(op) if not overload.endswith("out") else None
                if each is not None:
                    found[op] = each
    return found | local_forms(found) if batch_stats == "local" else found
