"""`monoflow plan`: the layout that a script's step would get on a machine that need not be here."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from ..config import SETTINGS, parse_memory
from ..errors import PlacementError, PlanError
from ..graph.step_graph import StepGraph
from ..mesh import Placement, placement
from ..plan.cost import Machine
from ..plan.devices import machine_for
from ..plan.plan import Plan
from ..plan.planner import AUTO, plan_step
from ..plan.predict import Prediction, predict
from ..plan.sheets import DEVICES
from ..plan.template import TEMPLATES
from ..viz.plan_page import page
from .plan_report import Planned, as_data, report
from .script import ScriptFailed, first_step


@dataclass(frozen=True)
class Request:
    """What to plan, for what.

    Attributes:
        script, args: the script and its own arguments.
        device: a shipped device; None for this machine.
        mesh: sizes of the axes, outermost first, such as "16x8".
        link: a shipped link for every axis; None for the device's own.
        memory: bytes that a rank may use, such as "80GB"; None for all that the device has.
        plan: the plan; None for what the script says.
        compare: whether to plan the templates too.
        html, save, json: files to write: a report, the plan, and all that is printed as data.
    """

    script: str
    args: tuple[str, ...]
    device: str | None = None
    mesh: str = "1"
    link: str | None = None
    memory: str | None = None
    plan: str | None = None
    compare: bool = True
    html: Path | None = None
    save: Path | None = None
    json: Path | None = None


def plan(request: Request, console: Console) -> int:
    """Plans the first step that a script calls, prints what was found and writes the files asked for.

    Returns:
        The exit status: 1 if the script raised, whose traceback is printed then.

    Raises:
        FlowError: the request makes no sense, the script calls no step, or no plan fits.
    """
    where = parse_mesh(request.mesh, _device_type(request.device))
    capacity = parse_memory(request.memory, "--memory ") if request.memory is not None else None
    machine = machine_for(where, request.device, request.link, capacity)
    try:
        first = first_step(request.script, request.args, where)
    except ScriptFailed as failed:
        sys.stderr.write(str(failed))
        return 1
    name = request.plan or first.plan or AUTO
    with console.status(f"planning {first.graph.name}"):
        made, predicted = _planned(first.graph, where, name, first.pins, machine)
        others = _others(first.graph, where, made, first.pins, machine) if request.compare else {}
    done = Planned(made, predicted, machine, others)
    console.print(report(done))
    if request.save is not None:
        made.save(request.save)
    if request.json is not None:
        request.json.write_text(json.dumps(as_data(done), indent=1))
    if request.html is not None:
        request.html.write_text(page(as_data(done)))
    return 0


def _planned(
    graph: StepGraph, where: Placement, name: str, pins: Mapping[str, tuple], machine: Machine
) -> tuple[Plan, Prediction]:
    made = plan_step(
        graph,
        where,
        name,
        pins,
        machine,
        limit=machine.device.capacity,
        refine=True,
        seconds=SETTINGS.plan_seconds,
    )
    return made, made.predicted or predict(made, machine)


def _others(
    graph: StepGraph, where: Placement, made: Plan, pins: Mapping[str, tuple], machine: Machine
) -> dict[str, tuple[float, int]]:
    """Other plans to compare with: those that the search tried, and the templates."""
    found = dict(made.search.tried) if made.search is not None else {}
    for name in templates_for(where):
        if name == made.name or name in found:
            continue
        try:
            _, predicted = _planned(graph, where, name, pins, machine)
        except PlanError:
            continue  # the template does not suit the model
        found[name] = predicted.seconds, predicted.peak_bytes
    return found


def templates_for(where: Placement) -> list[str]:
    """The templates for a placement: each on all axes, and the products of two different ones on two."""
    names = list(TEMPLATES)
    if where.num_axes == 2:
        names += [f"{a} x {b}" for a in TEMPLATES for b in TEMPLATES if a != b]
    return names


def parse_mesh(text: str, device_type: str) -> Placement:
    """A placement from the sizes of its axes, "16x8".

    Raises:
        PlacementError: it is no such list.
    """
    sizes = text.lower().split("x")
    if not all(re.fullmatch(r"[1-9][0-9]*", size.strip()) for size in sizes):
        raise PlacementError(
            f"--mesh {text!r} is not a mesh; write the sizes of its axes, outermost first, such as 8 or 16x8"
        )
    shape = tuple(map(int, sizes))
    axes = ("data",) if len(shape) == 1 else None
    return placement(device_type, np.arange(math.prod(shape)).reshape(shape).tolist(), axes)


def _device_type(device: str | None) -> str:
    if device is not None:
        if device not in DEVICES:
            raise PlanError(f"no table of a device {device!r}; there are {', '.join(DEVICES)}")
        return "cuda"
    here = torch.accelerator.current_accelerator()
    return here.type if here is not None and torch.accelerator.is_available() else "cpu"
