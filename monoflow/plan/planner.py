"""The planner: the search, or a template: its goals, one axis after the other, and alternatives that pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..errors import LayoutError, PlanError
from ..graph.step_graph import StepGraph
from ..log import stage_logger
from ..mesh import Placement
from ..sbp.layout import B, Sbp, Split
from ..sbp.registry import OpRule
from ..sbp.sources import RuleBook
from .axis import AxisPlan, AxisProblem
from .batches import walked
from .budget import Budget
from .calls import bytes_around
from .choose import Wanted, choose
from .cost import REFERENCE, DeviceCost, Machine
from .plan import Plan, fingerprint
from .predict import predict
from .rewrites import LOSSES, PREPARE, Rewrite, expansion, rewritten
from .stages import StagePins, plan_stages
from .template import PIPELINE, TEMPLATES, Pins, Template, apply_pins, parse
from .verify import verify_plan

log = stage_logger("plan")

AUTO = "auto"


def plan_step(
    graph: StepGraph,
    placement: Placement,
    name: str,
    pins: Pins | None = None,
    machine: Machine | None = None,
    rules: Mapping[Callable, OpRule] | None = None,
    limit: int = 0,
    stages: StagePins | None = None,
    micro_batches: int | None = None,
    refine: bool = False,
    num_stages: int | None = None,
    zero_bubble: bool = False,
    seconds: float = 10.0,
) -> Plan:
    """Plans a step: by search, or by a template and what a user pins.

    Args:
        name: "auto" for the fastest plan that is found, a pipeline or not, or a template, "data", "zero",
            "tensor", "pipeline", or a product such as "data x tensor".
        pins: per pattern of input or output names, one SBP per axis.
        machine: what work and moves cost. A template's own choices do not depend on it.
        rules: the ops' rules; all that are known, and trials, when left out.
        limit: bytes that a rank may hold at any time, for "auto"; 0 for no limit.
        stages: per pattern of module names, the stage of a pipeline that they lie at.
        micro_batches: in how many the batch is walked; None to choose, 1 for a template.
        refine: whether "auto" may make a part of the outermost axis an axis of its own, of a pipeline's
            stages. Without it only all of that axis may become one; with pins nothing does.
        num_stages: of a pipeline; one a rank of its axis when left out.
        zero_bubble: whether a stage computes the gradients of weights when nobody waits for it.
        seconds: what "auto" may take beside the search, see `budget`.

    Raises:
        PlanError, LayoutError: the template is unknown, a pin does not fit, nothing fits the limit, or the
            step cannot be walked in so many micro-batches.
    """
    machine = (machine or REFERENCE).on(placement.num_axes)
    pins = pins or {}
    rules = RuleBook() if rules is None else rules
    if name == AUTO or PIPELINE not in parse(name, placement):
        _refuse_stages(name, stages or {}, num_stages, zero_bubble)
    if name != AUTO:
        made = _by_template(graph, placement, name, pins, rules, stages or {}, num_stages)
        made = replace(made, machine=machine, zero_bubble=zero_bubble)
        return walked(replace(made, predicted=predict(made, machine)), micro_batches or 1, rules)

    def by_template(template: str) -> Plan:
        return plan_step(graph, placement, template, pins, machine, rules, micro_batches=1)

    wanted = Wanted(
        graph,
        placement,
        machine,
        pins,
        rules,
        limit,
        micro_batches,
        refine,
        by_template,
        Budget.of(seconds),
    )
    return choose(wanted)


def _refuse_stages(name: str, stages: StagePins, num: int | None, zero_bubble: bool) -> None:
    """Raises PlanError if something is asked of a pipeline where there is none."""
    asked = [f"modules are pinned to stages ({', '.join(map(repr, stages))})"] if stages else []
    asked += [f"stages={num} is asked for"] if num is not None else []
    asked += ['schedule="zero-bubble" is asked for'] if zero_bubble else []
    if asked:
        lack = "chooses its own" if name == AUTO else "has none"
        raise PlanError(
            f"{' and '.join(asked)}, but plan={name!r} {lack}; choose plan='pipeline', or a product such as "
            "'pipeline x data'"
        )


def _by_template(
    graph: StepGraph,
    placement: Placement,
    name: str,
    pins: Pins,
    rules: Mapping[Callable, OpRule],
    stages: StagePins,
    num_stages: int | None,
) -> Plan:
    def cut(graph: StepGraph, size: int) -> AxisPlan:
        return plan_stages(graph, size, stages, device, num_stages)

    device = DeviceCost()
    rewrites: list[Rewrite] = [PREPARE] if "zero" in parse(name, placement) else []
    captured, graph = graph, rewritten(graph, rewrites, rules)
    axes = _plan_axes(graph, placement, name, rules, pins, device, cut)
    improved = True
    while improved:
        improved = False
        for names in _alternatives(graph, axes, rules):
            rewrite: Rewrite = ("expand", tuple(sorted(names)))
            expanded = rewritten(graph, [rewrite], rules)
            other = _plan_axes(expanded, placement, name, rules, pins, device, cut)
            if sum(one.cost for one in other) < sum(one.cost for one in axes):
                log.info("simpler forms of %s pay", ", ".join(sorted(names)))
                graph, axes, improved = expanded, other, True
                rewrites.append(rewrite)
                break
    made = _joined(graph, placement, name, axes)
    return verify_plan(replace(made, captured=fingerprint(captured), rewrites=tuple(rewrites)))


def _plan_axes(
    graph: StepGraph,
    placement: Placement,
    name: str,
    rules: Mapping[Callable, OpRule],
    pins: Pins,
    device: DeviceCost,
    cut: Callable[[StepGraph, int], AxisPlan],
) -> list[AxisPlan]:
    templates = [TEMPLATES.get(one) for one in parse(name, placement)]
    chosen = _chosen_storage(graph, placement, templates, rules, pins, device)
    solved: list[AxisPlan] = []
    # Outer axes first: an inner axis' blocks and units refer to what the outer ones leave.
    for axis, size in enumerate(placement.shape):
        template = templates[axis]
        if template is None:
            _check_free(pins, axis)
            solved.append(cut(graph, size))
            continue
        taken: dict[str, set[int]] = {}
        for other, stored in (*chosen.items(), *((i, plan.stored) for i, plan in enumerate(solved))):
            for key, one in stored.items() if other != axis else ():
                if isinstance(one, Split):
                    taken.setdefault(key, set()).add(one.dim)
        goal = template(graph, size, taken)
        if axis in chosen:
            goal = replace(goal, stored=chosen[axis], free={}, chose_storage=True)
        goal = apply_pins(goal, graph, pins, axis)
        before = [(placement.shape[i], plan) for i, plan in enumerate(solved)]
        solved.append(AxisProblem(graph, goal, rules, device, before).solve())
    return solved


def _check_free(pins: Pins, axis: int) -> None:
    """Raises LayoutError if a pin says how something lies along an axis of stages."""
    for pattern, layout in pins.items():
        if layout[axis] != B:
            raise LayoutError(
                f"pin {pattern!r}: {layout[axis]} is along the axis of a pipeline, where tensors lie at the "
                "stages of the modules that use them; write B there, and fix stages with step.stage(...)"
            )


def _chosen_storage(
    graph: StepGraph,
    placement: Placement,
    templates: Sequence[Template | None],
    rules: Mapping[Callable, OpRule],
    pins: Pins,
    device: DeviceCost,
) -> dict[int, Mapping[str, Sbp]]:
    """On a mesh of several axes: the storage that the axes choose whose template leaves it free.

    They choose first, each as if it were alone, because the others can store a parameter along any dim.
    """
    chosen: dict[int, Mapping[str, Sbp]] = {}
    taken: dict[str, set[int]] = {}
    for axis, size in enumerate(placement.shape if placement.num_axes > 1 else ()):
        template = templates[axis]
        if template is None:
            continue
        goal = apply_pins(template(graph, size, taken), graph, pins, axis)
        if goal.free:
            chosen[axis] = AxisProblem(graph, goal, rules, device).solve().stored
            for key, one in chosen[axis].items():
                if isinstance(one, Split):
                    taken.setdefault(key, set()).add(one.dim)
    return chosen


def _alternatives(
    graph: StepGraph, axes: Sequence[AxisPlan], rules: Mapping[Callable, OpRule]
) -> Iterator[set[str]]:
    """Sets of nodes whose simpler forms may pay.

    First those that run whole because a split had to be given up. Then, where weights are split, the
    classifier's log-softmax: in simpler form the layer before it may stay split by the vocabulary.
    """
    whole = {node.name for axis in axes for node in _whole_after_gather(axis) if expansion(node, rules)}
    if whole:
        yield whole
    if any(axis.chose_storage for axis in axes):
        loss = {node.name for node in graph.calls() if node.target in LOSSES}
        if loss and loss != whole:
            yield loss


def _whole_after_gather(axis: AxisPlan) -> set[fx.Node]:
    """Nodes that run whole because a split was given up before them."""
    found: set[fx.Node] = set()
    stack = list(axis.gathered)
    while stack:
        node = stack.pop()
        signature = axis.signatures.get(node)
        whole = signature is None or not any(isinstance(one, Split) for one in signature.inputs)
        if node.op == "call_function" and node not in found and (whole or node in axis.gathered):
            found.add(node)
            stack.extend(node.users)
    return found


def _joined(graph: StepGraph, placement: Placement, name: str, axes: Sequence[AxisPlan]) -> Plan:
    signatures = {node.name: tuple(axis.signatures[node] for axis in axes) for node in axes[0].signatures}
    spread = [axis for axis in axes if not axis.is_staged]
    unruled = {
        node.name: bytes_around(node)
        for node in (spread[0].unruled if spread else ())
        if all(node in axis.unruled for axis in spread)
    }
    return Plan(
        graph,
        placement,
        name,
        signatures,
        {one.name: tuple(axis.stored[one.name] for axis in axes) for one in graph.inputs},
        {one.name: tuple(axis.outputs[one.name] for axis in axes) for one in graph.outputs},
        unruled,
    )
