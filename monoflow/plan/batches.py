"""How many micro-batches: as many as are asked for, or the fewest with which a plan fits a limit of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import PlanError
from ..sbp.registry import OpRule
from .plan import Plan, Search
from .predict import predict
from .rows import rows_of_rank
from .time import micro_batched


def walked(plan: Plan, num: int, rules: Mapping[Callable, OpRule]) -> Plan:
    """A plan with its batch in `num` micro-batches, and what a step then costs.

    Raises:
        PlanError: the batch cannot be cut so, or an op needs all of it.
    """
    if num == 1:
        return plan
    made = micro_batched(plan, num, rules)
    assert plan.machine is not None
    return replace(made, predicted=predict(made, plan.machine))


def fewest(plans: Sequence[Plan], limit: int, rules: Mapping[Callable, OpRule]) -> Plan | None:
    """The fastest plan that holds at most `limit` bytes with the fewest of 2, 4, 8, ... micro-batches.

    Args:
        plans: of the whole batch, to be walked.
    """
    for num in _doubled(plans):
        found = fastest(plans, num, limit, rules)
        if isinstance(found, Plan):
            return found
    return None


def fastest(
    plans: Sequence[Plan], num: int, limit: int, rules: Mapping[Callable, OpRule]
) -> Plan | PlanError | None:
    """The fastest of some plans with `num` micro-batches that holds at most `limit` bytes.

    Returns:
        The plan; None if all hold more; why the first cannot be walked, if none can.
    """
    made: list[Plan] = []
    refused: list[PlanError] = []
    for plan in plans:
        try:
            made.append(walked(plan, num, rules))
        except PlanError as error:
            refused.append(error)
    fitting = [one for one in made if _predicted(one).peak_bytes <= limit]
    if not fitting:
        return None if made else refused[0]
    best = min(fitting, key=lambda one: _predicted(one).seconds)
    tried = {
        f"{one.name}, {num} micro-batches": (_predicted(one).seconds, _predicted(one).peak_bytes)
        for one in made
    }
    bound = min((one.search.bound for one in plans if one.search is not None), default=0.0)
    gap = 1 - bound / _predicted(best).seconds
    return replace(best, name="auto", search=Search(bound, gap, tried, limit))


def _predicted(plan: Plan):
    assert plan.predicted is not None
    return plan.predicted


def _doubled(plans: Sequence[Plan]) -> Iterator[int]:
    """2, 4, 8, ... up to the rows that a rank has of the batch."""
    counts = [rows // parts for rows, parts in filter(None, map(rows_of_rank, plans))]
    num = 2
    while num <= max(counts, default=0):
        yield num
        num *= 2
