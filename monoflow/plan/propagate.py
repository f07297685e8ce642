"""Propagation: along one axis, fill in every node's signature at least cost around what is fixed.

A greedy pass in topological order, then sweeps in which every node reconsiders its choice given its
neighbours', until none changes. What is fixed (pins, a template's storage of parameters, the batch) drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..boxing.route import axis_price
from ..graph.step_graph import Phase, Role, StepGraph, info_of, is_getitem, metas_of, op_call, source_of, tensor_args
from ..sbp.layout import B, Partial, Sbp, Split, fits
from ..sbp.registry import OpRule, replicated
from ..sbp.signature import OpCall, Signature, TensorMeta
from .cost import DeviceCost, fraction, work

aten = torch.ops.aten

#: ops that only prepare a parameter for the op that uses it
PREPARES = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten._to_copy.default, aten.view.default,
    aten.unsqueeze.default, aten.clone.default, aten.mul.Scalar,
}  # fmt: skip

#: One tensor of the graph: the node that computes it and which of its outputs it is.
Value = tuple[fx.Node, int]

_MAX_SWEEPS = 12
_MAX_FORMS = 3


@dataclass(frozen=True)
class AxisGoal:
    """What is asked of one axis.

    Attributes:
        size: how many ranks it has.
        stored: how inputs are stored, by name. Inputs that are not named are B.
        used: how parameters are used in forward and backward, where that is not as they are stored: they are
            moved there once per phase, and no other layout of them is considered.
        free: parameters whose storage the first op that uses them chooses; by name, the layouts to choose from.
        outputs: how outputs must be handed out, by name. An output that replaces an input is as stored.
    """

    size: int
    stored: Mapping[str, Sbp]
    used: Mapping[str, Sbp] = field(default_factory=dict)
    free: Mapping[str, Sequence[Sbp]] = field(default_factory=dict)
    outputs: Mapping[str, Sbp] = field(default_factory=dict)


@dataclass(frozen=True)
class AxisPlan:
    """What propagation found for one axis."""

    signatures: dict[fx.Node, Signature]
    stored: dict[str, Sbp]
    outputs: dict[str, Sbp]
    unruled: tuple[fx.Node, ...]
    cost: float
    gathered: tuple[fx.Node, ...]  # nodes that take an input whole which arrives split


class AxisPropagation:
    """The propagation along one axis, given the signatures of the axes before it."""

    def __init__(
        self,
        graph: StepGraph,
        goal: AxisGoal,
        rules: Mapping[Callable, OpRule],
        device: DeviceCost,
        before: Sequence[tuple[int, AxisPlan]] = (),
    ) -> None:
        self.graph, self.goal, self.rules, self.device = graph, goal, rules, device
        self.before = tuple(before)
        self.names = {node: name for name, node in graph.placeholders.items()}
        self.params = {node for node, name in self.names.items() if graph.input_of[name].role is Role.PARAM}
        self.nodes = [node for node in graph.calls() if not is_getitem(node)]
        self.sources: dict[fx.Node, list[Value]] = {n: [source_of(a) for a in tensor_args(n)] for n in self.nodes}
        self.uses: dict[Value, list[tuple[fx.Node, int]]] = {}
        for node in self.nodes:
            for position, value in enumerate(self.sources[node]):
                self.uses.setdefault(value, []).append((node, position))
        self.options: dict[fx.Node, list[Signature]] = {}
        self.chosen: dict[fx.Node, Signature] = {}
        self.stored: dict[str, Sbp] = {name: goal.stored.get(name, B) for name in graph.input_of}
        self.settled: set[str] = set(graph.input_of) - set(goal.free)
        self.unruled: list[fx.Node] = []
        self.metas: dict[Value, TensorMeta | None] = {}
        self.forms: dict[Value, set[Split]] = {}
        self.work = {node: work(node, device) for node in self.nodes}
        self.demands: dict[Value, list[str]] = {}
        for one, node in zip(graph.outputs, graph.results, strict=True):
            self.demands.setdefault(source_of(node), []).append(one.name)
        self.replaces = {one.name: one.replaces for one in graph.outputs}
        self.price_memo: dict[tuple, float] = {}
        self.deferred: dict[Value, str] = {(n, 0): name for n, name in self.names.items() if name in goal.free}
        self.is_greedy = True
        self.shared = [value for value, users in self.uses.items() if len({user for user, _ in users}) > 1]

    # --- the search --------------------------------------------------------------------------------

    def solve(self) -> AxisPlan:
        """Greedy, then sweeps until nothing changes."""
        for node in self.graph.placeholders.values():
            value = (node, 0)
            self.metas[value] = self._localized_meta(node, 0, outputs=True)
            self.forms[value] = self._input_forms(node)
        for node in self.nodes:
            self.options[node] = self._options(node)
            if self._is_deferred(node):
                self.deferred[node, 0] = self.deferred[self.sources[node][0]]
                continue
            self._choose(node)
        for node in self.nodes:  # what only prepares a parameter that nothing uses
            if node not in self.chosen:
                self.settled.add(self.deferred[node, 0])
                self._choose(node)
        self.is_greedy = False
        order = self.nodes
        for _ in range(_MAX_SWEEPS):
            order = list(reversed(order))
            changed = [self._reconsider(node) for node in order]
            changed += [self._reconsider_users(value) for value in self.shared]
            if not any(changed):
                break
        return self._result()

    def _reconsider(self, node: fx.Node) -> bool:
        if len(self.options[node]) == 1:
            return False
        now = self.chosen[node]
        best = min(self.options[node], key=lambda one: (self._cost(node, one), one is not now))
        if best is now or self._cost(node, best) >= self._cost(node, now) * (1 - 1e-9):
            return False
        self.chosen[node] = best
        return True

    def _reconsider_users(self, value: Value) -> bool:
        """All users of a tensor together: one move may serve them all where none would change alone."""
        users = list(dict.fromkeys(user for user, _ in self.uses[value]))
        before = {user: self.chosen[user] for user in users}
        best, best_cost = before, self._joint_cost(users) * (1 - 1e-9)
        layouts = {self._given(value), B} | self.forms.get(value, set())
        layouts |= {one.inputs[at] for user, at in self.uses[value] for one in self.options[user]}
        for layout in sorted(layouts, key=str):
            for user in users:
                positions = [at for one, at in self.uses[value] if one is user]
                fitting = [one for one in self.options[user] if all(one.inputs[at] == layout for at in positions)]
                if fitting:
                    self.chosen[user] = min(fitting, key=lambda one, user=user: self._cost(user, one))
            cost = self._joint_cost(users)
            if cost < best_cost:
                best, best_cost = {user: self.chosen[user] for user in users}, cost
            self.chosen |= before
        self.chosen |= best
        return best is not before

    def _moves(self, value: Value) -> float:
        """The cost of bringing a tensor into every layout that is asked for."""
        given = self._given(value)
        return sum(self._move_price(value, given, wanted) for wanted in self._wanted_of(value))

    def _joint_cost(self, users: Sequence[fx.Node]) -> float:
        """The cost of some nodes and of every move on what they read and give, each move once."""
        total = 0.0
        touched = dict.fromkeys(value for user in users for value in self.sources[user])
        touched |= dict.fromkeys((user, i) for user in users for i in range(len(self.chosen[user].outputs)))
        for user in users:
            total += self.work[user] * fraction(self.chosen[user], self.goal.size)
        return total + sum(self._moves(value) for value in touched)

    # --- free parameters ---------------------------------------------------------------------------

    def _is_deferred(self, node: fx.Node) -> bool:
        """Whether the node only reshapes or casts a parameter whose storage is not chosen yet."""
        sources = self.sources[node]
        if len(sources) != 1 or len(metas_of(node)) != 1 or info_of(node).phase is Phase.UPDATE:
            return False
        name = self.deferred.get(sources[0])
        return name is not None and name not in self.settled and node.target in PREPARES

    def _choose(self, node: fx.Node) -> None:
        """The greedy choice of one node; it settles the free parameters that the node takes."""
        pending = {
            position: value
            for position, value in enumerate(self.sources[node])
            if value in self.deferred and self.deferred[value] not in self.settled
        }
        best, best_key = self.options[node][0], (float("inf"), 0)
        for one in self.options[node]:
            storage = self._storage(pending, one)
            if storage is None:
                continue
            cost = self._cost(node, one) + sum(self._storage_cost(*item) for item in storage.items())
            key = (cost, -self._reach(node, one) if pending else 0)
            if key < best_key:
                best, best_key = one, key
        storage = self._storage(pending, best)
        for name, layout in (storage or {}).items():
            self._store(name, layout)
        for position, value in pending.items():
            self._fix_chain(value, best.inputs[position])
        self.chosen[node] = best

    def _storage(self, pending: Mapping[int, Value], signature: Signature) -> dict[str, Sbp] | None:
        """How the pending parameters must be stored for a signature; None if one may not be."""
        found: dict[str, Sbp] = {}
        for position, value in pending.items():
            layout = self._chain_layout(value, signature.inputs[position])
            name = self.deferred[value]
            if layout is None or layout not in self.goal.free[name] or found.get(name, layout) != layout:
                return None
            found[name] = layout
        return found

    def _chain_layout(self, value: Value, wanted: Sbp) -> Sbp | None:
        """The storage of a parameter that gives `wanted` after the ops that prepare it."""
        if isinstance(wanted, Partial):
            wanted = B  # kept from a replica
        while value[0].op != "placeholder":
            match = [one for one in self.options[value[0]] if one.outputs[0] == wanted]
            if not match:
                return None
            wanted, value = match[0].inputs[0], self.sources[value[0]][0]
        return wanted

    def _fix_chain(self, value: Value, wanted: Sbp) -> None:
        if isinstance(wanted, Partial):
            wanted = B
        while value[0].op != "placeholder":
            if value[0] not in self.chosen:
                match = [one for one in self.options[value[0]] if one.outputs[0] == wanted]
                self.chosen[value[0]] = match[0] if match else self.options[value[0]][0]
            wanted, value = self.chosen[value[0]].inputs[0], self.sources[value[0]][0]

    def _storage_cost(self, name: str, layout: Sbp) -> float:
        """What an update has to touch: a replica is updated whole on every rank."""
        share = 1.0 / self.goal.size if isinstance(layout, Split) else 1.0
        return 8.0 * self.graph.input_of[name].meta.num_bytes * share / self.device.memory

    def _store(self, name: str, layout: Sbp) -> None:
        self.settled.add(name)
        self.stored[name] = layout
        shape = self.graph.input_of[name].meta.shape
        for one in self.graph.inputs:
            if one.of == name and one.role in (Role.STATE, Role.GRAD):
                self.stored[one.name] = layout if one.meta.shape == shape else B
        for one in (name, *(o.name for o in self.graph.inputs if o.of == name)):
            node = self.graph.placeholders[one]
            self.forms[node, 0] = self._input_forms(node)

    def _reach(self, node: fx.Node, signature: Signature) -> int:
        """How many ops after this one can take its split on without a move: what tells S(1) from S(1, 3)."""
        count, frontier = 0, [((node, i), one) for i, one in enumerate(signature.outputs) if isinstance(one, Split)]
        while frontier and count < 24:
            value, layout = frontier.pop(0)
            for user, position in self.uses.get(value, ()):
                rule = self.rules.get(user.target)  # type: ignore[arg-type]
                if rule is None or len(self.sources[user]) != 1 or user in self.chosen:
                    continue
                found = [
                    one
                    for one in rule.signatures(self._localized(user), self.goal.size, [[layout]])  # type: ignore[list-item]
                    if one.inputs[position] == layout and any(isinstance(out, Split) for out in one.outputs)
                ]
                if found:
                    count += 1
                    frontier += [((user, i), one) for i, one in enumerate(found[0].outputs) if isinstance(one, Split)]
        return count

    # --- cost --------------------------------------------------------------------------------------

    def _cost(self, node: fx.Node, signature: Signature) -> float:
        """The cost of a node's own work and of every move on its inputs and outputs."""
        total = self.work[node] * fraction(signature, self.goal.size)
        for value, wanted in dict.fromkeys(zip(self.sources[node], signature.inputs, strict=True)):
            total += self._input_price(node, value, wanted)
        # Greedy looks no step ahead: a split that begins here would have to be gathered again later.
        begins_split = self.is_greedy and not self._arrives_split(node, signature)
        for index, given in enumerate(signature.outputs):
            for wanted in self._wanted_of((node, index)):
                total += self._price((node, index), given, wanted)
            if begins_split and isinstance(given, Split):
                total += self._price((node, index), given, B)
        return total

    def _arrives_split(self, node: fx.Node, signature: Signature) -> bool:
        """Whether an input is split already as the signature takes it."""
        for value, wanted in zip(self.sources[node], signature.inputs, strict=True):
            pending = value in self.deferred and self.deferred[value] not in self.settled
            if isinstance(wanted, Split) and (pending or self._given(value) == wanted):
                return True
        return False

    def _input_price(self, node: fx.Node, value: Value, wanted: Sbp) -> float:
        if value in self.deferred and self.deferred[value] not in self.settled:
            return 0.0  # its storage is chosen with this node
        if self._is_template_use(node, value):
            return self._use_price(value, wanted)
        for other, where in self.uses[value]:
            if other is not node and other in self.chosen and self.chosen[other].inputs[where] == wanted:
                return 0.0  # that move is made anyway
        given = self._given(value)
        price = self._price(value, given, wanted)
        if self.is_greedy and isinstance(wanted, Partial) and isinstance(given, Split):
            price += self._price(value, wanted, B)
        return price

    def _is_template_use(self, node: fx.Node, value: Value) -> bool:
        return value[0] in self.params and info_of(node).phase is not Phase.UPDATE

    def _use_price(self, value: Value, wanted: Sbp) -> float:
        """A parameter is used as the template says; another use stays possible, but is priced dearly."""
        name = self.names[value[0]]
        used = self.goal.used.get(name, self.stored[name])
        if wanted == used:
            return 0.0
        free = used == B and isinstance(wanted, (Split, Partial))
        return self._price(value, used, wanted) * 100 + (0.0 if free else 1e-3)

    def _move_price(self, value: Value, given: Sbp, wanted: Sbp) -> float:
        if value[0] not in self.params:
            return self._price(value, given, wanted)
        uses = [user for user, at in self.uses[value] if self.chosen[user].inputs[at] == wanted]
        if any(self._is_template_use(user, value) for user in uses):
            return self._use_price(value, wanted)
        return self._price(value, given, wanted)

    def _given(self, value: Value) -> Sbp:
        node, index = value
        if node.op == "placeholder":
            return self.stored[self.names[node]]
        return self.chosen[node].outputs[index]

    def _wanted_of(self, value: Value) -> set[Sbp]:
        """The distinct layouts in which a value is asked for, by chosen users and by outputs."""
        wanted = {self.chosen[user].inputs[at] for user, at in self.uses.get(value, ()) if user in self.chosen}
        for name in self.demands.get(value, ()):
            one = self._output_goal(name)
            if one is not None:
                wanted.add(one)
        return wanted

    def _output_goal(self, name: str) -> Sbp | None:
        replaced = self.replaces[name]
        if replaced:
            return self.stored.get(replaced, self.goal.stored.get(replaced, B))
        return self.goal.outputs.get(name)

    def _price(self, value: Value, source: Sbp, target: Sbp) -> float:
        if source == target:
            return 0.0
        meta = self.metas[value]
        key = (value, source, target)
        if key not in self.price_memo:
            price = 0.0 if meta is None else axis_price(source, target, meta, self.goal.size, self.device.link)
            self.price_memo[key] = price
        return self.price_memo[key]

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
                if self._is_allowed(node, call, one):
                    found.setdefault(one, None)
        for index in range(len(call.outputs)):
            splits = {one.outputs[index] for one in found if isinstance(one.outputs[index], Split)}
            self.forms[node, index] = splits  # type: ignore[assignment]
        return list(found)

    def _offered(self, value: Value) -> list[Split]:
        """The splits of a tensor that its users consider: the one it has, then a few others of every dim."""
        given = self._given(value) if value[0] in self.chosen or value[0].op == "placeholder" else B
        offered = [given] if isinstance(given, Split) else []
        count: dict[int, int] = {}
        for one in sorted(self.forms[value]):
            count[one.dim] = count.get(one.dim, 0) + 1
            if one != given and count[one.dim] <= _MAX_FORMS:
                offered.append(one)
        return offered

    def _is_allowed(self, node: fx.Node, call: OpCall, signature: Signature) -> bool:
        """Splits must fit; on a dim that an earlier axis splits, both splits must be even."""
        sides = ((call.inputs, signature.inputs, False), (call.outputs, signature.outputs, True))
        for metas, layouts, is_output in sides:
            for index, (meta, one) in enumerate(zip(metas, layouts, strict=True)):
                if meta is None or not isinstance(one, Split):
                    continue
                if not fits(meta.shape[one.dim], one, self.goal.size):
                    return False
                nested = self._split_before(node, index, is_output)
                if one.dim in nested and not (
                    nested[one.dim] and _is_even(meta.shape[one.dim], one, self.goal.size)
                ):
                    return False
        return True

    def _input_forms(self, node: fx.Node) -> set[Split]:
        name = self.names[node]
        forms = {self.stored[name], self.goal.used.get(name, B), *self.goal.free.get(name, ())}
        return {one for one in forms if isinstance(one, Split)}

    # --- what earlier axes leave -------------------------------------------------------------------

    def _localized(self, node: fx.Node) -> OpCall:
        """The call with every tensor as the axes before this one cut it."""
        call = op_call(node)
        if not self.before:
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
        for size, one in self._earlier(node, index, outputs):
            if isinstance(one, Split) and _is_even(shape[one.dim], one, size):
                shape[one.dim] //= size
        return replace(meta, shape=tuple(shape))

    def _split_before(self, node: fx.Node, index: int, outputs: bool) -> dict[int, bool]:
        """Dims that an earlier axis splits, and whether evenly."""
        if not self.before:
            return {}
        meta = metas_of(node)[index] if outputs else metas_of(tensor_args(node)[index])[0]
        assert meta is not None
        shape, found = list(meta.shape), {}
        for size, one in self._earlier(node, index, outputs):
            if isinstance(one, Split):
                found[one.dim] = found.get(one.dim, True) and _is_even(shape[one.dim], one, size)
                if found[one.dim]:
                    shape[one.dim] //= size
        return found

    def _earlier(self, node: fx.Node, index: int, outputs: bool) -> list[tuple[int, Sbp]]:
        found = []
        for size, plan in self.before:
            if node.op == "placeholder":
                found.append((size, plan.stored[self.names[node]]))
            else:
                signature = plan.signatures[node]
                found.append((size, (signature.outputs if outputs else signature.inputs)[index]))
        return found

    # --- the answer --------------------------------------------------------------------------------

    def _result(self) -> AxisPlan:
        outputs: dict[str, Sbp] = {}
        for one, node in zip(self.graph.outputs, self.graph.results, strict=True):
            goal = self._output_goal(one.name)
            given = self._given(source_of(node))
            outputs[one.name] = goal if goal is not None else B if isinstance(given, Partial) else given
        total, gathered = 0.0, []
        for node in self.nodes:
            signature = self.chosen[node]
            total += self.work[node] * fraction(signature, self.goal.size)
            for value, wanted in zip(self.sources[node], signature.inputs, strict=True):
                if isinstance(self._given(value), Split) and not isinstance(wanted, Split):
                    gathered.append(node)
            for index in range(len(signature.outputs)):
                total += self._moves((node, index))
        total += sum(self._moves((node, 0)) for node in self.graph.placeholders.values())
        return AxisPlan(
            dict(self.chosen), dict(self.stored), outputs, tuple(self.unruled), total, tuple(dict.fromkeys(gathered))
        )


def _is_even(size: int, split: Split, axis_size: int) -> bool:
    return size % (split.blocks * split.unit * axis_size) == 0


def _map_metas(tree: object, metas) -> object:  # noqa: ANN001
    if isinstance(tree, TensorMeta):
        return next(metas)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_metas(one, metas) for one in tree)
    if isinstance(tree, dict):
        return {key: _map_metas(one, metas) for key, one in tree.items()}
    return tree


