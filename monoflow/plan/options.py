"""The signatures that every node may take along one axis, as the axes outside it leave its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..graph.step_graph import StepGraph, is_getitem, metas_of, op_call, source_of, tensor_args
from ..sbp.layout import NdSbp, Partial, Sbp, Split, fits, is_even
from ..sbp.registry import OpRule, replicated
from ..sbp.signature import OpCall, Signature, TensorMeta
from .calls import with_metas

#: One tensor of the graph: the node that computes it and which of its outputs it is.
Value = tuple[fx.Node, int]

_MAX_FORMS = 3  # split forms that are considered of one dim of one tensor


@dataclass(frozen=True)
class Outer:
    """An axis outside this one that is planned already: its size, and how tensors lie along it."""

    size: int
    stored: Mapping[str, Sbp]
    signatures: Mapping[fx.Node, Signature]


class Options:
    """What each node may do along one axis.

    Attributes:
        nodes: the ops, in topological order.
        sources: the tensors that every op reads, in the order of its signature's inputs.
        of: the signatures that every op may take, all-B first.
        metas: every tensor's shape as the outer axes cut it; None for an absent one.
        unruled: ops without a rule.
    """

    def __init__(
        self,
        graph: StepGraph,
        size: int,
        storages: Mapping[str, Sequence[Sbp]],
        rules: Mapping[Callable, OpRule],
        outer: Sequence[Outer] = (),
    ) -> None:
        self.size, self.rules, self.outer = size, rules, tuple(outer)
        self.names = {node: name for name, node in graph.placeholders.items()}
        self.nodes = [node for node in graph.calls() if not is_getitem(node)]
        self.sources = {node: [source_of(one) for one in tensor_args(node)] for node in self.nodes}
        self.of: dict[fx.Node, list[Signature]] = {}
        self.metas: dict[Value, TensorMeta | None] = {}
        self.unruled: list[fx.Node] = []
        self._given: dict[Value, list[Sbp]] = {}
        self._memo: dict[Any, list[Signature]] = {}
        for node, name in self.names.items():
            self.metas[node, 0] = self._cut(metas_of(node)[0], [axis.stored[name] for axis in self.outer])
            self._given[node, 0] = list(storages[name])
        for node in self.nodes:
            self._add(node)

    def given(self, value: Value) -> list[Sbp]:
        """The layouts in which a tensor can come: of an op's output, one per signature of the op."""
        return self._given[value]

    def _add(self, node: fx.Node) -> None:
        call, outer_in, outer_out = self._localized(node)
        for index, meta in enumerate(call.outputs):
            self.metas[node, index] = meta
        found = {replicated(call): None}
        rule = self.rules.get(node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if rule is not None:
            forms = [self._offered(value) for value in self.sources[node]]
            for one in self._signatures(rule, call, forms):
                if (
                    self._is_sensible(node, one)
                    and self._fits(call, one)
                    and (not self.outer or self._nests(node, call, one, outer_in, outer_out))
                ):
                    found[one] = None
        if rule is None or (rule.tried and len(found) == 1):
            self.unruled.append(node)
        self.of[node] = list(found)
        for index in range(len(call.outputs)):
            self._given[node, index] = [one.outputs[index] for one in found]

    def _signatures(self, rule: OpRule, call: OpCall, forms: Sequence[Sequence[Split]]) -> list[Signature]:
        """What the rule lists. The layers of a model make the same calls: each is asked once."""
        key = repr((call.op, call.args, dict(call.kwargs), call.outputs, forms))
        if key not in self._memo:
            self._memo[key] = rule.signatures(call, self.size, forms)
        return self._memo[key]

    def _offered(self, value: Value) -> list[Split]:
        """The splits of a tensor that its readers consider: for every dim the simplest few."""
        splits = {one for one in self._given[value] if isinstance(one, Split)}
        count: dict[int, int] = {}
        offered = []
        for one in sorted(splits, key=lambda split: (split.blocks * split.unit, split)):
            count[one.dim] = count.get(one.dim, 0) + 1
            if count[one.dim] <= _MAX_FORMS:
                offered.append(one)
        return offered

    def _is_sensible(self, node: fx.Node, signature: Signature) -> bool:
        """Whether more is at work than replicas kept as a partial, which no tensor here comes as."""
        layouts = list(zip(self.sources[node], signature.inputs, strict=True))
        if any(isinstance(one, Split) for _, one in layouts):
            return True
        partials = [(value, one) for value, one in layouts if isinstance(one, Partial)]
        return not partials or any(one in self._given[value] for value, one in partials)

    def _fits(self, call: OpCall, signature: Signature) -> bool:
        """Whether every split fits its dim."""
        sides = (
            *zip(call.inputs, signature.inputs, strict=True),
            *zip(call.outputs, signature.outputs, strict=True),
        )
        return all(
            fits(meta.shape[one.dim], one, self.size)
            for meta, one in sides
            if isinstance(one, Split) and meta is not None
        )

    def _nests(
        self, node: fx.Node, call: OpCall, signature: Signature, outer_in: list[NdSbp], outer_out: list[NdSbp]
    ) -> bool:
        """Whether, on every dim that an outer axis splits too, both splits are even."""
        wholes = [metas_of(source)[0] for source in tensor_args(node)], metas_of(node)
        sides = (
            (wholes[0], call.inputs, signature.inputs, outer_in),
            (wholes[1], call.outputs, signature.outputs, outer_out),
        )
        for whole, metas, layouts, outers in sides:
            for before, meta, one, outer in zip(whole, metas, layouts, outers, strict=True):
                if not isinstance(one, Split) or meta is None or before is None:
                    continue
                if any(isinstance(other, Split) and other.dim == one.dim for other in outer):
                    evenly = self._cut_evenly(before.shape, outer, one.dim)
                    if not (evenly and is_even(meta.shape[one.dim], one, self.size)):
                        return False
        return True

    # --- what outer axes leave ---------------------------------------------------------------------

    def _localized(self, node: fx.Node) -> tuple[OpCall, list[NdSbp], list[NdSbp]]:
        """The call with every tensor as the outer axes cut it, and how they lay inputs and outputs."""
        call = op_call(node)
        signatures = [axis.signatures[node] for axis in self.outer]
        outer_in = [tuple(one.inputs[i] for one in signatures) for i in range(len(call.inputs))]
        outer_out = [tuple(one.outputs[i] for one in signatures) for i in range(len(call.outputs))]
        if not self.outer:
            return call, outer_in, outer_out
        cut = iter([self._cut(meta, outer) for meta, outer in zip(call.inputs, outer_in, strict=True)])
        args, kwargs = with_metas((call.args, dict(call.kwargs)), cut)
        outputs = tuple(self._cut(meta, outer) for meta, outer in zip(call.outputs, outer_out, strict=True))
        return OpCall(call.op, args, kwargs, outputs), outer_in, outer_out

    def _cut(self, meta: TensorMeta | None, outer: Sequence[Sbp]) -> TensorMeta | None:
        """The shape that outer axes leave; a dim split unevenly stays whole, as it is not split again."""
        if meta is None:
            return None
        shape = list(meta.shape)
        for axis, one in zip(self.outer, outer, strict=True):
            if isinstance(one, Split) and is_even(shape[one.dim], one, axis.size):
                shape[one.dim] //= axis.size
        return replace(meta, shape=tuple(shape))

    def _cut_evenly(self, shape: Sequence[int], outer: Sequence[Sbp], dim: int) -> bool:
        size = shape[dim]
        for axis, one in zip(self.outer, outer, strict=True):
            if isinstance(one, Split) and one.dim == dim:
                if not is_even(size, one, axis.size):
                    return False
                size //= axis.size
        return True
