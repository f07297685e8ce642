"""What an op costs on one device: a roofline over its arithmetic and its memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..boxing.route import LinkCost
from ..graph.step_graph import is_getitem, metas_of, tensor_args
from ..sbp.layout import Split
from ..sbp.signature import Signature, TensorMeta

aten = torch.ops.aten

#: ops that move no memory: views and what only names a value
_FREE = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default,
}  # fmt: skip


_LINK = LinkCost(alpha=1e-6, beta=1e-10, launch=1e-5)


@dataclass(frozen=True)
class DeviceCost:
    """Rates of one device and its links: FLOP/s, bytes/s of memory, and each link's alpha and beta.

    The default is a reference device whose links are fast against its latency, so that a template's choices
    follow bytes and work, not the machine they are planned on.
    """

    flops: float = 1e12
    memory: float = 1e11
    link: LinkCost = _LINK


def work(node: fx.Node, device: DeviceCost) -> float:
    """Seconds the whole op takes on one device."""
    if is_getitem(node) or node.target in _FREE:
        return 0.0
    metas = [meta for source in tensor_args(node) for meta in metas_of(source)[:1] if meta is not None]
    results = [meta for meta in metas_of(node) if meta is not None]
    num_bytes = sum(meta.num_bytes for meta in (*metas, *results))
    return max(num_flops(node, metas, results) / device.flops, num_bytes / device.memory)


def num_flops(node: fx.Node, inputs: list[TensorMeta], outputs: list[TensorMeta]) -> float:
    """Multiply-adds times two for products and convolutions, one an element for the rest."""
    target = node.target
    if target in (aten.mm.default, aten.bmm.default):
        return 2.0 * outputs[0].numel * inputs[0].shape[-1]
    if target in (aten.addmm.default, aten.baddbmm.default):
        return 2.0 * outputs[0].numel * inputs[1].shape[-1]
    if target is aten.convolution.default:
        weight = inputs[1]
        return 2.0 * outputs[0].numel * (weight.numel / max(weight.shape[0], 1))
    if target is aten.convolution_backward.default:
        grad, _, weight = inputs[:3]
        return 4.0 * grad.numel * (weight.numel / max(weight.shape[0], 1))
    if target in (torch.ops.monoflow.attention.default, torch.ops.monoflow.attention_backward.default):
        first = inputs[0]
        return 10.0 * first.numel * first.shape[-2]
    return float(sum(meta.numel for meta in outputs))


def fraction(signature: Signature, axis_size: int) -> float:
    """The part of the op's work that one rank does: its share if anything is split, all of it otherwise."""
    split = any(isinstance(one, Split) for one in (*signature.inputs, *signature.outputs))
    return 1.0 / axis_size if split else 1.0
