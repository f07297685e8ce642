"""Rules of torch's own attention kernels: batch, heads, and for some the rows of queries.

Nothing splits under dropout, which a rank would draw for itself. Kernels that this machine cannot run are
proven in their mathematical form under the same signature (tests/rules/stand_ins.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..layout import B, Split
from ..registry import Forms, OpRule, aten, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import (
    any_empty,
    argument,
    broadcast_letters,
    empty_outputs,
    has_argument,
    linear_signature,
    named,
    tensor_names,
)


class _Variant(NamedTuple):
    """One of torch's own attention kernels.

    Attributes:
        lse: letters of its log-sum-exp, which some kernels pad.
        queries: whether rows of queries can be split: not where a size argument counts them.
        mask: the name of its mask or bias.
    """

    lse: str
    queries: bool
    mask: str


_VARIANTS = {
    "flash_attention_for_cpu": _Variant("bhq", True, "attn_mask"),
    "flash_attention": _Variant("bhq", False, ""),
    "efficient_attention": _Variant("bh_", False, "attn_bias"),
    "cudnn_attention": _Variant("bhq_", False, "attn_bias"),
    "fused_attention_overrideable": _Variant("bhq", False, "attn_bias"),
    "attention_math": _Variant("bhq_", True, "attn_mask"),
}


def _shape(call: OpCall, name: str) -> tuple[int, ...]:
    return call.inputs[tensor_names(call).index(name)].shape


def _draws(call: OpCall) -> bool:
    """Whether the kernel draws random numbers (a rank's own), or shows its insides."""
    debug = has_argument(call, "return_debug_mask") and argument(call, "return_debug_mask")
    return argument(call, "dropout_p") > 0 or bool(debug)


def _groups(variant: _Variant, call: OpCall) -> dict[str, str]:
    """Letters of all inputs by name. A single head of keys serves all heads of queries and stays whole."""
    query, key = _shape(call, "query"), _shape(call, "key")
    rows = "bhq_" if variant.queries and not argument(call, "is_causal") else "bh__"
    keys = "b___" if key[1] == 1 != query[1] else "bh__"
    lse = variant.lse if "q" in rows else variant.lse.replace("q", "_")
    groups = {"query": rows, "key": keys, "value": keys, "out": rows, "logsumexp": lse}
    groups |= {"grad_out": rows, "grad_out_": rows}
    if variant.mask in tensor_names(call):
        mask = _shape(call, variant.mask)
        groups[variant.mask] = broadcast_letters(mask, rows, (*query[:3], key[2]))
    return groups


def _whole_groups_of_heads(call: OpCall, axis_size: int, found: list[Signature]) -> list[Signature]:
    """Where several heads of queries share one of keys: heads split only if every rank has whole groups."""
    names = tensor_names(call)
    query, key = names.index("query"), names.index("key")
    num_heads, num_shared = _shape(call, "query")[1], _shape(call, "key")[1]
    if num_shared in (1, num_heads):
        return found
    even = num_shared % axis_size == 0 and num_heads % num_shared == 0
    return [
        one
        for one in found
        if not isinstance(one.inputs[query], Split)
        or one.inputs[query].dim != 1  # pyright: ignore[reportAttributeAccessIssue]
        or (even and one.inputs[query] == one.inputs[key] == Split(1))
    ]


def _kernel(variant: _Variant, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Batch, heads and, for some kernels, rows of queries; linear in the values."""
    if _draws(call) or len(_shape(call, "query")) != 4:
        return []
    groups = _groups(variant, call)
    outs = [groups["query"], groups["logsumexp"], *["-"] * (len(call.outputs) - 2)]
    found = named(call, axis_size, forms, groups, outs)
    values = linear_signature(call, [tensor_names(call).index("value")])
    found.append(Signature(values.inputs, (values.outputs[0], *[B] * (len(outs) - 1))))
    return _whole_groups_of_heads(call, axis_size, found)


def _kernel_backward(variant: _Variant, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """As forward; gradients of what is shared by several heads or rows are sums."""
    if _draws(call) or len(_shape(call, "query")) != 4:
        return []
    groups = _groups(variant, call)
    order = ("query", "key", "value", variant.mask)
    outs = [groups.get(name, "-") for name in order[: len(call.outputs)]]
    found = named(call, axis_size, forms, groups, outs, linear=[("grad_out", "grad_out_")])
    return _whole_groups_of_heads(call, axis_size, found)


def _local(call: LocalCall) -> LocalOp:
    """Kernels divide by the sizes of what they are given."""
    return empty_outputs(call, call.args[0]) if any_empty(call) else own_op(call)


RULES: dict[Callable, OpRule] = {}
for _name, _variant in _VARIANTS.items():
    for _form, _suffix in ((_kernel, ""), (_kernel_backward, "_backward")):
        _rule = OpRule(partial(_form, _variant), _local)
        RULES |= dict.fromkeys(aten(f"_scaled_dot_product_{_name}{_suffix}"), _rule)
