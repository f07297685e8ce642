"""One axis: the signature of every node at least total cost, around what is fixed.

Choices are the signature of every op, the storage of parameters that a template leaves free, and, for a tensor
that several ops read, the layout it is brought to for them. Costs are the work of every op and the move on every
edge. `minimize` finds the best of all combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import fx

from ..boxing.route import axis_price
from ..graph.step_graph import (
    Phase,
    Role,
    StepGraph,
    info_of,
    is_getitem,
    metas_of,
    op_call,
    source_of,
    tensor_args,
)
from ..sbp.layout import B, Broadcast, Partial, Sbp, Split, fits
from ..sbp.registry import OpRule, replicated
from ..sbp.signature import OpCall, Signature, TensorMeta
from .cost import DeviceCost, fraction, work
from .eliminate import Factor, minimize

aten = torch.ops.aten

#: One tensor of the graph: the node that computes it and which of its outputs it is.
Value = tuple[fx.Node, int]

#: ops that only prepare a parameter for the op that uses it
PREPARES = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten._to_copy.default, aten.view.default,
    aten.unsqueeze.default, aten.clone.default, aten.mul.Scalar, aten.expand.default,
}  # fmt: skip

_MAX_FORMS = 3  # of one dim of one tensor
_KEEP = 1e3  # times the price: a move off a split that a template wants kept
_NEVER = 1e3  # seconds: what is not to be chosen if there is any other way


@dataclass(frozen=True)
class AxisGoal:
    """What is asked of one axis.

    Attributes:
        size: how many ranks it has.
        stored: how inputs are stored, by name. Inputs that are not named are B.
        used: how parameters are used in forward and backward, where that is not as they are stored: they are
            moved there once per phase, and no other layout of them is considered.
        free: parameters whose storage is a choice; by name, the layouts to choose from.
        outputs: how outputs must be handed out, by name. An output that replaces an input is as stored.
        keep_splits: price a move off a split so high that it is made only where there is no other way. Then
            what is stored decides, not the size of the model: the smallest is laid out as the largest.
    """

    size: int
    stored: Mapping[str, Sbp]
    used: Mapping[str, Sbp] = field(default_factory=dict)
    free: Mapping[str, Sequence[Sbp]] = field(default_factory=dict)
    outputs: Mapping[str, Sbp] = field(default_factory=dict)
    keep_splits: bool = True


@dataclass(frozen=True)
class AxisPlan:
    """What was found for one axis.

    Attributes:
        cost: seconds of work and moves, as the choices were priced.
        exact: whether no other choice costs less.
        gathered: nodes that take an input whole which arrives split.
    """

    signatures: dict[fx.Node, Signature]
    stored: dict[str, Sbp]
    outputs: dict[str, Sbp]
    unruled: tuple[fx.Node, ...]
    cost: float
    exact: bool
    gathered: tuple[fx.Node, ...]


class AxisProblem:
    """The choices along one axis, given the signatures of the axes outside it."""

    def __init__(
        self,
        graph: StepGraph,
        goal: AxisGoal,
        rules: Mapping[Callable, OpRule],
        device: DeviceCost,
        outer: Sequence[tuple[int, AxisPlan]] = (),
    ) -> None:
        self.graph, self.goal, self.rules, self.device, self.outer = graph, goal, rules, device, tuple(outer)
        self.names = {node: name for name, node in graph.placeholders.items()}
        self.nodes = [node for node in graph.calls() if not is_getitem(node)]
        self.sources = {node: [source_of(one) for one in tensor_args(node)] for node in self.nodes}
        self.uses: dict[Value, dict[fx.Node, list[int]]] = {}
        for node in self.nodes:
            for position, value in enumerate(self.sources[node]):
                self.uses.setdefault(value, {}).setdefault(node, []).append(position)
        self.metas: dict[Value, TensorMeta | None] = {}
        self.forms: dict[Value, set[Split]] = {}
        self.prepared = self._prepared_params()
        self.unruled: list[fx.Node] = []
        self.options: dict[fx.Node, list[Signature]] = {}
        for node in graph.placeholders.values():
            self.metas[node, 0] = self._localized_meta(node, 0, outputs=True)
            self.forms[node, 0] = {one for one in self._storages(node) if isinstance(one, Split)}
        for node in self.nodes:
            self.options[node] = self._options(node)
        self.sizes: list[int] = []
        self.factors: list[Factor] = []
        self.variable: dict[fx.Node, int] = {}
        self.hubs: dict[Value, tuple[int, list[Sbp]]] = {}

    # --- the search --------------------------------------------------------------------------------

    def solve(self) -> AxisPlan:
        """The best choice, and what follows from it."""
        for node in self.graph.placeholders.values():
            if self.names[node] in self.goal.free:
                storages = self._storages(node)
                self.variable[node] = self._add_variable([self._storage_cost(node, one) for one in storages])
        for node in self.nodes:
            self.variable[node] = self._add_variable([self._work(node, one) for one in self.options[node]])
        for node in self.nodes:
            for index in range(len(metas_of(node))):
                self._connect((node, index))
        for node in self.graph.placeholders.values():
            self._connect((node, 0))
        found = minimize(self.sizes, self.factors)
        chosen = {node: self.options[node][found.choices[self.variable[node]]] for node in self.nodes}
        stored = {name: self._stored(name, found.choices) for name in self.graph.input_of}
        return self._result(chosen, stored, found.choices, found.exact)

    def _add_variable(self, costs: Sequence[float]) -> int:
        number = len(self.sizes)
        self.sizes.append(len(costs))
        # A hair per position: among equals the first is taken, on every machine.
        self.factors.append(((number,), np.array(costs) + 1e-13 * np.arange(len(costs))))
        return number

    # --- factors -----------------------------------------------------------------------------------

    def _connect(self, value: Value) -> None:
        """The cost of moving one tensor to where it is read."""
        users = self.uses.get(value, {})
        results = self._results_of(value)
        if self._gives(value) == [B] or self.metas[value] is None:
            users, results = {}, [name for name in results if self.replaced.get(name)]
            if not results:
                return
        if value[0] in self.param_nodes or value in self.prepared:
            for user in users:
                self._use_factor(value, user)
            return
        if len(users) + len(results) > 1:
            hub, layouts = self._hub(value)
            for user in users:
                self._edge(hub, layouts, value, user)
            for name in results:
                self._result_factor(hub, layouts, value, name)
            return
        source, given = self._giver(value)
        for user in users:
            self._edge(source, given, value, user)
        for name in results:
            self._result_factor(source, given, value, name)

    def _hub(self, value: Value) -> tuple[int, list[Sbp]]:
        """The layout in which a tensor with several readers is brought to them: a choice of its own."""
        source, given = self._giver(value)
        layouts: dict[Sbp, None] = dict.fromkeys([*given, B])
        for user, positions in self.uses[value].items() if value in self.uses else ():
            for one in self.options[user]:
                layouts.update(
                    dict.fromkeys(one.inputs[at] for at in positions if isinstance(one.inputs[at], Split))
                )
        found = list(layouts)
        hub = self._add_variable([0.0] * len(found))
        self.hubs[value] = (hub, found)
        self._add_factor(source, hub, [[self._price(value, a, b) for b in found] for a in given])
        return hub, found

    def _edge(self, source: int | None, given: Sequence[Sbp], value: Value, user: fx.Node) -> None:
        positions = self.uses[value][user]
        table = [
            [
                sum(self._price(value, a, b) for b in {one.inputs[at] for at in positions})
                for one in self.options[user]
            ]
            for a in given
        ]
        self._add_factor(source, self.variable[user], table)

    def _use_factor(self, value: Value, user: fx.Node) -> None:
        """A parameter is used as the template says; any other use is possible, but never chosen without need."""
        positions = self.uses[value][user]
        source, given = self._giver(value)
        if info_of(user).phase is Phase.UPDATE:
            self._edge(source, given, value, user)
            return
        name = self.names.get(value[0])
        used = self.goal.used.get(name) if name is not None else None
        table = [
            [
                sum(self._use_price(value, used or a, one.inputs[at]) for at in positions)
                for one in self.options[user]
            ]
            for a in given
        ]
        self._add_factor(source, self.variable[user], table)

    def _use_price(self, value: Value, used: Sbp, wanted: Sbp) -> float:
        if used == wanted or used == B:
            return 0.0
        return _NEVER + self._price(value, used, wanted)

    def _result_factor(self, source: int | None, given: Sequence[Sbp], value: Value, name: str) -> None:
        """What it costs to hand out an output, or to store it as the input that it replaces."""
        replaced = self.replaced.get(name, "")
        if replaced:
            owner = self._owner(replaced)
            storages = self._storages(owner) if owner is not None else [self._storage_of(replaced)]
            same = self._follows(replaced)
            targets = [one if same else B for one in storages] if owner is not None else storages
            table = [[self._price(value, a, b) for b in targets] for a in given]
            number = self.variable.get(owner) if owner is not None else None
            self._add_factor(source, number, table)
            return
        goal = self.goal.outputs.get(name)
        costs = [
            self._price(value, a, goal if goal is not None else B if isinstance(a, Partial) else a)
            for a in given
        ]
        self._add_factor(source, None, [[cost] for cost in costs])

    def _add_factor(self, first: int | None, second: int | None, table: Sequence[Sequence[float]]) -> None:
        array = np.array(table, dtype=float)
        if not array.any():
            return
        if first is None and second is None:
            return
        if first is None:
            self.factors.append(((second,), array[0]))  # type: ignore[arg-type]
        elif second is None:
            self.factors.append(((first,), array[:, 0]))
        else:
            self.factors.append(((first, second), array))

    # --- what values can be ------------------------------------------------------------------------

    @cached_property
    def param_nodes(self) -> set[fx.Node]:
        return {node for node, name in self.names.items() if self.graph.input_of[name].role is Role.PARAM}

    @cached_property
    def replaced(self) -> dict[str, str]:
        return {one.name: one.replaces for one in self.graph.outputs}

    def _prepared_params(self) -> set[Value]:
        """Parameters after the ops that only prepare them."""
        found: set[Value] = set()
        for node in self.nodes:
            sources = self.sources[node]
            if node.target in PREPARES and len(sources) == 1 and info_of(node).phase is not Phase.UPDATE:
                if sources[0][0] in self.param_nodes or sources[0] in found:
                    found.add((node, 0))
        return found

    def _results_of(self, value: Value) -> list[str]:
        return self._result_names.get(value, [])

    @cached_property
    def _result_names(self) -> dict[Value, list[str]]:
        found: dict[Value, list[str]] = {}
        for one, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if not one.observed:
                found.setdefault(source_of(node), []).append(one.name)
        return found

    def _gives(self, value: Value) -> list[Sbp]:
        """The layouts in which a tensor can come, one per choice of what gives it."""
        node, index = value
        if node.op == "placeholder":
            return self._storages(node)
        return [one.outputs[index] for one in self.options[node]]

    def _giver(self, value: Value) -> tuple[int | None, list[Sbp]]:
        """The variable that decides how a tensor comes (None if it is fixed), and the layouts by its choices."""
        node, _ = value
        if node.op == "placeholder":
            owner = self._owner(self.names[node])
            if owner is not None:
                same = self._follows(self.names[node])
                return self.variable[owner], [one if same else B for one in self._storages(owner)]
            return None, [self._storage_of(self.names[node])]
        return self.variable[node], self._gives(value)

    def _owner(self, name: str) -> fx.Node | None:
        """The free parameter that decides how an input is stored; None if it is fixed."""
        one = self.graph.input_of.get(name)
        of = one.of if one is not None else name.rsplit(":", 1)[0]
        owner = self.graph.placeholders.get(of) if of in self.goal.free else None
        return owner if owner in self.variable else None

    def _follows(self, name: str) -> bool:
        """Whether an input (or a new gradient) is stored as its parameter: if it has its shape."""
        one = self.graph.input_of.get(name)
        if one is None:
            return True
        return one.of in self.graph.input_of and one.meta.shape == self.graph.input_of[one.of].meta.shape

    def _storages(self, node: fx.Node) -> list[Sbp]:
        name = self.names[node]
        if name in self.goal.free:
            return list(self.goal.free[name])
        one = self.graph.input_of[name]
        if one.of in self.goal.free and self._follows(name):
            return list(self.goal.free[one.of])
        return [self._storage_of(name)]

    def _storage_of(self, name: str) -> Sbp:
        if name in self.goal.stored:
            return self.goal.stored[name]
        stem = name.rsplit(":", 1)[0]  # a gradient that the step leaves is stored as its parameter
        return self.goal.stored.get(stem, B) if name.endswith(":grad") else B

    def _stored(self, name: str, choices: Sequence[int]) -> Sbp:
        owner = self._owner(name)
        if owner is None:
            return self._storage_of(name)
        return self._storages(owner)[choices[self.variable[owner]]] if self._follows(name) else B

    # --- costs -------------------------------------------------------------------------------------

    def _work(self, node: fx.Node, signature: Signature) -> float:
        return work(node, self.device) * fraction(signature, self.goal.size)

    def _storage_cost(self, node: fx.Node, layout: Sbp) -> float:
        """A replica is kept and updated whole on every rank."""
        share = 1.0 / self.goal.size if isinstance(layout, Split) else 1.0
        return 8.0 * self.graph.input_of[self.names[node]].meta.num_bytes * share / self.device.memory

    def _price(self, value: Value, source: Sbp, target: Sbp) -> float:
        meta = self.metas[value]
        if source == target or meta is None:
            return 0.0
        if isinstance(source, Split) and isinstance(target, Partial):
            return _NEVER  # full-size zeros instead of a shard
        price = axis_price(source, target, meta, self.goal.size, self.device.link)
        return price * _KEEP if isinstance(source, Split) and self.goal.keep_splits else price

    # --- options -----------------------------------------------------------------------------------

    def _options(self, node: fx.Node) -> list[Signature]:
        call = self._localized(node)
        for index, meta in enumerate(call.outputs):
            self.metas[node, index] = meta
        found = {replicated(call): None}
        rule = self.rules.get(node.target)  # type: ignore[arg-type]
        if rule is None:
            self.unruled.append(node)
        else:
            forms = [self._offered(value) for value in self.sources[node]]
            for one in rule.signatures(call, self.goal.size, forms):
                if self._is_sensible(node, one) and self._is_allowed(node, call, one):
                    found.setdefault(one, None)
        for index in range(len(call.outputs)):
            self.forms[node, index] = {
                one.outputs[index] for one in found if isinstance(one.outputs[index], Split)
            }  # type: ignore[assignment]
        return list(found)

    def _offered(self, value: Value) -> list[Split]:
        """The splits of a tensor that its users consider: for every dim the simplest few."""
        count: dict[int, int] = {}
        offered = []
        for one in sorted(self.forms[value], key=lambda s: (s.blocks * s.unit, s)):
            count[one.dim] = count.get(one.dim, 0) + 1
            if count[one.dim] <= _MAX_FORMS:
                offered.append(one)
        return offered

    def _is_sensible(self, node: fx.Node, signature: Signature) -> bool:
        """Drops signatures in which only a partial is at work and nothing gives one (replicas may be kept as one)."""
        layouts = list(zip(self.sources[node], signature.inputs, strict=True))
        if any(isinstance(one, Split) for _, one in layouts):
            return True
        partials = [(value, one) for value, one in layouts if isinstance(one, Partial)]
        return not partials or any(one in self._gives(value) for value, one in partials)

    def _is_allowed(self, node: fx.Node, call: OpCall, signature: Signature) -> bool:
        """Splits must fit; on a dim that an outer axis splits, both splits must be even."""
        sides = ((call.inputs, signature.inputs, False), (call.outputs, signature.outputs, True))
        for metas, layouts, is_output in sides:
            for index, (meta, one) in enumerate(zip(metas, layouts, strict=True)):
                if meta is None or not isinstance(one, Split):
                    continue
                if not fits(meta.shape[one.dim], one, self.goal.size):
                    return False
                nested = self._split_outside(node, index, is_output)
                even = _is_even(meta.shape[one.dim], one, self.goal.size)
                if one.dim in nested and not (nested[one.dim] and even):
                    return False
        return True

    # --- what outer axes leave ---------------------------------------------------------------------

    def _localized(self, node: fx.Node) -> OpCall:
        """The call with every tensor as the outer axes cut it."""
        call = op_call(node)
        if not self.outer:
            return call
        metas = iter([self._localized_meta(node, i, outputs=False) for i in range(len(call.inputs))])
        args, kwargs = _map_metas((call.args, dict(call.kwargs)), metas)
        outputs = tuple(
            None if meta is None else self._localized_meta(node, i, outputs=True)
            for i, meta in enumerate(call.outputs)
        )
        return OpCall(call.op, args, kwargs, outputs)

    def _localized_meta(self, node: fx.Node, index: int, *, outputs: bool) -> TensorMeta | None:
        meta = metas_of(node)[index] if outputs else metas_of(tensor_args(node)[index])[0]
        if meta is None:
            return None
        shape = list(meta.shape)
        for size, one in self._outside(node, index, outputs):
            if isinstance(one, Split) and _is_even(shape[one.dim], one, size):
                shape[one.dim] //= size
        return replace(meta, shape=tuple(shape))

    def _split_outside(self, node: fx.Node, index: int, outputs: bool) -> dict[int, bool]:
        """Dims that an outer axis splits, and whether evenly."""
        if not self.outer:
            return {}
        meta = metas_of(node)[index] if outputs else metas_of(tensor_args(node)[index])[0]
        assert meta is not None
        shape, found = list(meta.shape), {}
        for size, one in self._outside(node, index, outputs):
            if isinstance(one, Split):
                found[one.dim] = found.get(one.dim, True) and _is_even(shape[one.dim], one, size)
                if found[one.dim]:
                    shape[one.dim] //= size
        return found

    def _outside(self, node: fx.Node, index: int, outputs: bool) -> list[tuple[int, Sbp]]:
        found = []
        for size, plan in self.outer:
            if node.op == "placeholder":
                found.append((size, plan.stored[self.names[node]]))
            else:
                signature = plan.signatures[node]
                found.append((size, (signature.outputs if outputs else signature.inputs)[index]))
        return found

    # --- the answer --------------------------------------------------------------------------------

    def _result(
        self, chosen: dict[fx.Node, Signature], stored: dict[str, Sbp], choices: Sequence[int], exact: bool
    ) -> AxisPlan:
        def given(value: Value) -> Sbp:
            node, index = value
            return stored[self.names[node]] if node.op == "placeholder" else chosen[node].outputs[index]

        outputs: dict[str, Sbp] = {}
        for one, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if one.replaces in stored:
                outputs[one.name] = stored[one.replaces]
            elif one.replaces:
                outputs[one.name] = stored.get(one.replaces.rsplit(":", 1)[0], B)
            else:
                comes = given(source_of(node))
                outputs[one.name] = self.goal.outputs.get(
                    one.name, B if isinstance(comes, Partial) else comes
                )
        gathered = [
            node
            for node in self.nodes
            for value, wanted in zip(self.sources[node], chosen[node].inputs, strict=True)
            if isinstance(given(value), Split) and isinstance(wanted, Broadcast)
        ]
        index = lambda v: choices[v]  # noqa: E731
        cost = sum(float(table[tuple(map(index, variables))]) for variables, table in self.factors)
        return AxisPlan(
            chosen, stored, outputs, tuple(self.unruled), cost, exact, tuple(dict.fromkeys(gathered))
        )


def _is_even(size: int, split: Split, axis_size: int) -> bool:
    return size % (split.blocks * split.unit * axis_size) == 0


def _map_metas(tree: object, metas: Iterable) -> object:
    if isinstance(tree, TensorMeta):
        return next(metas)  # type: ignore[call-overload]
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_metas(one, metas) for one in tree)
    if isinstance(tree, dict):
        return {key: _map_metas(one, metas) for key, one in tree.items()}
    return tree
