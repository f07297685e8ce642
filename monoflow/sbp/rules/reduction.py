"""Reductions, scans and orderings: a reduced dim gives P where the reduction has one, others just split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..layout import Partial
from ..registry import Forms, OpRule, aten, letters, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import (
    any_empty,
    argument,
    broadcast_letters,
    compute_dtype,
    dim_letters,
    has_argument,
    linear_signature,
    reduced_dims,
)

Dims = int | Sequence[int] | None


def _dims(call: OpCall) -> tuple[int, ...]:
    dim = argument(call, "dim") if has_argument(call, "dim") else None
    return reduced_dims(dim, len(call.inputs[0].shape))


def _kept(group: str, dims: Sequence[int], rank: int) -> str:
    """The letters of a result: without the reduced dims, or with "_" where the result keeps them."""
    if rank == len(group):
        return "".join("_" if d in dims else letter for d, letter in enumerate(group))
    return "".join(letter for d, letter in enumerate(group) if d not in dims)


def reduction_signatures(
    reduce_op: str | None, linear: bool, call: OpCall, axis_size: int, forms: Forms
) -> list[Signature]:
    """Splits of kept dims; of reduced dims, to P(reduce_op), when there is such a partial."""
    shape = call.inputs[0].shape
    dims = _dims(call)
    group = dim_letters(shape, () if reduce_op else dims)
    outs = ["-" if out is None else _kept(group, dims, len(out.shape)) for out in call.outputs]
    found = letters(call, axis_size, forms, f"{group}->{','.join(outs)}", reduce_op=reduce_op or "sum")
    if linear and call.inputs[0].dtype != torch.bool:
        found.append(linear_signature(call, (0,)))
    return found


def extremum_signatures(reduce_op: str, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """amax and amin: also of a tensor that is itself the extremum of what the ranks hold."""
    found = reduction_signatures(reduce_op, False, call, axis_size, forms)
    return [*found, Signature((Partial(reduce_op),), (Partial(reduce_op),))]


def along_signatures(linear: bool, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Scans and orderings along one dim, results of the same rank: any other dim splits."""
    shape = call.inputs[0].shape
    group = dim_letters(shape, (argument(call, "dim"),))
    found = letters(call, axis_size, forms, f"{group}->{','.join([group] * len(call.outputs))}")
    return [*found, linear_signature(call, (0,))] if linear and call.inputs[0].dtype != torch.bool else found


def smallest(dtype: torch.dtype) -> float | int | bool:
    """What a maximum starts from: it changes no other value."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def largest(dtype: torch.dtype) -> float | int | bool:
    """What a minimum starts from: it changes no other value."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def amax(x: torch.Tensor, dim: Dims = (), keepdim: bool = False) -> torch.Tensor:
    """torch.amax that gives -inf (or the dtype's smallest value) over an empty dim."""
    return _extremum(torch.amax, smallest(x.dtype), x, dim, keepdim)


def amin(x: torch.Tensor, dim: Dims = (), keepdim: bool = False) -> torch.Tensor:
    """torch.amin that gives inf (or the dtype's largest value) over an empty dim."""
    return _extremum(torch.amin, largest(x.dtype), x, dim, keepdim)


def _extremum(reduce: Callable, start: Any, x: torch.Tensor, dim: Dims, keepdim: bool) -> torch.Tensor:
    dims = reduced_dims(dim, x.ndim)
    if all(x.shape[d] for d in dims):
        return reduce(x, dims, keepdim)
    shape = [1 if d in dims else extent for d, extent in enumerate(x.shape) if keepdim or d not in dims]
    return x.new_full(shape, start)


def _local_extremum(form: Callable, call: LocalCall) -> LocalOp:
    return (form, call.args, call.kwargs) if any_empty(call) else own_op(call)


def _order(call: OpCall | LocalCall) -> float | None:
    """The order of a vector norm; None stands for 2."""
    order = argument(call, "ord" if has_argument(call, "ord") else "p")
    return 2 if order is None else order


def _norm_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    return reduction_signatures(_partial_of_norm(_order(call)), False, call, axis_size, forms)


def _partial_of_norm(order: float | None) -> str | None:
    """How norms of parts make up the norm of the whole; None where they do not."""
    return {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}.get(order)  # pyright: ignore


def _local_norm(call: LocalCall) -> LocalOp:
    """The infinity norms have no value for an empty dim in torch; here it is the reduction's start."""
    order = _order(call)
    if order not in (math.inf, -math.inf) or not any_empty(call):
        return own_op(call)
    dim = argument(call, "dim") if has_argument(call, "dim") else None
    keepdim = argument(call, "keepdim") if has_argument(call, "keepdim") else False
    dtype = call.outputs[0].meta.dtype  # pyright: ignore[reportOptionalMemberAccess]
    return _empty_norm, (call.args[0], order, dim, keepdim, dtype), {}


def _empty_norm(x: torch.Tensor, order: float, dim: Dims, keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    size = x.abs().to(dtype)
    return amin(size, dim, keepdim) if order < 0 else amax(size, dim, keepdim).clamp(min=0)


def norm_expand(
    x: torch.Tensor,
    ord: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """linalg.vector_norm from sums and pointwise ops (definition: (sum |x|^p)^(1/p))."""
    result = dtype or x.dtype
    size = x.to(compute_dtype(result)).abs()
    dims = reduced_dims(dim, x.ndim)
    order = 2 if ord is None else ord
    if order in (math.inf, -math.inf):
        total = torch.amax(size, dims, keepdim) if order > 0 else torch.amin(size, dims, keepdim)
    elif order == 0:
        total = torch.sum((size != 0).to(size.dtype), dims, keepdim)
    elif order == 1:
        total = torch.sum(size, dims, keepdim)
    elif order == 2:
        total = torch.sum(size * size, dims, keepdim).sqrt()
    else:
        total = torch.sum(size.pow(order), dims, keepdim).pow(1 / order)
    return total.to(result)


def _norm_full_expand(
    x: torch.Tensor, p: float | None = 2, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return norm_expand(x, p, dtype=dtype)


def logsumexp_expand(x: torch.Tensor, dim: Dims, keepdim: bool = False) -> torch.Tensor:
    """log(sum(exp(x))) about the maximum, which is taken as 0 where it is infinite."""
    dims = reduced_dims(dim, x.ndim)
    wide = x.to(compute_dtype(x.dtype))
    top = torch.amax(wide, dims, True)
    top = torch.where(top.abs() == math.inf, torch.zeros_like(top), top)
    total = torch.sum(torch.exp(wide - top), dims, True).log() + top
    if not keepdim:
        total = torch.squeeze(total, dims)
    return total.to(x.dtype)


def _dist_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """dist: a norm of the whole difference, which is a sum or an extremum over parts for some orders."""
    whole = torch.broadcast_shapes(*(meta.shape for meta in call.inputs))
    reduce_op = _partial_of_norm(argument(call, "p"))
    if reduce_op is None:
        return []
    group = dim_letters(whole)
    sides = [broadcast_letters(meta.shape, group, whole) for meta in call.inputs]
    return letters(call, axis_size, forms, f"{sides[0]},{sides[1]}->", reduce_op=reduce_op)


def dist_expand(x: torch.Tensor, y: torch.Tensor, p: float = 2) -> torch.Tensor:
    """dist from sums and pointwise ops: the norm of the difference."""
    return norm_expand(x - y, p)


def _local_dist(call: LocalCall) -> LocalOp:
    """As a norm: the extrema have no value for an empty shard in torch."""
    order = argument(call, "p")
    if order not in (math.inf, -math.inf) or not any_empty(call):
        return own_op(call)
    return _empty_dist, (*call.args[:2], order), {}


def _empty_dist(x: torch.Tensor, y: torch.Tensor, order: float) -> torch.Tensor:
    difference = x - y
    return _empty_norm(difference, order, None, False, difference.dtype)


def _renormed(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """renorm: every slice along one dim has a norm of its own."""
    shape = call.inputs[0].shape
    kept = argument(call, "dim") % len(shape)
    group = dim_letters(shape, [d for d in range(len(shape)) if d != kept])
    return letters(call, axis_size, forms, f"{group}->{group}")


def _reductions(reduce_op: str | None, linear: bool, *names: str) -> dict[Callable, OpRule]:
    rule = OpRule(partial(reduction_signatures, reduce_op, linear))
    return dict.fromkeys(aten(*names), rule)


def _along(linear: bool, *names: str) -> dict[Callable, OpRule]:
    return dict.fromkeys(aten(*names), OpRule(partial(along_signatures, linear)))


def _extrema(reduce_op: str, form: Callable, *names: str) -> dict[Callable, OpRule]:
    rule = OpRule(partial(extremum_signatures, reduce_op), partial(_local_extremum, form))
    return dict.fromkeys(aten(*names), rule)


def _norms(expand: Callable, *names: str) -> dict[Callable, OpRule]:
    return dict.fromkeys(aten(*names), OpRule(_norm_signatures, _local_norm, expand))


RULES: dict[Callable, OpRule] = {
    **_reductions("sum", True, "sum", "sum.dim_IntList"),
    **_reductions("sum", False, "count_nonzero", "count_nonzero.dim_IntList", "nansum"),
    **_reductions("max", False, "any", "any.dim", "any.dims"),
    **_reductions("min", False, "all", "all.dim", "all.dims"),
    **_reductions(None, True, "mean", "mean.dim"),
    **_reductions(None, False, "prod.dim_int", "argmax", "argmin", "max.dim", "min.dim", "aminmax"),
    **_reductions(None, False, "prod", "median", "nanmedian", "var", "var.dim", "std", "std.dim"),
    **_reductions(None, False, "median.dim", "nanmedian.dim", "mode", "kthvalue"),
    **_reductions(None, False, "var.correction", "std.correction", "var_mean.correction"),
    **_reductions(None, False, "std_mean.correction"),
    **_extrema("max", amax, "amax", "max"),
    **_extrema("min", amin, "amin", "min"),
    **_norms(norm_expand, "linalg_vector_norm", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"),
    **_norms(_norm_full_expand, "norm.Scalar", "norm.ScalarOpt_dtype"),
    **_along(True, "cumsum"),
    **_along(False, "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "sort.stable", "topk"),
}
RULES |= {
    op: OpRule(partial(reduction_signatures, None, False), expand=logsumexp_expand)
    for op in aten("logsumexp")
}
RULES |= {op: OpRule(_dist_signatures, _local_dist, dist_expand) for op in aten("dist")}
RULES |= {op: OpRule(_renormed) for op in aten("renorm")}
