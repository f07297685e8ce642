"""Labels: every way in which a node may run on the whole mesh, one signature per axis.

The signatures of an inner axis are those of the call as the outer axes cut it, so that what a rule says of
sizes, blocks and divisibility holds for what it is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ..graph.step_graph import StepGraph, is_getitem, metas_of, op_call, source_of, tensor_args
from ..sbp.layout import NdSbp, Partial, Sbp, Split, fits, is_even
from ..sbp.registry import OpRule, replicated
from ..sbp.signature import OpCall, Signature, TensorMeta
from .calls import cut, sides
from .fold import Folding

#: One tensor of the graph: the node that computes it and which of its outputs it is.
Value = tuple[fx.Node, int]
#: One signature per axis, outermost first.
Label = tuple[Signature, ...]

_MAX_FORMS = 3  # split forms that are considered of one dim of one tensor


class Labels:
    """What every class of nodes may do.

    Attributes:
        nodes: the first op of every class, in topological order.
        sources: the tensors that every op reads, in the order of its signatures' inputs.
        of: the labels of the first op of every class, all-B first.
        metas: every tensor's global shape; None for an absent one.
        unruled: ops without a rule.
    """

    def __init__(
        self,
        graph: StepGraph,
        mesh: Sequence[int],
        folding: Folding,
        storages: Mapping[str, Sequence[NdSbp]],
        rules: Mapping[Callable, OpRule],
    ) -> None:
        self.mesh, self.rules, self.folding = tuple(mesh), rules, folding
        ops = [node for node in graph.calls() if not is_getitem(node)]
        self.sources = {node: [source_of(one) for one in tensor_args(node)] for node in ops}
        self.nodes = [node for node in ops if folding.first[node] is node]
        self.of: dict[fx.Node, list[Label]] = {}
        self.metas: dict[Value, TensorMeta | None] = {}
        self.unruled: list[fx.Node] = []
        self._given: dict[Value, list[NdSbp]] = {}
        self._on_axis: dict[tuple[Value, int], set[Sbp]] = {}
        self._memo: dict[Any, list[Signature]] = {}
        for name, node in graph.placeholders.items():
            self.metas[node, 0] = metas_of(node)[0]
            if folding.first[node] is node:
                self._given[node, 0] = list(storages[name])
        for node in ops:
            for index, meta in enumerate(metas_of(node)):
                self.metas[node, index] = meta
        for node in self.nodes:
            self._add(node)

    def given(self, value: Value) -> list[NdSbp]:
        """The layouts in which a tensor can come: one per label of its node, or per storage of an input."""
        return self._given[self.folding.first[value[0]], value[1]]

    def wanted(self, node: fx.Node, position: int) -> list[NdSbp]:
        """The layouts in which a node takes one of its inputs, one per label."""
        return [tuple(axis.inputs[position] for axis in label) for label in self.of[node]]

    def _add(self, node: fx.Node) -> None:
        rule = self.rules.get(node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
        whole = op_call(node)
        grown: list[tuple[Label, OpCall]] = [((), whole)]
        for axis in range(len(self.mesh)):
            forms = [self._offered(value, axis) for value in self.sources[node]]
            grown = [
                ((*label, one), cut(call, one, self.mesh[axis]))
                for label, call in grown
                for one in self._signatures(node, rule, call, axis, forms)
                if self._nests(whole, call, label, one, axis)
            ]
        self.of[node] = [label for label, _ in grown]
        if rule is None or (rule.tried and len(self.of[node]) == 1):
            self.unruled.append(node)
        for index in range(len(whole.outputs)):
            self._given[node, index] = [tuple(axis.outputs[index] for axis in one) for one in self.of[node]]

    def _signatures(
        self, node: fx.Node, rule: OpRule | None, call: OpCall, axis: int, forms: Sequence[Sequence[Split]]
    ) -> list[Signature]:
        """The signatures along one axis of a call as the outer axes cut it. Equal calls are asked once."""
        found = {replicated(call): None}
        if rule is not None:
            key = repr((call.op, call.args, dict(call.kwargs), call.outputs, forms, self.mesh[axis]))
            if key not in self._memo:
                self._memo[key] = rule.signatures(call, self.mesh[axis], forms)
            for one in self._memo[key]:
                if self._is_sensible(node, one, axis) and self._fits(call, one, axis):
                    found[one] = None
        return list(found)

    def _offered(self, value: Value, axis: int) -> list[Split]:
        """The splits of a tensor that its readers consider along an axis: for every dim the simplest few."""
        count: dict[int, int] = {}
        offered = []
        splits = (one for one in self._along(value, axis) if isinstance(one, Split))
        for one in sorted(splits, key=lambda split: (split.blocks * split.unit, split)):
            count[one.dim] = count.get(one.dim, 0) + 1
            if count[one.dim] <= _MAX_FORMS:
                offered.append(one)
        return offered

    def _along(self, value: Value, axis: int) -> set[Sbp]:
        """How a tensor can come along one axis."""
        key = self.folding.first[value[0]], value[1]
        if (key, axis) not in self._on_axis:
            self._on_axis[key, axis] = {one[axis] for one in self._given[key]}
        return self._on_axis[key, axis]

    def _is_sensible(self, node: fx.Node, signature: Signature, axis: int) -> bool:
        """Whether more is at work than replicas kept as a partial, which no tensor here comes as."""
        layouts = list(zip(self.sources[node], signature.inputs, strict=True))
        if any(isinstance(one, Split) for _, one in layouts):
            return True
        partials = [(value, one) for value, one in layouts if isinstance(one, Partial)]
        return not partials or any(one in self._along(value, axis) for value, one in partials)

    def _fits(self, call: OpCall, signature: Signature, axis: int) -> bool:
        """Whether every split fits its dim."""
        return all(
            fits(meta.shape[one.dim], one, self.mesh[axis])
            for meta, one in sides(call, signature)
            if isinstance(one, Split) and meta is not None
        )

    def _nests(self, whole: OpCall, call: OpCall, label: Label, signature: Signature, axis: int) -> bool:
        """Whether, on every dim that an outer axis splits too, all the splits are even."""
        outer = [[one for _, one in sides(whole, before)] for before in label]
        for position, (meta, one) in enumerate(sides(call, signature)):
            if not isinstance(one, Split) or meta is None:
                continue
            above = [
                (before[position], size)
                for before, size in zip(outer, self.mesh, strict=False)
                if isinstance(before[position], Split) and before[position].dim == one.dim  # pyright: ignore
            ]
            if above:
                extent = sides(whole, signature)[position][0].shape[one.dim]  # pyright: ignore
                for split, size in (*above, (one, self.mesh[axis])):
                    if not is_even(extent, split, size):  # pyright: ignore[reportArgumentType]
                        return False
                    extent //= size
        return True
