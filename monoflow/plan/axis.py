"""One axis: the signature of every node at least total cost, around what is fixed.

Choices are the signature of every op, the storage of parameters that a template leaves free, and, for a
tensor that several ops read, the layout in which it is brought to them. Costs are the work of every op and
the move on every edge. `minimize` finds the best of all combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from ..boxing.route import axis_price
from ..graph.passes.prepare import PREPARES
from ..graph.step_graph import Phase, Role, StepGraph, info_of, source_of
from ..sbp.layout import B, Broadcast, Partial, Sbp, Split
from ..sbp.registry import OpRule
from ..sbp.signature import Signature, TensorMeta
from .cost import DeviceCost, fraction, work
from .eliminate import Factor, minimize
from .options import Options, Outer, Value

_KEEP = 1e3  # times its price: a move off a split that a template wants kept
_NEVER = 1e3  # seconds: what is not to be chosen if there is any other way
_HAIR = 1e-13  # seconds a position: among equals the first is taken, on every machine


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
        chose_storage: storage was a choice already, made before the axes were planned together.
    """

    size: int
    stored: Mapping[str, Sbp]
    used: Mapping[str, Sbp] = field(default_factory=dict)
    free: Mapping[str, Sequence[Sbp]] = field(default_factory=dict)
    outputs: Mapping[str, Sbp] = field(default_factory=dict)
    keep_splits: bool = True
    chose_storage: bool = False


@dataclass(frozen=True)
class AxisPlan:
    """What was found for one axis.

    Attributes:
        cost: seconds of work and moves, as the choices were priced.
        exact: whether no other choice costs less.
        gathered: nodes that take an input whole which arrives split.
        chose_storage: whether the storage of parameters was a choice.
        is_staged: whether its ranks are stages, at which ops run one after the other.
    """

    signatures: Mapping[fx.Node, Signature]
    stored: Mapping[str, Sbp]
    outputs: Mapping[str, Sbp]
    unruled: tuple[fx.Node, ...]
    cost: float
    exact: bool
    gathered: tuple[fx.Node, ...]
    chose_storage: bool
    is_staged: bool = False


class AxisProblem:
    """The choices along one axis, given what the axes outside it chose."""

    def __init__(
        self,
        graph: StepGraph,
        goal: AxisGoal,
        rules: Mapping[Callable, OpRule],
        device: DeviceCost,
        outer: Sequence[tuple[int, AxisPlan]] = (),
    ) -> None:
        self.graph, self.goal, self.device = graph, goal, device
        self.storages = {name: self._storages(name) for name in graph.input_of}
        around = [Outer(size, plan.stored, plan.signatures) for size, plan in outer]
        self.options = Options(graph, goal.size, self.storages, rules, around)
        self.names = self.options.names
        self.uses: dict[Value, dict[fx.Node, list[int]]] = {}
        for node in self.options.nodes:
            for position, value in enumerate(self.options.sources[node]):
                self.uses.setdefault(value, {}).setdefault(node, []).append(position)
        self.results: dict[Value, list[str]] = {}
        for one, node in zip(graph.outputs, graph.results, strict=True):
            if not one.observed:
                self.results.setdefault(source_of(node), []).append(one.name)
        self.replaced = {one.name: one.replaces for one in graph.outputs}
        self.as_used = self._params_as_used()
        self.variable: dict[fx.Node, int] = {}
        self.sizes: list[int] = []
        self.factors: list[Factor] = []
        self._prices: dict[tuple, float] = {}
        self._tables: dict[tuple, np.ndarray] = {}

    def solve(self) -> AxisPlan:
        """The best choice, and what follows from it."""
        for name, node in self.graph.placeholders.items():
            if name in self.goal.free:
                costs = [self._storage_cost(name, one) for one in self.storages[name]]
                self.variable[node] = self._add_variable(costs)
        for node in self.options.nodes:
            whole = work(node, self.device)
            costs = [whole * fraction(one, self.goal.size) for one in self.options.of[node]]
            self.variable[node] = self._add_variable(costs)
        for value, meta in self.options.metas.items():
            if meta is not None:
                self._connect(value)
        found = minimize(self.sizes, self.factors)
        return self._plan(found.choices, found.exact)

    # --- how inputs may be stored ------------------------------------------------------------------

    def _storages(self, name: str) -> list[Sbp]:
        """The layouts in which an input may be stored: the choices of the parameter that decides, or one."""
        owner = self._owner(name)
        if owner is None:
            stem = name.rsplit(":", 1)[0]  # a gradient that the step leaves is stored as its parameter
            otherwise = self.goal.stored.get(stem, B) if name not in self.graph.input_of else B
            return [self.goal.stored.get(name, otherwise)]
        follows = self._shape(name) == self._shape(owner)
        return [one if follows else B for one in self.goal.free[owner]]

    def _owner(self, name: str) -> str | None:
        """The free parameter that decides how an input is stored; None if it is fixed."""
        one = self.graph.input_of.get(name)
        of = one.of if one is not None else name.rsplit(":", 1)[0]
        return of if of in self.goal.free else None

    def _shape(self, name: str) -> tuple[int, ...]:
        one = self.graph.input_of.get(name)
        return (one if one is not None else self.graph.input_of[name.rsplit(":", 1)[0]]).meta.shape

    def _params_as_used(self) -> set[Value]:
        """Parameters, and what the ops that only prepare them make of them, in forward and backward."""
        params = {node for node, name in self.names.items() if self.graph.input_of[name].role is Role.PARAM}
        found: set[Value] = {(node, 0) for node in params}
        for node in self.options.nodes:
            sources = self.options.sources[node]
            if node.target in PREPARES and sources[0] in found and info_of(node).phase is not Phase.UPDATE:
                found.add((node, 0))
        return found

    # --- factors -----------------------------------------------------------------------------------

    def _add_variable(self, costs: Sequence[float]) -> int:
        number = len(self.sizes)
        self.sizes.append(len(costs))
        self.factors.append(((number,), np.array(costs) + _HAIR * np.arange(len(costs))))
        return number

    def _add_factor(
        self, first: int | None, second: int | None, table: np.ndarray | Sequence[Sequence[float]]
    ) -> None:
        """A cost for every pair of choices; a side without a variable has one choice."""
        array = np.array(table, dtype=float)
        variables = tuple(one for one in (first, second) if one is not None)
        if variables and array.any():
            kept = array.reshape([self.sizes[one] for one in variables])
            self.factors.append((variables, kept))

    def _connect(self, value: Value) -> None:
        """The cost of moving one tensor to where it is read."""
        users, results = self.uses.get(value, {}), self.results.get(value, [])
        giver, given = self._giver(value)
        if value in self.as_used:
            for user in users:
                if info_of(user).phase is Phase.UPDATE:
                    self._read_factor(giver, given, value, user)
                else:
                    self._use_factor(giver, given, value, user)
            return
        if len(users) + len(results) > 1 and set(given) != {B}:
            giver, given = self._hub(value)
        for user in users:
            self._read_factor(giver, given, value, user)
        for name in results:
            self._result_factor(giver, given, value, name)

    def _giver(self, value: Value) -> tuple[int | None, list[Sbp]]:
        """The variable that decides how a tensor comes (None if fixed), and the layouts by its choices."""
        node, _ = value
        if node.op != "placeholder":
            return self.variable[node], self.options.given(value)
        owner = self._owner(self.names[node])
        number = self.variable[self.graph.placeholders[owner]] if owner is not None else None
        return number, self.storages[self.names[node]]

    def _hub(self, value: Value) -> tuple[int, list[Sbp]]:
        """The layout in which a tensor with several readers is brought to them: a choice of its own."""
        giver, given = self._giver(value)
        layouts: dict[Sbp, None] = dict.fromkeys([*given, B])
        for user, positions in self.uses.get(value, {}).items():
            for one in self.options.of[user]:
                layouts |= dict.fromkeys(
                    one.inputs[at] for at in positions if isinstance(one.inputs[at], Split)
                )
        hub = self._add_variable([0.0] * len(layouts))
        self._add_factor(giver, hub, self._table(value, given, [(one,) for one in layouts]))
        return hub, list(layouts)

    def _read_factor(self, giver: int | None, given: Sequence[Sbp], value: Value, user: fx.Node) -> None:
        positions = self.uses[value][user]
        wanted = [tuple({one.inputs[at]: None for at in positions}) for one in self.options.of[user]]
        self._add_factor(giver, self.variable[user], self._table(value, given, wanted))

    def _use_factor(self, giver: int | None, given: Sequence[Sbp], value: Value, user: fx.Node) -> None:
        """A parameter is used as the template says; another use is possible, but not chosen without need."""
        positions = self.uses[value][user]
        used = self.goal.used.get(self.names.get(value[0], ""))

        def price(a: Sbp, one: Signature) -> float:
            source = used if used is not None else a
            return sum(
                0.0 if source in (B, one.inputs[at]) else _NEVER + self._price(value, source, one.inputs[at])
                for at in positions
            )

        table = [[price(a, one) for one in self.options.of[user]] for a in given]
        self._add_factor(giver, self.variable[user], table)

    def _result_factor(self, giver: int | None, given: Sequence[Sbp], value: Value, name: str) -> None:
        """What it costs to hand out an output, or to store it as the input that it replaces."""
        replaced = self.replaced[name]
        if replaced:
            owner = self._owner(replaced)
            number = self.variable[self.graph.placeholders[owner]] if owner is not None else None
            targets = self._storages(replaced)
            self._add_factor(giver, number, self._table(value, given, [(one,) for one in targets]))
        else:
            self._add_factor(giver, None, [[self._price(value, a, self._handed_out(name, a))] for a in given])

    def _handed_out(self, name: str, given: Sbp) -> Sbp:
        return self.goal.outputs.get(name, B if isinstance(given, Partial) else given)

    # --- prices ------------------------------------------------------------------------------------

    def _storage_cost(self, name: str, layout: Sbp) -> float:
        """A replica is kept and updated whole on every rank."""
        share = 1.0 / self.goal.size if isinstance(layout, Split) else 1.0
        return 8.0 * self.graph.input_of[name].meta.num_bytes * share / self.device.memory

    def _table(self, value: Value, given: Sequence[Sbp], wanted: Sequence[tuple[Sbp, ...]]) -> np.ndarray:
        """The price of bringing a tensor from each layout into each set of layouts. Layers share tables."""
        key = (self.options.metas[value], tuple(given), tuple(wanted))
        if key not in self._tables:
            self._tables[key] = np.array(
                [[sum(self._price(value, a, b) for b in layouts) for layouts in wanted] for a in given]
            )
        return self._tables[key]

    def _price(self, value: Value, source: Sbp, target: Sbp) -> float:
        meta = self.options.metas[value]
        key = (meta, source, target)
        if key not in self._prices:
            self._prices[key] = 0.0 if meta is None else self._move_price(meta, source, target)
        return self._prices[key]

    def _move_price(self, meta: TensorMeta, source: Sbp, target: Sbp) -> float:
        if source == target:
            return 0.0
        if isinstance(source, Split) and isinstance(target, Partial):
            return _NEVER  # full-size zeros instead of a shard
        price = axis_price(source, target, meta, self.goal.size, self.device.link)
        return price * _KEEP if isinstance(source, Split) and self.goal.keep_splits else price

    # --- the answer --------------------------------------------------------------------------------

    def _plan(self, choices: Sequence[int], exact: bool) -> AxisPlan:
        signatures = {
            node: self.options.of[node][choices[self.variable[node]]] for node in self.options.nodes
        }
        stored = {name: self._stored(name, choices) for name in self.graph.input_of}

        def given(value: Value) -> Sbp:
            node, index = value
            return stored[self.names[node]] if node.op == "placeholder" else signatures[node].outputs[index]

        outputs: dict[str, Sbp] = {}
        for one, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if one.replaces:
                outputs[one.name] = self._stored(one.replaces, choices)
            else:
                outputs[one.name] = self._handed_out(one.name, given(source_of(node)))
        gathered = {
            node: None
            for node, signature in signatures.items()
            for value, wanted in zip(self.options.sources[node], signature.inputs, strict=True)
            if isinstance(given(value), Split) and isinstance(wanted, Broadcast)
        }
        cost = sum(
            float(table[tuple(choices[one] for one in variables)]) for variables, table in self.factors
        )
        chose = bool(self.goal.free) or self.goal.chose_storage
        return AxisPlan(
            signatures, stored, outputs, tuple(self.options.unruled), cost, exact, tuple(gathered), chose
        )

    def _stored(self, name: str, choices: Sequence[int]) -> Sbp:
        owner = self._owner(name)
        position = choices[self.variable[self.graph.placeholders[owner]]] if owner is not None else 0
        return self._storages(name)[position]
