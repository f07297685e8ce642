"""Matrix products: einsum letters, linear in each factor; an added bias is P where the product is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..registry import Forms, OpRule, aten, letters
from ..signature import OpCall, Signature
from .common import broadcast_letters, contracted_bias, linear_signature


def _product(spec: str, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A product of two factors."""
    return letters(call, axis_size, forms, spec, linear=[(0,), (1,)])


def _added_product(spec: str, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """beta * bias + alpha * product: jointly linear in the bias and either factor."""
    bias = broadcast_letters(call.inputs[0].shape, spec.split("->")[1], call.outputs[0].shape)  # pyright: ignore
    found = contracted_bias(letters(call, axis_size, forms, f"{bias},{spec}"), 0)
    return [*found, linear_signature(call, (0, 1)), linear_signature(call, (0, 2))]


def _distances(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """cdist(x1, x2): rows of either side and the batch, which may broadcast; not the feature dim."""
    whole = call.outputs[0].shape  # pyright: ignore[reportOptionalMemberAccess]
    batch = "abcdefgh"[: len(whole) - 2]
    sides = [
        broadcast_letters(meta.shape[:-2], batch, whole[:-2]) + row + "_"
        for meta, row in zip(call.inputs, "mn", strict=True)
    ]
    return letters(call, axis_size, forms, f"{sides[0]},{sides[1]}->{batch}mn")


_PRODUCTS = {
    ("mm", "mm.dtype"): "mk,kn->mn",
    ("bmm", "bmm.dtype"): "bmk,bkn->bmn",
    ("dot",): "k,k->",
    ("mv",): "mk,k->m",
    ("ger",): "m,n->mn",
}
_ADDED_PRODUCTS = {
    ("addmm", "addmm.dtype"): "mk,kn->mn",
    ("baddbmm", "baddbmm.dtype"): "bmk,bkn->bmn",
    ("addbmm",): "bmk,bkn->mn",
    ("addmv",): "mk,k->m",
    ("addr",): "m,n->mn",
}

RULES: dict[Callable, OpRule] = {
    op: OpRule(partial(form, spec))
    for form, family in ((_product, _PRODUCTS), (_added_product, _ADDED_PRODUCTS))
    for names, spec in family.items()
    for op in aten(*names)
}
RULES |= {op: OpRule(_distances) for op in aten("_cdist_forward")}
