"""What `monoflow plan` shows: the layout of parameters by pattern, and what a step will cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ..config import SETTINGS
from ..plan.cost import Machine
from ..plan.overview import layout_rows, overview
from ..plan.plan import Plan
from ..plan.predict import Prediction
from ..plan.tabulate import duration, size
from ..sbp.layout import text

_MOST_ROWS = 40


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made for.

    Attributes:
        others: other plans for the same: name -> seconds of a step, and bytes at the peak.
    """

    plan: Plan
    predicted: Prediction
    machine: Machine
    others: Mapping[str, tuple[float, int]]

    @property
    def limit(self) -> int:
        """Bytes that a rank has."""
        return self.machine.device.capacity


def report(done: Planned) -> RenderableType:
    """All of it, for the terminal."""
    plan, predicted = done.plan, done.predicted
    mesh = " x ".join(f"{size}" for size in plan.placement.shape)
    num_nodes = len(plan.graph.graph.nodes)
    head = (
        f"{plan.graph.name}: plan {plan.name!r} on {mesh} of {done.machine.device.name}, {num_nodes:,} nodes"
        + f", {plan.micro_batches} micro-batches" * plan.has_time
    )
    parts = [head, "", _layouts(plan), "", _step(done)]
    if predicted.peak_bytes > done.limit:
        over = size(predicted.peak_bytes - done.limit)
        parts.append(f"[bold red]it does not fit: {over} more than {size(done.limit)}")
    if plan.search is not None:
        parts.append(f"by these prices no plan is more than {plan.search.gap:.1%} faster before moves hide")
        if plan.search.left_out:
            parts.append(
                f"{plan.search.left_out} plans were not looked at: that would take more than "
                f"MONOFLOW_PLAN_SECONDS={SETTINGS.plan_seconds} of work"
            )
    if done.others:
        parts += ["", _compared(done)]
    if plan.unruled:
        parts.append(f"[yellow]{len(plan.unruled)} ops have no rule and run whole: {_some(plan.unruled)}")
    return Group(*parts)


def _layouts(plan: Plan) -> Table:
    axes = [f"{axis} ({n})" for axis, n in zip(plan.placement.axes, plan.placement.shape, strict=True)]
    table = _table("parameters", "", "shape", *axes, "optimizer state", left=(0, 2))
    rows = layout_rows(plan)
    for row in rows[:_MOST_ROWS]:
        count = f"x {row.count}" if row.count > 1 else ""
        state = "" if row.state is None else "same" if row.state == row.layout else text(row.state)
        table.add_row(row.pattern, count, row.meta, *map(str, row.layout), state)
    if len(rows) > _MOST_ROWS:
        rest = rows[_MOST_ROWS:]
        table.add_row(f"and {sum(row.count for row in rest)} more", "", size(sum(r.num_bytes for r in rest)))
    return table


def _step(done: Planned) -> Table:
    """Time, memory and bytes, side by side with what they are made of."""
    predicted = done.predicted
    table = _table("a step of one rank", "", "of which", left=(0, 2))
    kinds = {kind for by_kind in predicted.seconds_by.values() for kind in by_kind}
    spent = {kind: predicted.seconds_of(kind) for kind in kinds}
    table.add_row("time", duration(predicted.seconds), _parts(spent, duration))
    table.add_row("memory at its peak", size(predicted.peak_bytes), _parts(predicted.peak_split, size))
    table.add_row("", f"of {size(done.limit)}", f"at {predicted.peak_item}")
    table.add_row("sent", size(sum(predicted.sent.values())), _parts(predicted.sent, size))
    counts = _parts(predicted.collectives, str)
    table.add_row("collectives", str(sum(predicted.collectives.values())), counts)
    return table


def _compared(done: Planned) -> Table:
    table = _table("compared", "time", "", "memory", "")
    own = done.predicted.seconds
    for name, seconds, peak in _all_plans(done):
        fits = "" if peak <= done.limit else "[red]does not fit"
        ratio = f"{seconds / own:.2f} x" if own else ""
        style = "bold" if name == done.plan.name else ""
        table.add_row(name, duration(seconds), ratio, size(peak), fits, style=style)
    return table


def _all_plans(done: Planned) -> Iterator[tuple[str, float, int]]:
    own = {done.plan.name: (done.predicted.seconds, done.predicted.peak_bytes)}
    for name, (seconds, peak) in sorted((own | dict(done.others)).items(), key=lambda item: item[1]):
        yield name, seconds, peak


def as_data(done: Planned) -> dict[str, Any]:
    """What is shown, the layout of every module, and the step item by item, as JSON has it."""
    return overview(done.plan, done.predicted, done.machine, done.others)


def _parts(amounts: Mapping[str, Any], shown: Any) -> str:
    ordered = sorted(amounts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {shown(amount)}" for name, amount in ordered if amount)


def _some(names: Mapping[str, Any], most: int = 5) -> str:
    shown = list(names)[:most]
    return ", ".join(shown) + (", ..." if len(names) > most else "")


def _table(*columns: str, left: tuple[int, ...] = (0,)) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", overflow="fold", no_wrap=i == 1)
    return table
