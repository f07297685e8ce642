"""Pipelines to choose from: stages along the outermost axis, in front of a plan that was made without them.

Along an axis of stages every op runs whole at its stage, so a cut goes with any layouts on the other axes:
those of a plan of the whole grid, searched or by a template, along what the stages leave of it. A pipeline
takes at least its work at the rate of all devices, and a bubble: with S ranks and k micro-batches, (S - 1) /
k of forward and backward, of which the gradients of weights, a third, are nobody's wait. One that could not
be fast enough is not made. Of the best one it is then seen whether it gains by two stages a rank, or by
gradients of weights that wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import PlanError
from ..graph.step_graph import StepGraph, info_of, is_getitem, metas_of, tensor_args
from ..mesh import Placement
from ..sbp.registry import OpRule
from .axis import AxisPlan
from .cost import Device, DeviceCost, Machine, op_seconds
from .plan import Plan
from .positions import positions
from .predict import predict
from .rows import rows_of_rank
from .stages import StagePins, plan_stages, repeated_layers
from .template import PIPELINE, TEMPLATES, batch_size
from .time import WALKED, micro_batched
from .verify import verify_plan

#: The name of an axis of stages that a grid is given.
STAGE_AXIS = "stage"
#: The part of a micro-batch's work that the next stage, or the one before, waits for.
WAITED_FOR = 2 / 3
_MOST = 4  # micro-batches a stage: with more, little of the bubble is left to save


@dataclass(frozen=True)
class Work:
    """Seconds of a step's ops on one device: of what is walked in micro-batches, and of the rest."""

    walked: float
    rest: float

    @staticmethod
    def of(graph: StepGraph, device: Device) -> Work:
        """The work of a graph."""
        spent = {True: 0.0, False: 0.0}
        for node in graph.calls():
            if not is_getitem(node):
                metas = [meta for source in tensor_args(node) for meta in metas_of(source)[:1]]
                walked = info_of(node).phase in WALKED
                target: Callable = node.target  # pyright: ignore[reportAssignmentType]
                spent[walked] += op_seconds(target, metas, metas_of(node), device, node.args)
        return Work(spent[True], spent[False])

    def at_least(self, num_ranks: int, num_stages: int, num: int) -> float:
        """Seconds that no pipeline on so many ranks is faster than, with `num` micro-batches."""
        return (self.walked * (1 + WAITED_FOR * (num_stages - 1) / num) + self.rest) / num_ranks


def stage_counts(graph: StepGraph, placement: Placement, refine: bool) -> Iterator[int]:
    """How many stages the outermost axis may be cut into: 2, 4, 8, ... of its ranks, or all of them.

    Args:
        refine: whether an axis may become two; else all of its ranks are stages.
    """
    size, layers = placement.shape[0], repeated_layers(graph)
    count = 2
    while count <= min(size, layers):
        if size % count == 0 and (refine or count == size):
            yield count
        count *= 2
    if 2 < size <= layers and size & (size - 1):
        yield size


def staged_plan(
    source: Plan, size: int, pins: StagePins | None = None, num: int | None = None, zero_bubble: bool = False
) -> Plan:
    """A plan with its outermost axis, or a part of it, as the stages of a pipeline.

    Args:
        source: a plan of the whole batch at once. Where its outermost axis has more than `size` ranks, those
            that are left keep its layouts along it.
        size: how many ranks have stages; it divides the axis.
        pins: modules that shall lie at given stages.
        num: how many stages there are; one a rank when left out.
        zero_bubble: whether gradients of weights wait until nobody else does.

    Raises:
        PlanError: the step cannot be cut so.
    """
    whole, graph = source.placement, source.graph
    rest = whole.shape[0] // size
    num = num or size
    stages = plan_stages(graph, size, pins or {}, DeviceCost(), num)
    machine = source.machine
    if rest > 1:
        shape, axes, begin = (size, rest, *whole.shape[1:]), (STAGE_AXIS, *whole.axes), 0
        links = None if machine is None else (machine.links[0], *machine.on(whole.num_axes).links)
        machine = None if machine is None or links is None else Machine(machine.device, links)
    else:
        shape, axes, begin = whole.shape, whole.axes, 1
    inner = f"{source.name} on {' x '.join(map(str, shape[1:]))}" if len(shape) > 1 else ""
    several = f" in {num} stages" * (num > size) + ", zero-bubble" * zero_bubble
    made = replace(
        source,
        placement=Placement(whole.device_type, whole.ranks, shape, axes),
        name=f"{PIPELINE} of {size}{several}" + (f" x {inner}" if inner else ""),
        signatures=_in_front(source, stages, begin),
        inputs={name: (stages.stored[name], *one[begin:]) for name, one in source.inputs.items()},
        outputs={name: (stages.outputs[name], *one[begin:]) for name, one in source.outputs.items()},
        machine=machine,
        search=None,
        predicted=None,
        zero_bubble=zero_bubble,
    )
    return verify_plan(made)


def stages_at(graph: StepGraph, ranks: Mapping[str, int], size: int) -> tuple[dict[str, int], int]:
    """The stages of modules that lie at given ranks, as forward goes through them, and how many there are.

    Args:
        ranks: of modules with parameters of their own, by name.
    """
    found: dict[str, int] = {}
    stage = 0
    for node in positions(graph).forward:
        module = info_of(node).module
        if module in ranks and module not in found:
            stage += (ranks[module] - stage) % size
            found[module] = stage
    return found, size * (stage // size + 1)


def variants(graph: StepGraph, size: int, num_micro_batches: int) -> Iterator[tuple[int, bool]]:
    """Other schedules of a pipeline along so many ranks: (stages, whether gradients of weights wait)."""
    if num_micro_batches < 2:
        return
    several = [2 * size] if 2 * size <= repeated_layers(graph) else []
    yield from [(size, True), *((num, zero_bubble) for num in several for zero_bubble in (False, True))]


def _in_front(source: Plan, stages: AxisPlan, begin: int) -> dict[str, tuple]:
    by_name = {node.name: one for node, one in stages.signatures.items()}
    return {name: (by_name[name], *axes[begin:]) for name, axes in source.signatures.items()}


def most_micro_batches(source: Plan, size: int) -> int:
    """The most micro-batches, of 1, 2, 4, ..., that `size` stages before a plan's layouts are tried with.

    A few times as many as there are stages, and at most the rows that a rank then has.
    """
    found = rows_of_rank(source)
    if found is None:
        return 1
    rows, _ = found
    rest = source.placement.shape[0] // size
    shape = (rest, *source.placement.shape[1:])
    cut = replace(source, placement=replace(source.placement, shape=shape))
    parts = (rows_of_rank(cut) or (rows, 1))[1]
    most = 1
    while rows % parts == 0 and 2 * most <= min(rows // parts, _MOST * size):
        most *= 2
    return most


def most_of_batch(graph: StepGraph, size: int) -> int:
    """The most micro-batches that `size` stages are tried with, whatever the layouts."""
    rows, most = batch_size(graph) or 1, 1
    while 2 * most <= min(rows, _MOST * size):
        most *= 2
    return most


def product_names(placement: Placement, size: int) -> list[str]:
    """The products of templates along what `size` stages leave of a grid.

    The outermost axis has the first one's name also where the stages leave nothing of it.
    """
    first = list(TEMPLATES) if size < placement.shape[0] else list(TEMPLATES)[:1]
    products = itertools.product(first, *[TEMPLATES] * (placement.num_axes - 1))
    return [names[0] if len(set(names)) == 1 else " x ".join(names) for names in products]


def in_micro_batches(
    plan: Plan, most: int, num: int | None, limit: int, rules: Mapping[Callable, OpRule]
) -> Iterator[Plan]:
    """A pipeline with the number of micro-batches asked for, or from `most` down to where fewer are slower.

    Those that hold more than the limit, too: who looks for one that fits takes it. A number that the step
    cannot be walked in is left out.
    """
    machine = plan.machine
    assert machine is not None
    fastest: float | None = None
    count = num or most
    while count:
        try:
            made = micro_batched(plan, count, rules)
        except PlanError:
            count = 0 if num else count // 2
            continue
        predicted = predict(made, machine)
        yield replace(made, predicted=predicted)
        if fastest is not None and predicted.seconds >= fastest:
            return
        if limit and predicted.peak_bytes > limit:
            return  # fewer hold more
        fastest = predicted.seconds
        count = 0 if num else count // 2
