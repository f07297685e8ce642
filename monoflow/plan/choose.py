"""The plan that `auto` means: a searched plan, or its batch in micro-batches, or a pipeline in front of it.

Everything is judged by the prediction, under the limit. By a roofline micro-batches alone only cost time:
they are for limits, and for machines that were measured, where smaller parts may stay in a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import LayoutError, PlanError
from ..graph.step_graph import Role, StepGraph, is_getitem
from ..log import stage_logger
from ..mesh import Placement
from ..sbp.layout import At, B
from ..sbp.ops.batch_norm import local_batch_norm
from ..sbp.registry import OpRule
from .batches import in_fewest, walked
from .budget import Budget
from .cost import Machine
from .exact import require_exact
from .pipelines import (
    WAITED_FOR,
    Work,
    in_micro_batches,
    most_micro_batches,
    most_of_batch,
    product_names,
    stage_counts,
    staged_plan,
    stages_at,
    variants,
)
from .plan import Plan, Search
from .predict import Prediction, predict
from .search import FASTEST, gap_of, search
from .stages import repeated_layers
from .template import TEMPLATES, Pins
from .time import WALKED

log = stage_logger("plan")

_CLEARLY = 0.01  # by so much a mesh of more axes must be faster
#: By so much a pipeline, or a batch in parts, must be. CPU ranks share cores, caches and memory, so that what
#: one saves others may spend, and a bubble's idle core is nobody's gain.
_MARGIN, _MARGIN_CPU = 0.01, 0.1
_EQUAL = 1e-3  # what the search takes for equal
#: The part of the budget that all templates may take to be planned beside the search, which takes less time
#: than they where layers repeat, as it folds them.
_FOR_TEMPLATES = 0.5


@dataclass(frozen=True)
class Wanted:
    """What a plan is chosen for.

    Attributes:
        pins: per pattern of input or output names, one SBP per axis of the placement.
        limit: bytes that a rank may hold; 0 for no limit.
        micro_batches: in how many the batch is walked; None to choose.
        refine: whether a part of the outermost axis may become an axis of stages.
        template: plans by a template, predicted; raises PlanError or LayoutError.
        budget: of work beside the search.
    """

    graph: StepGraph
    placement: Placement
    machine: Machine
    pins: Pins
    rules: Mapping[Callable, OpRule]
    limit: int
    micro_batches: int | None
    refine: bool
    template: Callable[[str], Plan]
    budget: Budget

    @cached_property
    def margin(self) -> float:
        """How much faster a pipeline or a batch in parts must be."""
        return _margin(self.placement)

    @cached_property
    def work(self) -> Work:
        """What a pipeline shares out."""
        return Work.of(self.graph, self.machine.device)

    @cached_property
    def num_ops(self) -> int:
        """What planning one plan costs of the budget."""
        return sum(1 for _ in self.graph.calls())

    @cached_property
    def is_small(self) -> bool:
        """Whether templates are planned beside the search."""
        ops = self.num_ops * self.placement.num_axes * len(TEMPLATES)
        return ops <= _FOR_TEMPLATES * self.budget.total

    @cached_property
    def is_free(self) -> bool:
        """Whether numbers stay the same however the batch is cut: not those of a rank's own statistics."""
        return all(is_getitem(node) or node.target is not local_batch_norm for node in self.graph.calls())

    def fits(self, plan: Plan) -> bool:
        return not self.limit or _predicted(plan).peak_bytes <= self.limit

    def templates(self, names: Sequence[str]) -> Iterator[Plan]:
        """Plans by those templates that suit the step and its pins."""
        for name in names:
            self.budget.spent += self.num_ops * self.placement.num_axes
            try:
                yield self.template(name)
            except (LayoutError, PlanError):
                continue


@dataclass
class _Found:
    """The best plan so far, all plans that were looked at, and why there is none yet.

    Attributes:
        source: what the best plan was made of, if it is a pipeline.
    """

    wanted: Wanted
    best: Plan | None = None
    source: Plan | None = None
    refused: PlanError | None = None
    tried: dict[str, tuple[float, int]] = field(default_factory=dict)

    def consider(self, plan: Plan, margin: float) -> bool:
        """Takes a plan that fits and is faster by a margin."""
        predicted = _predicted(plan)
        name = f"{plan.name}, {plan.micro_batches} micro-batches" if plan.has_time else plan.name
        name += ", frugal" * plan.is_frugal
        self.tried[name] = predicted.seconds, predicted.peak_bytes
        if not self.wanted.fits(plan):
            if plan.is_frugal or not plan.overlaps:
                return False
            assert plan.machine is not None
            frugal = replace(plan, is_frugal=True)
            return self.consider(replace(frugal, predicted=predict(frugal, plan.machine)), margin)
        if not self.could_be(predicted.seconds, margin):
            return False
        self.best = plan
        return True

    def could_be(self, seconds: float, margin: float) -> bool:
        return self.best is None or seconds < _predicted(self.best).seconds * (1 - margin)


def choose(wanted: Wanted) -> Plan:
    """The fastest plan that is found.

    Raises:
        PlanError: nothing fits the limit, or the step cannot be walked in the micro-batches asked for.
        LayoutError: a pin does not fit.
    """
    if any(isinstance(layout[0], At) for layout in wanted.pins.values()):
        return _as_stored(wanted)
    found = _Found(wanted)
    sources = _spread(found)
    if wanted.placement.size > 1 and wanted.is_free and sources:
        _pipelines(found, sources)
        _schedules(found)
    if found.best is None:
        raise found.refused or PlanError(
            f"no plan on {wanted.placement} holds at most {wanted.limit:,} bytes a rank with "
            f"{wanted.micro_batches} micro-batches; give a larger limit, more micro-batches, or "
            'micro_batches="auto"'
        )
    return _concluded(found, sources)


def best_of(plans: Sequence[Plan]) -> Plan:
    """The fastest of some plans of one step; of nearly equal ones the first, and one without stages."""
    best: dict[bool, Plan] = {}
    for one in plans:
        kind = one.has_stages
        if kind not in best or _predicted(one).seconds < _predicted(best[kind]).seconds * (1 - _CLEARLY):
            best[kind] = one
    if len(best) == 1:
        return next(iter(best.values()))
    margin = _margin(plans[0].placement)
    faster = _predicted(best[True]).seconds < _predicted(best[False]).seconds * (1 - margin)
    return best[faster]


def _margin(placement: Placement) -> float:
    """How much faster a pipeline or a batch in parts must be."""
    return _MARGIN_CPU if placement.device_type == "cpu" else _MARGIN


# --- without stages ------------------------------------------------------------------------------------


def _spread(found: _Found) -> list[Plan]:
    """Looks at plans without stages; returns those of the whole batch that pipelines can be made of."""
    wanted, num = found.wanted, found.wanted.micro_batches
    # A limit is never too small for these; and small moves go together, which the search's tables do not see.
    names = list(TEMPLATES) if wanted.placement.size > 1 and (wanted.limit or wanted.is_small) else []
    others = list(wanted.templates(names))
    if not wanted.limit:
        whole = search(wanted.graph, wanted.placement, wanted.machine, wanted.pins, wanted.rules)
        found.tried |= whole.search.tried if whole.search is not None else {}
        found.best = walked(whole, num or 1, wanted.rules)
        if num is None and wanted.is_free and wanted.machine.device.curves:
            _smaller(found, whole)
        _all_walked(found, others, num or 1, _EQUAL)
        return [whole, *others]
    if num in (None, 1):
        found.best, found.refused = _under_limit(wanted, others)
        if found.best is not None:
            assert found.best.search is not None
            found.tried |= found.best.search.tried
            free = found.tried[FASTEST]
            if num == 1 or not wanted.is_free or _predicted(found.best).seconds <= free[0]:
                return [found.best, *others]
        elif num == 1 and wanted.placement.size == 1:
            return []
    whole = search(wanted.graph, wanted.placement, wanted.machine, wanted.pins, wanted.rules)
    sources = [whole, *others]
    if num is None:
        for plan in sources:
            for one in in_fewest(plan, wanted.limit, wanted.rules, found.could_be):
                found.consider(one, 0.0)
    elif num > 1:
        _all_walked(found, sources, num, 0.0)
    return sources


def _all_walked(found: _Found, sources: Sequence[Plan], num: int, margin: float) -> None:
    refused: list[PlanError] = []
    for plan in sources:
        try:
            found.consider(walked(plan, num, found.wanted.rules), margin)
        except PlanError as error:
            refused.append(error)
    if refused and len(refused) == len(sources):
        found.refused = refused[0]


def _under_limit(wanted: Wanted, others: Sequence[Plan]) -> tuple[Plan | None, PlanError | None]:
    try:
        made = search(
            wanted.graph, wanted.placement, wanted.machine, wanted.pins, wanted.rules, wanted.limit, others
        )
    except PlanError as error:
        return None, error
    return made, None


def _smaller(found: _Found, whole: Plan) -> None:
    """Takes micro-batches where measured curves say that they are clearly faster, as long as more are."""
    num = 2
    while True:
        try:
            made = walked(whole, num, found.wanted.rules)
        except PlanError:
            return
        if not found.consider(made, found.wanted.margin):
            return
        num *= 2


# --- pipelines -----------------------------------------------------------------------------------------


def _pipelines(found: _Found, sources: Sequence[Plan]) -> None:
    """Looks at pipelines in front of plans without stages, and of templates where the step is small.

    What could be fast by its work and the bubble alone goes first; what cannot be fast enough is not made. Of
    a deep step not even what is too slow by the figures of the plan that it would be made of; and the first
    that is made and is no better ends the looking.
    """
    wanted = found.wanted
    counts = list(stage_counts(wanted.graph, wanted.placement, wanted.refine))
    if not counts or wanted.pins:  # what is pinned, or stored, stays whole where its axis would be stages
        return
    small = wanted.is_small
    known: dict[str, Plan | None] = {plan.name: plan for plan in sources}
    ranked: list[tuple[float, str, int]] = []
    for size in counts:
        for plan in sources:
            num = wanted.micro_batches or most_micro_batches(plan, size)
            least = wanted.work.at_least(wanted.placement.size, size, num)
            ranked.append((least if small else max(least, _estimate(plan, size, num)), plan.name, size))
        if small:
            most = wanted.micro_batches or most_of_batch(wanted.graph, size)
            least = wanted.work.at_least(wanted.placement.size, size, most)
            names = product_names(wanted.placement, size)
            ranked += [(least, name, size) for name in names if name not in known]
    is_begun = False  # one pipeline is looked at whatever the budget
    for least, name, size in sorted(ranked, key=lambda one: one[0]):
        if not found.could_be(least, wanted.margin):
            break
        if is_begun and not wanted.budget.allows():
            continue
        is_begun = True
        if name not in known:
            known[name] = next(wanted.templates([name]), None)
        source = known[name]
        if source is not None and not _pipeline(found, source, size, small) and not small:
            break


def _pipeline(found: _Found, source: Plan, size: int, thorough: bool) -> bool:
    """Looks at one pipeline with all numbers of micro-batches that pay; whether others are worth a look.

    Args:
        thorough: whether to look at fewer micro-batches though the most were not fast enough.
    """
    wanted = found.wanted
    try:
        plan = staged_plan(source, size)
    except PlanError:
        return True
    most = most_micro_batches(source, size)
    for made in in_micro_batches(plan, most, wanted.micro_batches, wanted.limit, wanted.rules):
        wanted.budget.spent += wanted.num_ops
        before = found.best
        margin = 0.0 if before is not None and before.has_stages else wanted.margin
        taken = found.consider(made, margin)
        if taken and not _is_exact(made, wanted.rules):
            found.best, taken = before, False
        found.source = source if taken else found.source
        if not thorough and not taken:
            break
    return found.best is None or found.best.has_stages


def _schedules(found: _Found) -> None:
    """Looks at the best pipeline with two stages a rank, and with gradients of weights that wait."""
    best, wanted = found.best, found.wanted
    if best is None or not best.has_stages or found.source is None:
        return
    assert best.stage_axis is not None
    size = best.placement.shape[best.stage_axis]
    for num, zero_bubble in variants(best.graph, size, best.micro_batches):
        try:
            plan = staged_plan(found.source, size, num=num, zero_bubble=zero_bubble)
            made = walked(plan, best.micro_batches, wanted.rules)
        except PlanError:
            continue
        before = found.best
        if found.consider(made, _CLEARLY) and not _is_exact(made, wanted.rules):
            found.best = before


def _is_exact(plan: Plan, rules: Mapping[Callable, OpRule]) -> bool:
    """Whether the rules call a plan exact that was made on a grid of another size."""
    try:
        require_exact(plan, rules, "a pipeline")
    except PlanError as error:
        log.debug("%s is no candidate: %s", plan.name, error)
        return False
    return True


def _estimate(plan: Plan, size: int, num: int) -> float:
    """Seconds of a pipeline in front of a plan, by the plan's own figures.

    What is sent along the axis that becomes stages is shared by them, as each has its part of the state. The
    stage of the most layers sets the pace.
    """
    total, outer = 0.0, plan.placement.axes[0]
    layers = repeated_layers(plan.graph)
    most = math.ceil(layers / size) * size / layers
    for phase, kinds in _predicted(plan).seconds_by.items():
        bubble = (1 + WAITED_FOR * (size - 1) + most * (num - 1)) / num if phase in WALKED else 1.0
        for kind, seconds in kinds.items():
            shared = seconds / size * (size < plan.placement.shape[0])
            total += shared if kind == outer else seconds * bubble
    return total - _predicted(plan).hidden


def _as_stored(wanted: Wanted) -> Plan:
    """The pipeline whose stages hold what is stored at them already.

    Raises:
        PlanError: with no number of micro-batches it fits the limit.
    """
    pins = {name: (B, *layout[1:]) for name, layout in wanted.pins.items()}
    whole = search(wanted.graph, wanted.placement, wanted.machine, pins, wanted.rules)
    ranks = {
        name.rpartition(".")[0]: layout[0].stage
        for name, layout in wanted.pins.items()
        if isinstance(layout[0], At) and name in wanted.graph.input_of and "." in name
        if wanted.graph.input_of[name].role is Role.PARAM
    }
    size = wanted.placement.shape[0]
    try:
        stages, num = stages_at(wanted.graph, ranks, size)
        plan = staged_plan(whole, size, stages, num)
    except PlanError:  # a module that runs at several stages has no place of its own
        plan = staged_plan(whole, size)
    found = _Found(wanted)
    most = most_micro_batches(whole, size)
    for made in in_micro_batches(plan, most, wanted.micro_batches, wanted.limit, wanted.rules):
        found.consider(made, 0.0)
    if found.best is None:
        held = min((peak for _, peak in found.tried.values()), default=0)
        raise PlanError(
            f"the state lies at the {size} stages of {wanted.placement}, and no number of micro-batches with "
            f"it holds at most {wanted.limit:,} bytes a rank: the least that was found is {held:,}; give a "
            "larger limit, or a batch of other rows"
        )
    return _concluded(found, ())


# --- the end -------------------------------------------------------------------------------------------


def _concluded(found: _Found, sources: Sequence[Plan]) -> Plan:
    """The best plan, with what the search for it says of it."""
    best, wanted = found.best, found.wanted
    assert best is not None
    predicted = _predicted(best)
    bounds = [one.search.bound for one in (best, *sources) if one.search is not None][:1]
    if best.has_stages:  # what a search proves is of plans without stages
        bounds = [wanted.work.at_least(wanted.placement.size, 1, 1)]
    bound = min([*bounds, predicted.seconds + predicted.hidden])
    gap = gap_of(predicted, bound)
    name = best.name if best.has_stages or not best.has_time else "auto"
    return replace(
        best, name=name, search=Search(bound, gap, found.tried, wanted.limit, wanted.budget.left_out)
    )


def _predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted
