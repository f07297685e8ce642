"""Batch norm in training over the rows that a rank holds, as torch's DistributedDataParallel trains it.

The one place where a layout changes the numbers, and only where `flow.graph(..., batch_stats="local")` asks
for it: split along the batch, each rank normalizes by the mean and variance of its own rows. What leaves the
op is a plain global tensor in every layout: the statistics are the mean of the ranks', weighted by their
rows, and the backward op computes its own, so that none that differs between ranks is ever handed on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import LIBRARY

aten = torch.ops.aten


def local_batch_norm_kernels(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    # With momentum 1, torch's running statistics are those of this batch: mean and unbiased variance. They
    # start from zeros, as 0 times whatever memory held before could be NaN.
    mean, var = (x.new_zeros(x.shape[1], dtype=_statistics_dtype(x, weight)) for _ in range(2))
    out = aten.native_batch_norm.default(x, weight, bias, mean, var, True, 1.0, eps)[0]
    return out, mean.mul_(share), var.mul_(share)


def local_batch_norm_backward_kernels(
    grad_out: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x
    var, mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
    return aten.native_batch_norm_backward.default(
        grad_out, x, weight, None, None, mean, torch.rsqrt(var + eps), True, eps, [True, True, True]
    )


def _statistics_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    return x.dtype if weight is None else weight.dtype


LIBRARY.define(
    "local_batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float share)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "local_batch_norm_backward(Tensor grad_out, Tensor x, Tensor? weight, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.impl("local_batch_norm", local_batch_norm_kernels, "CompositeExplicitAutograd")
LIBRARY.impl("local_batch_norm_backward", local_batch_norm_backward_kernels, "CompositeExplicitAutograd")


@torch.library.register_fake("monoflow::local_batch_norm", lib=LIBRARY)
def _local_batch_norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = (x.new_empty(x.shape[1], dtype=_statistics_dtype(x, weight)) for _ in range(2))
    return torch.empty_like(x), mean, var


@torch.library.register_fake("monoflow::local_batch_norm_backward", lib=LIBRARY)
def _local_batch_norm_backward_fake(
    grad_out: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    of_weight, of_bias = (x.new_empty(x.shape[1], dtype=_statistics_dtype(x, weight)) for _ in range(2))
    return torch.empty_like(x), of_weight, of_bias


#: (x, weight, bias, eps, share) -> out, and `share` times the mean and the unbiased variance of x (N, C, ...)
#: per channel. `share` is the part of the whole batch's rows that x has: 1.0, except on a shard.
local_batch_norm = torch.ops.monoflow.local_batch_norm.default
#: (grad_out, x, weight, eps) -> gradients of x, weight and bias
local_batch_norm_backward = torch.ops.monoflow.local_batch_norm_backward.default
