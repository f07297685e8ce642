"""The schedule: the plan as one list of ops and moves, the same for every rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..boxing.route import LOCAL_KINDS, LinkCost, Route
from ..graph.step_graph import Phase, Role, is_getitem, source_of
from ..sbp.layout import B, Broadcast, NdSbp, Partial, Split
from .balance import pulled
from .by_stage import by_stage
from .facts import Facts, facts_of
from .gate import behind_gate
from .in_time import in_time, prepared
from .items import Box, LaidOut, Op, Schedule
from .order import ordered
from .overlap import overlapped
from .paths import Paths
from .plan import Plan

__all__ = ["Box", "LaidOut", "Op", "Schedule", "schedule"]


def schedule(plan: Plan, observe: bool = False, facts: Facts | None = None) -> Schedule:
    """Orders a plan; moves come right before what first needs them, reductions right after what they reduce.

    Args:
        observe: also compute the observed outputs (gradients as the optimizer sees them).
        facts: of the plan's graph, if they are known.

    Raises:
        PlanError: micro-batches are to be pulled, and ranks depend on each other within one.
    """
    maker = _Maker(plan, facts or facts_of(plan.graph))
    wanted = [one for one in plan.graph.outputs if observe or not one.observed]
    results = {one.name: node for one, node in zip(plan.graph.outputs, plan.graph.results, strict=True)}
    needed = _needed([results[one.name] for one in wanted])
    nodes = [node for node in plan.graph.calls() if not is_getitem(node) and node in needed]
    for node in nodes:
        maker.expect(node)
    for one in wanted:
        layout = plan.on_mesh(plan.outputs[one.name])
        maker.given_out.setdefault(source_of(results[one.name]), []).append(layout)
    gates = {source_of(results[one.name])[0] for one in wanted if one.checked}
    for node in ordered(nodes, maker.facts, gates):
        maker.add(node)
    outputs = tuple(
        (one, maker.moved(source_of(results[one.name]), plan.on_mesh(plan.outputs[one.name]), Phase.UPDATE))
        for one in wanted
    )
    inputs = tuple(
        LaidOut(node, 0, plan.on_mesh(plan.inputs[name]))
        for name, node in plan.graph.placeholders.items()
        if node in needed
    )
    items = maker.items
    leaving = [value for _, value in outputs]
    if plan.has_time:
        items = in_time(plan, maker.facts, items, leaving)
    if plan.is_pulled:
        items = pulled(plan, items, maker.facts, inputs, leaving)
    rounds = None
    if plan.has_stages and plan.has_time:
        items, rounds = by_stage(plan, items)
    if plan.overlaps:
        items = overlapped(
            items,
            plan.links or (LinkCost(),) * plan.placement.num_axes,
            prepared(plan, maker.facts),
            {value for one, value in outputs if one.checked},
        )
    items = behind_gate(items, Schedule(tuple(items), inputs, outputs))
    return Schedule(_numbered(items), inputs, outputs, rounds)


def _numbered(items: Sequence[Op | Box]) -> tuple[Op | Box, ...]:
    """The items with a number on every move that is not local: ranks that take part meet by it."""
    orders = itertools.count()
    return tuple(
        replace(one, order=next(orders)) if isinstance(one, Box) and not one.is_local else one
        for one in items
    )


class _Maker:
    def __init__(self, plan: Plan, facts: Facts) -> None:
        self.plan, self.facts = plan, facts
        self.wanted: dict[fx.Node, tuple[NdSbp, ...]] = {}
        self.layouts: dict[fx.Node, tuple[NdSbp, ...]] = {
            node: (plan.on_mesh(plan.inputs[name]),) for name, node in plan.graph.placeholders.items()
        }
        self.items: list[Op | Box] = []
        self.made: set[LaidOut] = set()
        self.copies: dict[tuple[fx.Node, int, str], list[LaidOut]] = {}
        self.paths = Paths(plan)
        self.expected: dict[tuple[fx.Node, int, str], dict[NdSbp, None]] = {}
        self.given_out: dict[tuple[fx.Node, int], list[NdSbp]] = {}
        names = {node: name for name, node in plan.graph.placeholders.items()}
        roles = plan.graph.input_of
        self.params = {node for node, name in names.items() if roles[name].role is Role.PARAM}

    def expect(self, node: fx.Node) -> None:
        """Notes the layouts in which a node will ask for what it reads."""
        axes, facts = self.plan.signatures[node.name], self.facts[node]
        # One layout per tensor from one signature per axis.
        self.layouts[node] = tuple(zip(*(axis.outputs for axis in axes), strict=True))
        self.wanted[node] = tuple(zip(*(axis.inputs for axis in axes), strict=True))
        for (value, index), wanted in zip(facts.sources, self.wanted[node], strict=True):
            key = (value, index, self._key(value, facts.phase))
            self.expected.setdefault(key, {})[wanted] = None

    def _key(self, node: fx.Node, phase: Phase) -> str:
        """A gathered parameter is not kept from forward to backward: it is gathered again.

        What is computed again for backward shares its parameters, but no other copy that forward made.
        """
        if phase is Phase.RECOMPUTE:
            return str(Phase.BACKWARD if node in self.params else phase)
        return str(phase) if node in self.params else ""

    def add(self, node: fx.Node) -> None:
        facts = self.facts[node]
        phase = facts.phase
        inputs = tuple(
            self.moved(source, wanted, phase)
            for source, wanted in zip(facts.sources, self.wanted[node], strict=True)
        )
        outputs = tuple(LaidOut(node, i, layout) for i, layout in enumerate(self.layouts[node]))
        self.items.append(Op(node, inputs, outputs, phase))
        for value in outputs:
            self._fold(value, phase)
            self._reduce(value, phase)

    def _fold(self, value: LaidOut, phase: Phase) -> None:
        """Puts micro-batches together at once where somebody wants all of them."""
        if not self.plan.has_time or isinstance(value.layout[-1], Broadcast):
            return
        source = value.node, value.index
        wanted = (*self.expected.get((*source, ""), ()), *self.given_out.get(source, ()))
        if any(isinstance(layout[-1], Broadcast) for layout in wanted):
            self._move(source, (*value.layout[:-1], B), "", phase)

    def _reduce(self, value: LaidOut, phase: Phase) -> None:
        """Reduces at once what nobody reads as a partial, unless that takes more memory.

        A gradient that is stored in parts, say, would else be held whole on every rank up to its update.
        """
        if not any(isinstance(one, Partial) for one in value.layout):
            return
        source = value.node, value.index
        wanted = [*self.expected.get((*source, ""), ()), *self.given_out.get(source, ())]
        if wanted and value.layout not in wanted and self._is_reduced(value, wanted[0]):
            self.moved(source, wanted[0], phase)

    def _is_reduced(self, value: LaidOut, wanted: NdSbp) -> bool:
        """Whether a layout is no partial, and splits along every axis along which the value is split."""
        pairs = zip(value.layout, wanted, strict=True)
        return all(
            not isinstance(then, Partial) and (isinstance(then, Split) or not isinstance(now, Split))
            for now, then in pairs
        )

    def moved(self, value: tuple[fx.Node, int], wanted: NdSbp, phase: Phase) -> LaidOut:
        """The value in the layout that is wanted, moved there if it is not yet."""
        node, index = value
        given = self.layouts[node][index]
        if given == wanted:
            return LaidOut(node, index, given)
        key = self._key(node, phase)
        target = LaidOut(node, index, wanted, key)
        if target in self.made:
            return target
        # From whatever layout of it is there already, or that is needed anyway and only has to be cut: a
        # tensor that is reduced or gathered for one reader is not sent again for another.
        for other in self.expected.get((node, index, key), ()):
            is_source = other not in (given, wanted) and self._is_cut(value, other, wanted)
            if is_source and not self._is_cut(value, given, wanted):
                self._move(value, other, key, phase)
        return self._move(value, wanted, key, phase)

    def _is_cut(self, value: tuple[fx.Node, int], source: NdSbp, target: NdSbp) -> bool:
        """Whether going from one layout to the other sends nothing."""
        return all(step.kind in LOCAL_KINDS for step in self._route(value, source, target).steps)

    def _route(self, value: tuple[fx.Node, int], source: NdSbp, target: NdSbp) -> Route:
        node, index = value
        meta = self.facts[node].metas[index]
        assert meta is not None
        return self.paths.of(source, target, meta)

    def _move(self, value: tuple[fx.Node, int], wanted: NdSbp, key: str, phase: Phase) -> LaidOut:
        """The moves to a layout from the nearest one that is there."""
        node, index = value
        there = [
            LaidOut(node, index, self.layouts[node][index]),
            *self.copies.get((node, index, key), ()),
        ]
        routes = [(self._route(value, one.layout, wanted), one) for one in there]
        best, here = min(routes, key=lambda pair: pair[0].cost)
        for step in best.steps:
            then = LaidOut(node, index, step.target, key)
            if then not in self.made:
                is_fold = step.axis == self.plan.placement.num_axes and step.kind not in LOCAL_KINDS
                self.items.append(Box(step, here, then, phase, folds=is_fold))
                self.made.add(then)
                self.copies.setdefault((node, index, key), []).append(then)
            here = then
        return here


def _needed(results: Sequence[fx.Node]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed
