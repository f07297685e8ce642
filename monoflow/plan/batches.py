"""A plan in micro-batches: as many as are asked for, or the fewest with which it fits a limit of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..errors import PlanError
from ..sbp.registry import OpRule
from .plan import Plan
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


def in_fewest(
    plan: Plan, limit: int, rules: Mapping[Callable, OpRule], could_be: Callable[[float, float], bool]
) -> Iterator[Plan]:
    """A plan with 2, 4, 8, ... micro-batches, up to the fewest that hold at most `limit` bytes.

    Or to where more of them hold no less: the peak is then not theirs.

    Args:
        plan: of the whole batch, to be walked.
        could_be: whether a plan of so many seconds, faster by such a part, is still looked for. More
            micro-batches are slower.
    """
    assert plan.predicted is not None
    seconds, held, num = plan.predicted.seconds, math.inf, 2
    rows, parts = rows_of_rank(plan) or (0, 1)
    while num <= rows // parts and could_be(seconds, 0.0):
        try:
            made = walked(plan, num, rules)
        except PlanError:
            return
        assert made.predicted is not None
        yield made
        if not limit < made.predicted.peak_bytes < held:
            return
        seconds, held, num = made.predicted.seconds, made.predicted.peak_bytes, 2 * num
