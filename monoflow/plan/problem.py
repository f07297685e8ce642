"""The choices of a whole mesh as one sum of small tables, and what a choice means as a plan.

Variables are the labels of every class of nodes, the storage of every input, and for a tensor that several
ops read the layout in which it is brought to them (a hub). Costs are the work of every op on its shards and
the move on every edge; `holding.py` can price the bytes that are held at a moment as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..boxing.route import Move, copied_end
from ..boxing.table import PriceTable
from ..graph.step_graph import Phase, Role, StepGraph, info_of, is_getitem, source_of
from ..mesh import Placement
from ..sbp.layout import B, NdSbp, Partial, Split, local_shape
from ..sbp.registry import OpRule
from ..sbp.signature import TensorMeta
from .cost import Machine, op_seconds
from .fold import Folding
from .labels import Label, Labels, Value
from .messages import Tables

_COPY = torch.ops.aten.clone.default
_NEVER = 1e3  # seconds: what has no way to go
_HAIR = 1e-13  # seconds a position: among equals the first is taken, on every machine


@dataclass(frozen=True)
class Choice:
    """What was chosen for every class of nodes: a label, or the storage of an input."""

    labels: Mapping[fx.Node, Label]
    storages: Mapping[fx.Node, NdSbp]


@dataclass(frozen=True)
class Hub:
    """A value that is brought to several readers.

    Attributes:
        number: the variable, and by its choices the layouts in which the value may be brought.
        giver, given: the variable that decides how the value comes, and the layouts by its choices.
        phase: the only phase whose readers it serves; "" for all.
    """

    value: Value
    number: int
    layouts: tuple[NdSbp, ...]
    giver: int
    given: tuple[NdSbp, ...]
    phase: str


@dataclass(frozen=True)
class _Read:
    """A class of nodes that reads a value at some positions; `count` of its members do."""

    node: fx.Node
    positions: tuple[int, ...]
    count: float


@dataclass(frozen=True)
class Edge:
    """Where a class of nodes takes a value: from which variable, in which layouts, at which positions."""

    value: Value
    giver: int
    given: tuple[NdSbp, ...]
    node: fx.Node
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Goal:
    """What the choices are around.

    Attributes:
        storages: per input name, the layouts in which it may be stored.
        outputs: per output name, how it must be handed out.
    """

    storages: Mapping[str, Sequence[NdSbp]]
    outputs: Mapping[str, NdSbp] = field(default_factory=dict)


class Problem:
    """The tables of one step on one mesh."""

    def __init__(
        self,
        graph: StepGraph,
        placement: Placement,
        folding: Folding,
        goal: Goal,
        rules: Mapping[Callable, OpRule],
        machine: Machine,
    ) -> None:
        self.graph, self.placement, self.folding, self.goal = graph, placement, folding, goal
        self.machine = machine.on(placement.num_axes)
        self.mesh = placement.shape
        self.whole: NdSbp = (B,) * len(self.mesh)
        self.names = {node: name for name, node in graph.placeholders.items()}
        self.labels = Labels(graph, self.mesh, folding, goal.storages, rules)
        self.needed = needed_nodes(graph)
        self.stored_as = _storing_inputs(graph)
        self.work: dict[fx.Node, np.ndarray] = {}  # seconds of all of a class, by label
        self.variable: dict[fx.Node, int] = {}
        self.unary: list[np.ndarray] = []
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        self.beside: dict[tuple[int, int], np.ndarray] = {}  # of these, moves that compute may hide
        self.hubs: list[Hub] = []
        self.edges: list[Edge] = []
        self._layouts = self._layouts_by_meta()
        self._prices: dict[tuple[TensorMeta, bool], PriceTable] = {}
        self._seconds: dict[tuple, float] = {}
        self._build()

    def tables(self, hidden: float = 0.0) -> Tables:
        """The costs, in seconds.

        Args:
            hidden: the part that does not count of moves that `overlap.py` lets run beside compute: of
                parameters, and of what updates alone read.
        """
        pairs = self.pairs
        if hidden:
            pairs = {
                key: table - hidden * self.beside[key] if key in self.beside else table
                for key, table in pairs.items()
            }
        return Tables(tuple(self.unary), tuple((a, b, table) for (a, b), table in pairs.items()))

    # --- variables ---------------------------------------------------------------------------------

    def _build(self) -> None:
        for node in self.folding.members:
            if node.op == "placeholder":
                self.variable[node] = self._add(np.zeros(len(self.labels.given((node, 0)))))
            else:
                self.work[node] = self._work(node)
                self.variable[node] = self._add(self.work[node])
        readers, results = self._readers(), self._results()
        for value in dict.fromkeys([*readers, *results]):
            if self.labels.metas[value] is not None:
                self._connect(value, readers.get(value, []), results.get(value, []))

    def _weight(self, node: fx.Node) -> float:
        """How often a node runs in a step; what only observed outputs need hardly counts."""
        return 1.0 if node in self.needed else 1e-6

    def _add(self, costs: np.ndarray) -> int:
        self.unary.append(costs + _HAIR * np.arange(len(costs)))
        return len(self.unary) - 1

    def _work(self, node: fx.Node) -> np.ndarray:
        """Seconds that all members of a class take under each label."""
        count = sum(map(self._weight, self.folding.members[node]))
        values = self.labels.sources[node]
        metas = [self.labels.metas[value] for value in values]
        outputs = [self.labels.metas[node, i] for i in range(len(self.labels.of[node][0][0].outputs))]
        costs = []
        for label in self.labels.of[node]:
            cut_in = tuple(self._cut(meta, [a.inputs[i] for a in label]) for i, meta in enumerate(metas))
            cut_out = tuple(self._cut(meta, [a.outputs[i] for a in label]) for i, meta in enumerate(outputs))
            key = node.target, cut_in, cut_out, repr(node.args) if not cut_in else ""
            if key not in self._seconds:
                self._seconds[key] = op_seconds(
                    node.target, cut_in, cut_out, self.machine.device, node.args  # pyright: ignore
                )  # fmt: skip
            costs.append(count * self._seconds[key])
        return np.array(costs)

    def _cut(self, meta: TensorMeta | None, layout: Sequence) -> TensorMeta | None:
        """The largest shard."""
        if meta is None:
            return None
        return TensorMeta(local_shape(meta.shape, layout, self.mesh, (0,) * len(self.mesh)), meta.dtype)

    # --- edges -------------------------------------------------------------------------------------

    def _readers(self) -> dict[Value, list[_Read]]:
        """By value (of the first of its class): the classes that read it."""
        counts: dict[Value, dict[tuple[fx.Node, tuple[int, ...]], float]] = {}
        first = self.folding.first
        for node, sources in self.labels.sources.items():
            positions: dict[Value, list[int]] = {}
            for position, value in enumerate(sources):
                positions.setdefault(value, []).append(position)
            for (source, index), at in positions.items():
                own = counts.setdefault((first[source], index), {})
                key = first[node], tuple(at)
                own[key] = own.get(key, 0.0) + self._weight(node)
        return {
            value: [_Read(node, at, count) for (node, at), count in own.items()]
            for value, own in counts.items()
        }

    def _results(self) -> dict[Value, list[str]]:
        """By value (of the first of its class): the outputs that are computed by it or its like."""
        found: dict[Value, list[str]] = {}
        for one, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if not one.observed:
                source, index = source_of(node)
                found.setdefault((self.folding.first[source], index), []).append(one.name)
        return found

    def _connect(self, value: Value, reads: Sequence[_Read], results: Sequence[str]) -> None:
        """The cost of moving one tensor to where it is read."""
        count = sum(map(self._weight, self.folding.members[value[0]]))
        is_param = self._role(value[0]) is Role.PARAM
        groups: dict[str, list[_Read]] = {}
        for read in reads:
            groups.setdefault(_phase_of(read.node) if is_param else "", []).append(read)
        if not reads or (is_param and results):
            groups.setdefault(str(Phase.UPDATE) if is_param else "", [])
        for group, members in groups.items():
            own = results if not is_param or group == Phase.UPDATE or not reads else []
            giver, given = self.variable[value[0]], self.labels.given(value)
            hides = is_param or all(info_of(read.node).phase is Phase.UPDATE for read in members)
            if len(members) + len(own) > 1 and set(given) != {self.whole}:
                layouts = self._hub_layouts(value, members, given)
                hub = self._add(np.zeros(len(layouts)))
                self.hubs.append(Hub(value, hub, tuple(layouts), giver, tuple(given), group))
                self._pair(giver, hub, count * self._moves(value, given, layouts), hides)
                giver, given = hub, layouts
            for read in members:
                self.edges.append(Edge(value, giver, tuple(given), read.node, read.positions))
                cost = read.count * self._bring(value, given, read)
                self._pair(giver, self.variable[read.node], cost, hides)
            for name in own:
                self._hand_out(giver, given, value, name, hides)

    def _hub_layouts(self, value: Value, reads: Sequence[_Read], given: Sequence[NdSbp]) -> list[NdSbp]:
        wanted = [one for read in reads for at in read.positions for one in self.labels.wanted(read.node, at)]
        # Addends are not brought anywhere: what comes so may stay so.
        moved = [one for one in wanted if not any(isinstance(axis, Partial) for axis in one)]
        return list(dict.fromkeys([*given, self.whole, *moved]))

    def _bring(self, value: Value, given: Sequence[NdSbp], read: _Read) -> np.ndarray:
        """The price for a reader that takes a tensor at several positions, each layout once."""
        if len(read.positions) == 1:
            return self._moves(value, given, self.labels.wanted(read.node, read.positions[0]))
        columns = []
        for label in self.labels.of[read.node]:
            distinct = dict.fromkeys(tuple(axis.inputs[at] for axis in label) for at in read.positions)
            columns.append(self._moves(value, given, list(distinct)).sum(1))
        return np.stack(columns, 1)

    def _hand_out(self, giver: int, given: Sequence[NdSbp], value: Value, name: str, hides: bool) -> None:
        """What it costs to hand out an output, or to store it as the input that it replaces."""
        if name in self.stored_as:
            owner = self.folding.first[self.stored_as[name]]
            moves = self._moves(value, given, self.labels.given((owner, 0)))
            self._pair(giver, self.variable[owner], moves, hides)
        else:
            targets = [self._handed_out(name, one) for one in given]
            table = self._moves(value, given, targets)
            self.unary[giver] = self.unary[giver] + np.diagonal(table)

    def _handed_out(self, name: str, given: NdSbp) -> NdSbp:
        fixed = self.goal.outputs.get(name)
        return fixed or tuple(B if isinstance(one, Partial) else one for one in given)

    def _pair(self, a: int, b: int, table: np.ndarray, hides: bool = False) -> None:
        if hides and a != b:
            key, part = ((a, b), table) if a < b else ((b, a), table.T)
            part = np.where(part < _NEVER, part, 0.0)
            if part.any():
                self.beside[key] = self.beside[key] + part if key in self.beside else part
        table = np.minimum(table, _NEVER)
        if a == b:
            self.unary[a] = self.unary[a] + np.diagonal(table)
        elif table.any():
            key, table = ((a, b), table) if a < b else ((b, a), table.T)
            self.pairs[key] = self.pairs[key] + table if key in self.pairs else table

    def _role(self, node: fx.Node) -> Role | None:
        return self.graph.input_of[self.names[node]].role if node.op == "placeholder" else None

    # --- prices ------------------------------------------------------------------------------------

    def _layouts_by_meta(self) -> dict[TensorMeta, dict[NdSbp, None]]:
        """Every layout in which tensors of a shape may come or be wanted."""
        found: dict[TensorMeta, dict[NdSbp, None]] = {}
        for value, meta in self.labels.metas.items():
            if meta is not None and self.folding.first[value[0]] is value[0]:
                found.setdefault(meta, {}).update(dict.fromkeys(self.labels.given(value)))
        for node, sources in self.labels.sources.items():
            if self.folding.first[node] is node:
                for position, value in enumerate(sources):
                    meta = self.labels.metas[value]
                    if meta is not None:
                        found[meta].update(dict.fromkeys(self.labels.wanted(node, position)))
        for name, layout in self.goal.outputs.items():
            meta = next(one.meta for one in self.graph.outputs if one.name == name)
            found.setdefault(meta, {})[layout] = None
        return found

    def _moves(self, value: Value, sources: Sequence[NdSbp], targets: Sequence[NdSbp]) -> np.ndarray:
        """Seconds from each layout to each."""
        meta = self.labels.metas[value]
        assert meta is not None
        key = meta, _is_contiguous(value)
        if key not in self._prices:
            layouts = {**self._layouts[meta], self.whole: None}
            handed = {tuple(B if isinstance(a, Partial) else a for a in one): None for one in layouts}
            self._prices[key] = PriceTable(
                {**layouts, **handed}, meta, self.mesh, self.machine.links, partial(self._copying, *key)
            )
        return self._prices[key].between(sources, targets)

    def _copying(self, meta: TensorMeta, contiguous: bool, move: Move) -> float:
        """Seconds for copies: what is not contiguous when it is cut, and what a collective copies."""
        if move.kind == "slice":
            one = move.target[move.axis]
            assert isinstance(one, Split)
            end = None if contiguous and one.dim == 0 and one.blocks == 1 else 1
        else:
            end = copied_end(move) if self.machine.device.curves else None
        if end is None:
            return 0.0
        piece = self._cut(meta, move.target if end else move.source)
        return op_seconds(_COPY, (piece,), (piece,), self.machine.device)

    # --- what a choice means -----------------------------------------------------------------------

    def components(self) -> list[Sequence[tuple]]:
        """The choices of every variable as tuples over the axes: labels or layouts."""
        found: list[Sequence[tuple]] = [()] * len(self.unary)
        for node, number in self.variable.items():
            found[number] = self.labels.given((node, 0)) if node.op == "placeholder" else self.labels.of[node]
        for hub in self.hubs:
            found[hub.number] = hub.layouts
        return found

    def choice(self, choices: Sequence[int]) -> Choice:
        """The labels and storages behind numbers."""
        labels = {node: self.labels.of[node][choices[self.variable[node]]] for node in self.labels.nodes}
        storages = {
            node: self.labels.given((node, 0))[choices[self.variable[node]]]
            for node in self.folding.members
            if node.op == "placeholder"
        }
        return Choice(labels, storages)

    def spread(self, choice: Choice) -> tuple[dict[str, Label], dict[str, NdSbp], dict[str, NdSbp]]:
        """Signatures of every node, storage of every input and layout of every output, by name."""
        first = self.folding.first
        signatures = {
            node.name: choice.labels[first[node]] for node in self.graph.calls() if not is_getitem(node)
        }
        inputs = {name: choice.storages[first[node]] for name, node in self.graph.placeholders.items()}
        outputs = {}
        for one, node in zip(self.graph.outputs, self.graph.results, strict=True):
            source, index = source_of(node)
            if one.name in self.stored_as:
                outputs[one.name] = inputs[self.names[self.stored_as[one.name]]]
            else:
                given = (
                    choice.storages[first[source]]
                    if source.op == "placeholder"
                    else tuple(axis.outputs[index] for axis in choice.labels[first[source]])
                )
                outputs[one.name] = self._handed_out(one.name, given)
        return signatures, inputs, outputs


def _storing_inputs(graph: StepGraph) -> dict[str, fx.Node]:
    """By output, the input as which it is stored. A gradient that was not there lies as its parameter."""
    found = {}
    for one in graph.outputs:
        name = one.replaces if one.replaces in graph.placeholders else one.replaces.rpartition(":")[0]
        if one.replaces and name in graph.placeholders:
            found[one.name] = graph.placeholders[name]
    return found


def _is_contiguous(value: Value) -> bool:
    """Whether a tensor was contiguous as it was captured."""
    held = value[0].meta["val"]
    tensors = [one for one in pytree.tree_leaves(held) if isinstance(one, torch.Tensor)]
    return len(tensors) != 1 or tensors[0].is_contiguous()


def needed_nodes(graph: StepGraph) -> set[fx.Node]:
    """The nodes that a step runs when nobody observes its gradients."""
    pairs = zip(graph.outputs, graph.results, strict=True)
    stack = [node for one, node in pairs if not one.observed]
    needed: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _phase_of(node: fx.Node) -> str:
    return str(info_of(node).phase)
