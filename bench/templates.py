"""The automatic plan against every template, by the same prices: no run, no devices.

    python bench/templates.py [--mesh 2 --mesh 4x8] [--device h100]

Every example's model on meshes from 2 to 128 devices; the templates on all axes, and pipelines along the
outermost one with up to 16 micro-batches. Ends with an error if one is predicted to be faster than the plan
that `auto` finds, a pipeline by more than the margin that it has to be faster by.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated

import numpy as np
import typer
from cases import CASES
from rich.console import Console
from rich.progress import track
from rich.table import Table

from monoflow.errors import PlanError
from monoflow.graph.step_graph import StepGraph
from monoflow.mesh import Placement, placement
from monoflow.plan.cost import Machine
from monoflow.plan.devices import machine_for
from monoflow.plan.planner import plan_step
from monoflow.plan.template import PIPELINE, TEMPLATES

_MESHES = ["2", "4", "2x2", "8", "4x8", "16x8"]
_ALLOWED = 1e-3  # of the seconds: choices that the search takes for equal
_MARGIN = 0.01  # a pipeline is taken only where it is faster by that


def grid(text: str) -> Placement:
    """A placement from the sizes of its axes."""
    shape = tuple(map(int, text.split("x")))
    return placement("cuda", np.arange(math.prod(shape)).reshape(shape).tolist())


def pipelines(graph: StepGraph, where: Placement, machine: Machine) -> dict[str, float]:
    """Seconds of pipelines along the outermost axis."""
    found: dict[str, float] = {}
    for names in itertools.product(TEMPLATES, repeat=where.num_axes - 1):
        name = " x ".join([PIPELINE, *names])
        for num in (1, 2, 4, 8, 16):
            try:
                made = plan_step(graph, where, name, machine=machine, micro_batches=num)
            except PlanError:  # too few layers or rows, or an op needs the whole batch
                break
            assert made.predicted is not None
            found[f"{name}, {num} micro-batches"] = made.predicted.seconds
    return found


def main(
    mesh: Annotated[list[str] | None, typer.Option(help="sizes of the axes, outermost first")] = None,
    model: Annotated[list[str] | None, typer.Option(help="which examples")] = None,
    device: Annotated[str, typer.Option(help="a shipped table")] = "h100",
) -> None:
    """Plans every example on every mesh by search and by every template, and compares what is predicted."""
    table = Table("model", "mesh", "auto ms", "gap", "best template", "its ms", "auto / best")
    worst = 0.0
    for name, text in track(list(itertools.product(model or CASES, mesh or _MESHES)), "planning"):
        where = grid(text)
        step, batch = CASES[name]("data", placement("cpu", [0]))
        graph, machine = step.capture(batch), machine_for(where, device)
        auto = plan_step(graph, where, "auto", machine=machine, refine=True)
        assert auto.predicted is not None and auto.search is not None
        found: dict[str, float] = {}
        for names in itertools.product(TEMPLATES, repeat=where.num_axes):
            made = plan_step(graph, where, " x ".join(names), machine=machine)
            assert made.predicted is not None
            found[made.name] = made.predicted.seconds
        staged = pipelines(graph, where, machine)
        worst = max(
            worst,
            auto.predicted.seconds / min(found.values()),
            auto.predicted.seconds / min(staged.values(), default=math.inf) * (1 - _MARGIN),
        )
        found |= staged
        best = min(found, key=found.__getitem__)
        ratio = auto.predicted.seconds / found[best]
        table.add_row(
            name, text, f"{1e3 * auto.predicted.seconds:.3f}", f"{auto.search.gap:.2%}", best,
            f"{1e3 * found[best]:.3f}", f"{ratio:.3f}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    if worst > 1 + _ALLOWED:
        console.print(f"a template is faster: auto takes {worst:.4f} of its time")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
