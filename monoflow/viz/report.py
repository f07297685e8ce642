"""The report of a plan: one file to open in a browser."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..plan.cost import REFERENCE
from ..plan.overview import overview
from ..plan.plan import Plan
from ..plan.predict import predict
from .plan_page import page


def report(plan: Plan, path: str | Path, others: Mapping[str, tuple[float, int]] | None = None) -> None:
    """Writes a plan as one page without scripts, that fetches nothing.

    Args:
        path: the file, such as "plan.html".
        others: other plans of the same step to compare with: name -> seconds of a step, and bytes at the
            peak. Those that a search tried are shown anyway.
    """
    machine = (plan.machine or REFERENCE).on(plan.placement.num_axes)
    predicted = plan.predicted or predict(plan, machine)
    tried = plan.search.tried if plan.search is not None else {}
    Path(path).write_text(page(overview(plan, predicted, machine, {**tried, **(others or {})})))
