"""Calls as layouts see them: their tensors side by side, and what an axis leaves of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from ..graph.step_graph import metas_of, tensor_args
from ..sbp.layout import Split, is_even
from ..sbp.signature import OpCall, Signature, TensorMeta


def sides(call: OpCall, signature: Signature) -> list[tuple[TensorMeta | None, Any]]:
    """(shape, SBP) of every input and output."""
    return [
        *zip(call.inputs, signature.inputs, strict=True),
        *zip(call.outputs, signature.outputs, strict=True),
    ]


def cut(call: OpCall, signature: Signature, size: int) -> OpCall:
    """The call as one axis cuts it; a dim split unevenly stays whole, as it is not split again."""
    if not any(isinstance(one, Split) for one in (*signature.inputs, *signature.outputs)):
        return call
    pieces = iter([_share(meta, one, size) for meta, one in zip(call.inputs, signature.inputs, strict=True)])
    args, kwargs = with_metas((call.args, dict(call.kwargs)), pieces)
    outputs = tuple(
        _share(meta, one, size) for meta, one in zip(call.outputs, signature.outputs, strict=True)
    )
    return OpCall(call.op, args, kwargs, outputs)


def _share(meta: TensorMeta | None, one: Any, size: int) -> TensorMeta | None:
    if meta is None or not isinstance(one, Split) or not is_even(meta.shape[one.dim], one, size):
        return meta
    shape = list(meta.shape)
    shape[one.dim] //= size
    return replace(meta, shape=tuple(shape))


def with_metas(tree: Any, metas: Iterator[TensorMeta | None]) -> Any:
    """A tree of arguments with its TensorMetas replaced, in order."""
    if isinstance(tree, TensorMeta):
        return next(metas)
    if isinstance(tree, (list, tuple)):
        return type(tree)(with_metas(one, metas) for one in tree)
    if isinstance(tree, dict):
        return {key: with_metas(one, metas) for key, one in tree.items()}
    return tree


def bytes_around(node: fx.Node) -> int:
    """Bytes of what a node reads and makes: what it costs to run it whole on every rank."""
    metas = [meta for source in tensor_args(node) for meta in metas_of(source)[:1]]
    return sum(meta.num_bytes for meta in (*metas, *metas_of(node)) if meta is not None)
