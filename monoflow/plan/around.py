"""What single other choices would cost around a plan: the tables of the search, with the plan's choices.

The tables are those of `problem.py`, over the graph without what is computed again, and know whatever the
plan chose, also where a search would not have offered it (a template's layouts, pins).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from ..graph.passes.recompute import AGAIN
from ..graph.rewrite import copied, finished
from ..graph.step_graph import StepGraph, is_getitem
from ..mesh import Placement
from ..sbp.layout import NdSbp
from ..sbp.registry import OpRule
from .cost import REFERENCE, Machine
from .fold import Folding, fold
from .labels import Label, Value
from .problem import Goal, Problem
from .storages import free_goal

if TYPE_CHECKING:
    from .plan import Plan

_IMPOSSIBLE = 1e3  # seconds: the tables' price for what has no way to go


class Around:
    """A plan's choices among all others.

    Attributes:
        whole: the plan.
        plan: its layouts over devices: along time there is nothing to choose.
        graph: the plan's graph in which nothing is computed again.
        folding: which nodes were decided together, as far as the plan treats them alike.
    """

    def __init__(self, plan: Plan, rules: Mapping[Callable, OpRule]) -> None:
        self.whole, plan = plan, plan.spatial
        self.plan = plan
        self.graph = once(plan.graph)
        self.folding = _alike(fold(self.graph), self.graph, plan)
        goal = free_goal(self.graph, plan.placement, {})
        storages = {
            name: list(dict.fromkeys([*free, plan.inputs[name]])) for name, free in goal.storages.items()
        }
        given = [one.name for one in self.graph.outputs if not one.replaces and not one.observed]
        self.problem = _Problem(
            self.graph,
            plan.placement,
            self.folding,
            Goal(storages, {name: plan.outputs[name] for name in given}),
            rules,
            plan.machine or REFERENCE,
            plan.signatures,
        )
        self._hubs = {hub.number for hub in self.problem.hubs}
        self._edges: dict[int, list[tuple[int, np.ndarray]]] = {}
        for (a, b), table in self.problem.pairs.items():
            self._edges.setdefault(a, []).append((b, table))
            self._edges.setdefault(b, []).append((a, table.T))
        self.chosen = {
            number: self.options(node).index(self._of_plan(node))
            for node, number in self.problem.variable.items()
        }

    def options(self, node: fx.Node) -> Sequence[Label | NdSbp]:
        """What a node may do: its labels, or the storages of an input."""
        first = self.folding.first[node]
        labels = self.problem.labels
        return labels.given((first, 0)) if first.op == "placeholder" else labels.of[first]

    def position(self, node: fx.Node) -> int:
        """The plan's choice among a node's options."""
        return self.chosen[self.problem.variable[self.folding.first[node]]]

    def work(self, node: fx.Node) -> np.ndarray:
        """Seconds of a node's own work under each of its options."""
        first = self.folding.first[node]
        if first.op == "placeholder":
            return np.zeros(len(self.options(first)))
        return self.problem.work[first] / len(self.folding.members[first])

    def prices(self, node: fx.Node) -> np.ndarray:
        """Seconds of all that depends on a node, under each of its options and all else as the plan has it.

        That is its work, and the moves of what it reads and makes to all their readers; where several read,
        a tensor goes to them by whatever way is then the best. The copies of a repeated layer choose alike:
        seconds are the mean of one. Infinite for what has no way to go.
        """
        first = self.folding.first[node]
        number = self.problem.variable[first]
        total = self.problem.unary[number].copy()
        for other, table in self._edges.get(number, ()):
            if other in self._hubs:
                total += (table + self._rest(other, number)).min(1)
            else:
                total += table[:, self.chosen[other]]
        return np.where(total < _IMPOSSIBLE, total / len(self.folding.members[first]), np.inf)

    def move_seconds(self, value: Value, source: NdSbp, target: NdSbp) -> float:
        """The price of one tensor's move."""
        return self.problem.move_seconds((self.folding.first[value[0]], value[1]), source, target)

    def _rest(self, hub: int, without: int) -> np.ndarray:
        """The price of each layout of a hub, but for one of the variables that it joins."""
        total = self.problem.unary[hub].copy()
        for other, table in self._edges[hub]:
            if other != without:
                total += table[:, self.chosen[other]]
        return total

    def _of_plan(self, node: fx.Node) -> Label | NdSbp:
        if node.op == "placeholder":
            return self.plan.inputs[self.problem.names[node]]
        return self.plan.signatures[node.name]


class _Problem(Problem):
    """A problem in which a plan's own choices are among those of every node."""

    def __init__(
        self,
        graph: StepGraph,
        placement: Placement,
        folding: Folding,
        goal: Goal,
        rules: Mapping[Callable, OpRule],
        machine: Machine,
        signatures: Mapping[str, Label],
    ) -> None:
        self._signatures = signatures
        super().__init__(graph, placement, folding, goal, rules, machine)

    def move_seconds(self, value: Value, source: NdSbp, target: NdSbp) -> float:
        """The price of one tensor's move."""
        return float(self._moves(value, [source], [target])[0, 0])

    def _build(self) -> None:
        for node in self.labels.nodes:
            label = self._signatures[node.name]
            if label not in self.labels.of[node]:
                self.labels.of[node].append(label)
                for index in range(len(label[0].outputs)):
                    self.labels.given((node, index)).append(tuple(axis.outputs[index] for axis in label))
        self._layouts = self._layouts_by_meta()
        super()._build()


def once(graph: StepGraph) -> StepGraph:
    """The graph before anything was computed again; what is computed for backward alone stays there."""
    if not any(AGAIN in node.meta for node in graph.calls()):
        return graph
    edited = copied(graph)
    names = {node.name: node for node in edited.nodes}
    for node in list(edited.nodes):
        original = names.get(node.meta.get(AGAIN, ""))
        if original is not None:
            node.replace_all_uses_with(original)
            edited.erase_node(node)
    return finished(graph, edited)


def _alike(folding: Folding, graph: StepGraph, plan: Plan) -> Folding:
    """The classes of nodes that a plan treats alike."""
    names = {node: name for name, node in graph.placeholders.items()}
    first: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for nodes in folding.members.values():
        groups: dict[tuple, list[fx.Node]] = {}
        for node in nodes:
            assert not is_getitem(node), node
            laid = plan.inputs[names[node]] if node in names else plan.signatures[node.name]
            groups.setdefault(laid, []).append(node)
        for group in groups.values():
            first.update(dict.fromkeys(group, group[0]))
            members[group[0]] = tuple(group)
    return Folding(first, members)
