"""The rows of a batch: how devices cut them, and whether they can be cut in time as well."""

from __future__ import annotations

import math

from ..errors import PlanError
from ..graph.step_graph import Role
from ..sbp.layout import Split
from .plan import Plan
from .template import batch_size


def rows_of_rank(plan: Plan) -> tuple[int, int] | None:
    """The batch's rows, and in how many equal parts the devices cut them; None without a batch."""
    rows = batch_size(plan.graph)
    if rows is None:
        return None
    parts = 1
    for one in plan.graph.inputs:
        if one.role is Role.BATCH and one.meta.shape and one.meta.shape[0] == rows:
            split = 1
            for sbp, size in zip(plan.inputs[one.name], plan.placement.shape, strict=True):
                split *= size if isinstance(sbp, Split) and sbp.dim == 0 else 1
            parts = max(parts, split)
    return rows, parts


def check_rows(plan: Plan, num: int) -> None:
    found = rows_of_rank(plan)
    if found is None:
        raise PlanError(f"micro_batches={num}: {plan.graph.name} takes no batch that could be cut")
    rows, parts = found
    if rows % parts:
        raise PlanError(
            f"micro_batches={num}: the batch's {rows} rows lie unevenly on {parts} parts of the devices, so "
            f"they cannot be cut once more; give a batch of a multiple of {parts} rows, or micro_batches=1"
        )
    if num > rows // parts:
        each = f" on each of {parts} parts of the devices" if parts > 1 else ""
        raise PlanError(
            f"micro_batches={num} is more than the batch's {rows // parts} rows{each}; give at most that many"
        )


def check_parts(plan: Plan, num: int, axes: frozenset[int]) -> None:
    """Sees to it that rows which devices cut in the middle of the step can be cut so in time as well."""
    found = rows_of_rank(plan)
    assert found is not None
    rows, parts = found[0], math.prod(plan.placement.shape[axis] for axis in axes) * found[1]
    if rows % (parts * num):
        raise PlanError(
            f"micro_batches={num}: plan {plan.name!r} cuts the batch's {rows} rows in {parts} parts within "
            f"the step, each of which must have as many in every micro-batch; give a batch of a multiple of "
            f"{parts * num} rows, another plan, or micro_batches=1"
        )
