"""Matrix products: einsum letters, linear in each factor; an added bias is P where the product is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_lowercase

import torch

from ..registry import Forms, OpRule, aten, letters, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import (
    any_empty,
    argument,
    broadcast_letters,
    contracted_bias,
    empty_outputs,
    has_argument,
    linear_signature,
)


def _product(spec: str, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A product of two factors."""
    return letters(call, axis_size, forms, spec, linear=[(0,), (1,)])


def _added_product(spec: str, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """beta * bias + alpha * product: jointly linear in the bias and either factor."""
    bias = broadcast_letters(call.inputs[0].shape, spec.split("->")[1], call.outputs[0].shape)  # pyright: ignore
    found = contracted_bias(letters(call, axis_size, forms, f"{bias},{spec}"), 0)
    return [*found, linear_signature(call, (0, 1)), linear_signature(call, (0, 2))]


def _vector_local(call: LocalCall) -> LocalOp:
    """addmv over no element gives its bias as it is, not in the shape of the result."""
    (output,) = call.outputs
    if not any_empty(call) or output is None:
        return own_op(call)
    return scaled_bias, (call.args[0], output.shape, output.meta.dtype, argument(call, "beta")), {}


def scaled_bias(bias: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, beta: float) -> torch.Tensor:
    """beta * bias in the given shape and dtype; zeros for beta 0, whatever the bias holds."""
    return bias.new_zeros(shape, dtype=dtype) if beta == 0 else (bias * beta).to(dtype).expand(shape).clone()


def _distances(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """cdist(x1, x2): rows of either side and the batch, which may broadcast; features of some norms."""
    whole = call.outputs[0].shape  # pyright: ignore[reportOptionalMemberAccess]
    batch = "abcdefgh"[: len(whole) - 2]
    reduce_op = _norm_partial(call)
    feature = "_" if reduce_op is None else "k"
    sides = [
        broadcast_letters(meta.shape[:-2], batch, whole[:-2]) + row + feature
        for meta, row in zip(call.inputs, "mn", strict=True)
    ]
    spec = f"{sides[0]},{sides[1]}->{batch}mn"
    return letters(call, axis_size, forms, spec, reduce_op=reduce_op or "sum")


def _norm_partial(call: OpCall) -> str | None:
    """How norms of parts make up the norm of the whole: it is a sum, a maximum, or neither."""
    order = argument(call, "p") if has_argument(call, "p") else 2.0
    return {0.0: "sum", 1.0: "sum", math.inf: "max"}.get(order)


def _pair_distances(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """pdist: every pair of rows; features of some norms."""
    reduce_op = _norm_partial(call)
    return letters(call, axis_size, forms, "_k->_", reduce_op=reduce_op) if reduce_op else []


def _pair_distances_backward(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """_pdist_backward: given the distances, feature by feature."""
    return letters(call, axis_size, forms, "_,_k,_->_k", linear=[(0,)])


def _distances_backward(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """_cdist_backward: for x1, given the distances, feature by feature; a sum over the rows of x2."""
    batch = "abcdefgh"[: len(call.inputs[0].shape) - 2]
    if any(meta.shape[:-2] != call.inputs[0].shape[:-2] for meta in call.inputs):
        return [linear_signature(call, (0,))]
    spec = f"{batch}mn,{batch}mk,{batch}nk,{batch}mn->{batch}mk"
    return letters(call, axis_size, forms, spec, linear=[(0,)])


def _trilinear(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """sum(i1 * i2 * i3) over some dims, each factor with dims of one element put in: an einsum of three."""
    inserted = [set(argument(call, f"expand{i}")) for i in (1, 2, 3)]
    summed = set(argument(call, "sumdim"))
    rank = len(call.inputs[0].shape) + len(inserted[0])
    placed = [[d for d in range(rank) if d not in one] for one in inserted]
    sizes = [
        max(meta.shape[dims.index(d)] for meta, dims in zip(call.inputs, placed, strict=True) if d in dims)
        for d in range(rank)
    ]
    ins = [
        "".join(
            ascii_lowercase[d] if extent == sizes[d] else "_"
            for d, extent in zip(dims, meta.shape, strict=True)
        )
        for meta, dims in zip(call.inputs, placed, strict=True)
    ]
    out = "".join(ascii_lowercase[d] for d in range(rank) if d not in summed)
    return letters(call, axis_size, forms, f"{','.join(ins)}->{out}", linear=[(0,), (1,), (2,)])


def _trilinear_local(call: LocalCall) -> LocalOp:
    """The kernel refuses to sum over no element."""
    return empty_outputs(call, call.args[0]) if any_empty(call) else own_op(call)


_PRODUCTS = {
    ("mm", "mm.dtype"): "mk,kn->mn",
    ("bmm", "bmm.dtype"): "bmk,bkn->bmn",
    ("dot", "vdot"): "k,k->",
    ("mv",): "mk,k->m",
    ("ger",): "m,n->mn",
}
_ADDED_PRODUCTS = {
    ("addmm", "addmm.dtype"): "mk,kn->mn",
    ("baddbmm", "baddbmm.dtype"): "bmk,bkn->bmn",
    ("addbmm",): "bmk,bkn->mn",
    ("addr",): "m,n->mn",
}

RULES: dict[Callable, OpRule] = {
    op: OpRule(partial(form, spec))
    for form, family in ((_product, _PRODUCTS), (_added_product, _ADDED_PRODUCTS))
    for names, spec in family.items()
    for op in aten(*names)
}
RULES |= {op: OpRule(partial(_added_product, "mk,k->m"), _vector_local) for op in aten("addmv")}
RULES |= {op: OpRule(_distances) for op in aten("_cdist_forward", "_euclidean_dist")}
RULES |= {op: OpRule(_distances_backward) for op in aten("_cdist_backward")}
RULES |= {op: OpRule(_pair_distances) for op in aten("_pdist_forward")}
RULES |= {op: OpRule(_pair_distances_backward) for op in aten("_pdist_backward")}
RULES |= {op: OpRule(_trilinear, _trilinear_local) for op in aten("_trilinear")}
