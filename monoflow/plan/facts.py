"""What never changes between plans of one graph: sources, shapes, phases and kinds of nodes, kept at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx

from ..graph.step_graph import Phase, StepGraph, info_of, is_getitem, metas_of, source_of, tensor_args
from ..sbp.signature import TensorMeta
from .op_class import OpClass, class_of


class NodeFacts(NamedTuple):
    """One node.

    Attributes:
        sources: the op that computes each tensor argument, and which of its outputs it is.
        metas: global shape and dtype of every tensor output; None for an absent one.
        phase: the part of the step.
        kind: what kind of work it is.
        is_view: whether its outputs may share memory with its first input.
    """

    sources: tuple[tuple[fx.Node, int], ...]
    metas: tuple[TensorMeta | None, ...]
    phase: Phase
    kind: OpClass
    is_view: bool


#: By node; getitem nodes, which only name an output, have none.
Facts = Mapping[fx.Node, NodeFacts]


def facts_of(graph: StepGraph) -> Facts:
    """Facts of every placeholder and call of a graph."""
    views: dict[object, bool] = {}
    found: dict[fx.Node, NodeFacts] = {}
    for node in graph.graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        target = node.target
        if target not in views:
            views[target] = may_share_memory(target)
        sources = tuple(source_of(one) for one in tensor_args(node)) if node.op == "call_function" else ()
        kind = class_of(target) if callable(target) else OpClass.FREE
        found[node] = NodeFacts(sources, metas_of(node), info_of(node).phase, kind, views[target])
    return found


def may_share_memory(target: object) -> bool:
    """Whether what an op returns may be memory of its first argument."""
    schema = getattr(target, "_schema", None)
    return target is torch.ops.aten._unsafe_view.default or (
        schema is not None and any(one.alias_info is not None for one in schema.returns)
    )
