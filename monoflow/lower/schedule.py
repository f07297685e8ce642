"""The schedule: the plan as one list of ops and moves, the same for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ..boxing.route import LOCAL_KINDS, Move, route
from ..graph.step_graph import Output, Phase, Role, info_of, is_getitem, metas_of, source_of, tensor_args
from ..plan.plan import Plan
from ..sbp.layout import NdSbp


@dataclass(frozen=True)
class LaidOut:
    """A tensor of the graph (node and output index) in one layout; `phase` tells repeated gathers apart."""

    node: fx.Node
    index: int
    layout: NdSbp
    phase: str = ""

    @property
    def name(self) -> str:
        return f"{self.node.name}.{self.index}" if self.index else self.node.name


@dataclass(frozen=True)
class Op:
    """Run a node on tensors in these layouts."""

    node: fx.Node
    inputs: tuple[LaidOut, ...]
    outputs: tuple[LaidOut, ...]
    phase: Phase


@dataclass(frozen=True)
class Box:
    """One move of a route."""

    move: Move
    source: LaidOut
    target: LaidOut
    phase: Phase

    @property
    def is_local(self) -> bool:
        return self.move.kind in LOCAL_KINDS or self.move.mesh[self.move.axis] == 1


@dataclass(frozen=True)
class Schedule:
    """All ops and moves in one topological order, and where inputs come in and outputs leave."""

    items: tuple[Op | Box, ...]
    inputs: tuple[LaidOut, ...]
    outputs: tuple[tuple[Output, LaidOut], ...]


def schedule(plan: Plan, observe: bool = False) -> Schedule:
    """Orders a plan; moves come right before what first needs them.

    Args:
        observe: also compute the observed outputs (gradients as the optimizer sees them).
    """
    maker = _Maker(plan)
    wanted = [one for one in plan.graph.outputs if observe or not one.observed]
    results = {one.name: node for one, node in zip(plan.graph.outputs, plan.graph.results, strict=True)}
    needed = _needed([results[one.name] for one in wanted])
    for node in plan.graph.calls():
        if not is_getitem(node) and node in needed:
            maker.add(node)
    outputs = tuple(
        (one, maker.moved(source_of(results[one.name]), plan.outputs[one.name], Phase.UPDATE))
        for one in wanted
    )
    inputs = tuple(
        LaidOut(node, 0, plan.inputs[name])
        for name, node in plan.graph.placeholders.items()
        if node in needed
    )
    return Schedule(tuple(maker.items), inputs, outputs)


class _Maker:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.items: list[Op | Box] = []
        self.made: set[LaidOut] = set()
        self.copies: dict[tuple[fx.Node, int, str], list[LaidOut]] = {}
        names = {node: name for name, node in plan.graph.placeholders.items()}
        roles = plan.graph.input_of
        self.params = {node for node, name in names.items() if roles[name].role is Role.PARAM}

    def add(self, node: fx.Node) -> None:
        phase = info_of(node).phase
        inputs = tuple(
            self.moved(source_of(source), wanted, phase)
            for source, wanted in zip(tensor_args(node), self.plan.wanted(node), strict=True)
        )
        outputs = tuple(LaidOut(node, i, layout) for i, layout in enumerate(self.plan.layouts(node)))
        self.items.append(Op(node, inputs, outputs, phase))

    def moved(self, value: tuple[fx.Node, int], wanted: NdSbp, phase: Phase) -> LaidOut:
        """The value in the layout that is wanted, moved there if it is not yet."""
        node, index = value
        given = self.plan.layouts(node)[index]
        if given == wanted:
            return LaidOut(node, index, given)
        # A gathered parameter is not kept from forward to backward: it is gathered again.
        key = str(phase) if node in self.params else ""
        target = LaidOut(node, index, wanted, key)
        if target in self.made:
            return target
        meta = metas_of(node)[index]
        assert meta is not None
        mesh = self.plan.placement.shape
        # From whatever layout of it is there already: a gathered tensor is cut, not reduced again.
        here_from = [LaidOut(node, index, given), *self.copies.get((node, index, key), ())]
        routes = [(route(one.layout, wanted, meta.shape, meta.dtype, mesh), one) for one in here_from]
        best, here = min(routes, key=lambda pair: pair[0].cost)
        for step in best.steps:
            then = LaidOut(node, index, step.target, key)
            if then not in self.made:
                self.items.append(Box(step, here, then, phase))
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
