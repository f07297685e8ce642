"""Losses with reduction "none" or "sum". A mean hides a count: capture rewrites it before rules apply."""

from __future__ import annotations

from collections.abc import Callable

from ..layout import B, P
from ..registry import Forms, OpRule, aten, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import (
    any_empty,
    argument,
    broadcast_letters,
    dim_letters,
    empty_outputs,
    linear_signature,
    named,
    tensor_names,
)

_NONE, _MEAN, _SUM = range(3)


def _elementwise(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A loss per element of self and target (and weights, which may broadcast), summed or not."""
    if argument(call, "reduction") == _MEAN:
        return []
    whole = max((meta.shape for meta in call.inputs), key=len)
    if any(meta.shape != whole for meta in call.inputs[:2]):
        return []
    group = dim_letters(whole)
    names = tensor_names(call)
    groups = {
        name: broadcast_letters(meta.shape, group, whole)
        for name, meta in zip(names, call.inputs, strict=True)
    }
    return named(call, axis_size, forms, groups, [group if argument(call, "reduction") == _NONE else ""])


def _elementwise_backward(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """The gradient for self, per element; linear in grad_output, a scalar where the loss was summed."""
    if argument(call, "reduction") == _MEAN:
        return [_linear_in_gradient(call)]
    whole = call.outputs[0].shape  # pyright: ignore[reportOptionalMemberAccess]
    group = dim_letters(whole)
    groups = {
        name: broadcast_letters(meta.shape, group, whole)
        for name, meta in zip(tensor_names(call), call.inputs, strict=True)
    }
    return named(call, axis_size, forms, groups, [group], linear=[("grad_output",)])


def _linear_in_gradient(call: OpCall) -> Signature:
    return linear_signature(call, [tensor_names(call).index("grad_output")])


def _class_groups(call: OpCall) -> tuple[dict[str, str], str]:
    """Letters of a negative log likelihood: self (n, classes, ...), target (n, ...), or self (classes,)."""
    rank = len(call.inputs[tensor_names(call).index("self")].shape)
    target = "nabcdef"[: max(rank - 1, 0)]
    return {"self": f"{target[:1]}_{target[1:]}", "target": target}, target


def _nll(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Splits of every dim but the classes. The total weight is a sum, used only by the mean."""
    reduction = argument(call, "reduction")
    if reduction == _MEAN:
        return [_linear_in_scores(call)]
    groups, target = _class_groups(call)
    # Without a reduction the kernel leaves the total weight at zero, so every rank has the same.
    outs = ["", ""] if reduction == _SUM else [target, "-"]
    return [*named(call, axis_size, forms, groups, outs), _linear_in_scores(call)]


def _linear_in_scores(call: OpCall) -> Signature:
    """A part of the scores gives its part of the loss, over the whole of the weights."""
    return Signature(linear_signature(call, [tensor_names(call).index("self")]).inputs, (P, B))


def _nll_backward(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    reduction = argument(call, "reduction")
    if reduction == _MEAN:
        return [_linear_in_gradient(call)]
    groups, target = _class_groups(call)
    groups["grad_output"] = target if reduction == _NONE else ""
    found = named(call, axis_size, forms, groups, [groups["self"]])
    return [*found, linear_signature(call, (0,))]


def _margin(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """multi_margin_loss and multilabel_margin_loss: a loss per sample, and what says which are targets."""
    reduction = argument(call, "reduction")
    if reduction == _MEAN:
        return []
    groups = _margin_groups(call)
    loss = groups["self"][:-1] if reduction == _NONE else ""
    return named(call, axis_size, forms, groups, [loss, groups["self"]][: len(call.outputs)])


def _margin_backward(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    reduction = argument(call, "reduction")
    if reduction == _MEAN:
        return [_linear_in_gradient(call)]
    groups = _margin_groups(call)
    groups |= {"grad_output": groups["self"][:-1] if reduction == _NONE else "", "is_target": groups["self"]}
    return named(call, axis_size, forms, groups, [groups["self"]], linear=[("grad_output",)])


def _margin_local(call: LocalCall) -> LocalOp:
    """Some kernels leave the sum over no sample uninitialized."""
    return empty_outputs(call, call.args[0]) if any_empty(call) else own_op(call)


def _margin_groups(call: OpCall) -> dict[str, str]:
    """Letters of self, (n, classes) or (classes,), and of target, which has classes in one of the losses."""
    names = tensor_names(call)
    whole, target = (call.inputs[names.index(name)].shape for name in ("self", "target"))
    group = "n_"[-len(whole) :] if whole else ""
    return {"self": group, "target": group[: len(target)]}


_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
RULES: dict[Callable, OpRule] = {
    **dict.fromkeys(aten(*_LOSSES, "binary_cross_entropy_with_logits"), OpRule(_elementwise)),
    **dict.fromkeys(aten(*(f"{name}_backward" for name in _LOSSES)), OpRule(_elementwise_backward)),
    **dict.fromkeys(aten("nll_loss_forward", "nll_loss2d_forward"), OpRule(_nll)),
    **dict.fromkeys(aten("nll_loss_backward", "nll_loss2d_backward"), OpRule(_nll_backward)),
    **dict.fromkeys(
        aten("multi_margin_loss", "multilabel_margin_loss_forward"), OpRule(_margin, _margin_local)
    ),
    **dict.fromkeys(
        aten("multi_margin_loss_backward", "multilabel_margin_loss_backward"), OpRule(_margin_backward)
    ),
}
