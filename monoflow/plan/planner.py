"""The planner: a template's goals, one axis after the other, and alternatives where they pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from ..graph.rewrite import copied, finished, insert_traced
from ..graph.step_graph import StepGraph, metas_of, tensor_args
from ..log import stage_logger
from ..mesh import Placement
from ..sbp.layout import Split
from ..sbp.registry import OpRule
from .cost import DeviceCost
from .plan import Plan
from .propagate import AxisPlan, AxisPropagation
from .template import Pins, apply_pins, parse

log = stage_logger("plan")


def plan_step(
    graph: StepGraph,
    placement: Placement,
    name: str,
    rules: Mapping[Callable, OpRule],
    pins: Pins | None = None,
    device: DeviceCost | None = None,
) -> Plan:
    """Plans a step by a template and a user's pins.

    Args:
        name: a template, "data", "zero", "tensor", or a product such as "data x tensor".
        pins: per pattern of input or output names, one SBP per axis.

    Raises:
        PlanError, LayoutError: the template is unknown or a pin does not fit.
    """
    device = device or DeviceCost()
    axes = _plan_axes(graph, placement, name, rules, pins or {}, device)
    for _ in range(3):
        expanded = _expand(graph, axes, rules)
        if expanded is None:
            break
        other = _plan_axes(expanded, placement, name, rules, pins or {}, device)
        if sum(one.cost for one in other) >= sum(one.cost for one in axes):
            break
        log.info("alternative forms of %s ops pay", len(list(expanded.calls())) - len(list(graph.calls())))
        graph, axes = expanded, other
    return _joined(graph, placement, name, axes)


def _plan_axes(
    graph: StepGraph,
    placement: Placement,
    name: str,
    rules: Mapping[Callable, OpRule],
    pins: Pins,
    device: DeviceCost,
) -> list[AxisPlan]:
    # An axis whose template chooses storage freely goes first; one that only shards state takes what is left.
    templates = parse(name, placement)
    order = sorted(range(placement.num_axes), key=lambda axis: _rank(templates[axis].__name__))
    solved: dict[int, AxisPlan] = {}
    for axis in order:
        taken: dict[str, set[int]] = {}
        for plan in solved.values():
            for key, one in plan.stored.items():
                if isinstance(one, Split):
                    taken.setdefault(key, set()).add(one.dim)
        size = placement.shape[axis]
        outer = [placement.shape[a] for a in solved]
        goal = apply_pins(templates[axis](graph, size, taken), graph, pins, axis, outer)
        before = [(placement.shape[a], solved[a]) for a in sorted(solved)]
        solved[axis] = AxisPropagation(graph, goal, rules, device, before).solve()
    return [solved[axis] for axis in range(placement.num_axes)]


def _rank(template: str) -> int:
    return {"tensor": 0}.get(template, 1)


def _expand(
    graph: StepGraph, axes: Sequence[AxisPlan], rules: Mapping[Callable, OpRule]
) -> StepGraph | None:
    """The graph with ops that had to gather an input in their simpler form; None if there is none."""
    names = {node.name for axis in axes for node in axis.gathered if _expansion(node, rules)}
    if not names:
        return None
    edited = copied(graph)
    for node in list(edited.nodes):
        if node.name in names:
            function = _expansion(node, rules)
            assert function is not None
            results = insert_traced(edited, node, _bound(function, node), (list(node.args), dict(node.kwargs)))
            _replace(edited, node, results)
    return finished(graph, edited)


def _expansion(node: fx.Node, rules: Mapping[Callable, OpRule]) -> Callable | None:
    rule = rules.get(node.target)  # type: ignore[arg-type]
    return rule.expand if rule is not None else None


def _bound(function: Callable, node: fx.Node) -> Callable:
    def call(args: list, kwargs: dict) -> object:
        return function(*args, **kwargs)

    call.__name__ = node.name
    return call


def _replace(graph: fx.Graph, node: fx.Node, results: object) -> None:
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        assert isinstance(results, (list, tuple))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _joined(graph: StepGraph, placement: Placement, name: str, axes: Sequence[AxisPlan]) -> Plan:
    signatures = {
        node.name: tuple(axis.signatures[node] for axis in axes) for node in axes[0].signatures
    }
    unruled = {}
    for node in axes[0].unruled:
        metas = [meta for source in tensor_args(node) for meta in metas_of(source)[:1]]
        unruled[node.name] = sum(meta.num_bytes for meta in (*metas, *metas_of(node)) if meta is not None)
    return Plan(
        graph,
        placement,
        name,
        signatures,
        {one.name: tuple(axis.stored[one.name] for axis in axes) for one in graph.inputs},
        {one.name: tuple(axis.outputs[one.name] for axis in axes) for one in graph.outputs},
        unruled,
    )
