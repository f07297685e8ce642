"""A plan as data to show: parameters by pattern, modules by layout, and the predicted step, item by item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..graph.step_graph import Phase, Role, info_of, is_getitem, metas_of, op_name, source_of, tensor_args
from ..sbp.layout import NdSbp, text
from ..sbp.signature import TensorMeta
from .cost import Machine
from .facts import may_share_memory
from .plan import Plan
from .predict import Prediction, Prices, fullest, item_costs
from .schedule import Op
from .tabulate import pattern_of

_ENDLESS = 1 << 60  # bytes: no limit


@dataclass(frozen=True)
class LayoutRow:
    """Parameters that are named, shaped and laid out alike.

    Attributes:
        pattern: their name with `*` for the numbers in it.
        state: the layout of their optimizer state; None where they have none.
    """

    pattern: str
    meta: str
    layout: NdSbp
    state: NdSbp | None
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Cell:
    """One tensor of a module: what it is, its shape, and its SBP along every axis."""

    name: str
    meta: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class ModuleRow:
    """Modules that are named (but for numbers) and laid out alike.

    Attributes:
        module: the name with `*` for the numbers in it; "" for what lies in no module.
        parameter, activation, gradient: the largest parameter as stored, the largest result of forward, and
            that parameter's gradient as the optimizer takes it; None where there is none.
    """

    module: str
    parameter: Cell | None
    activation: Cell | None
    gradient: Cell | None
    count: int


def overview(
    plan: Plan, predicted: Prediction, machine: Machine, others: Mapping[str, tuple[float, int]]
) -> dict[str, Any]:
    """All that a page shows, as JSON has it: dicts, lists and numbers.

    Args:
        others: other plans of the same step: name -> seconds of a step, and bytes at the peak.
    """
    limit = plan.search.limit if plan.search is not None else 0
    limit = limit or machine.device.capacity
    known = dict(others) | {plan.name: (predicted.seconds, predicted.peak_bytes)}
    compared = sorted(known.items(), key=lambda item: item[1])
    search = plan.search
    return {
        "step": plan.graph.name,
        "plan": plan.name,
        "mesh": dict(zip(plan.placement.axes, plan.placement.shape, strict=True)),
        "micro_batches": plan.micro_batches,
        "device": machine.device.name,
        "limit_bytes": limit if limit < _ENDLESS else None,
        "parameters": [_row_data(row) for row in layout_rows(plan)],
        "modules": [_module_data(row) for row in module_rows(plan.spatial)],
        "predicted": predicted.as_data(),
        "timeline": [
            {"lane": lane, "phase": phase, "seconds": seconds, "name": name}
            for lane, phase, seconds, name in timeline(plan, machine)
        ],
        "compared": {name: {"seconds": s, "peak_bytes": peak} for name, (s, peak) in compared},
        "search": None if search is None else {"bound": search.bound, "gap": search.gap},
        "unruled": dict(plan.unruled),
    }


def _row_data(row: LayoutRow) -> dict[str, Any]:
    return {
        "pattern": row.pattern,
        "meta": row.meta,
        "layout": text(row.layout),
        "axes": [str(one) for one in row.layout],
        "state": text(row.state) if row.state is not None else None,
        "count": row.count,
        "num_bytes": row.num_bytes,
    }


def _module_data(row: ModuleRow) -> dict[str, Any]:
    cells = {"parameter": row.parameter, "activation": row.activation, "gradient": row.gradient}
    return {
        "module": row.module,
        "count": row.count,
        **{
            kind: None if cell is None else {"name": cell.name, "meta": cell.meta, "axes": list(cell.axes)}
            for kind, cell in cells.items()
        },
    }


# --- layouts -------------------------------------------------------------------------------------------


def layout_rows(plan: Plan) -> list[LayoutRow]:
    """Parameters by pattern, those of the most bytes first."""
    states: dict[str, NdSbp] = {}
    for one in plan.graph.inputs:
        if one.role is Role.STATE and one.meta.shape == plan.graph.input_of[one.of].meta.shape:
            states.setdefault(one.of, plan.inputs[one.name])
    groups: dict[LayoutRow, LayoutRow] = {}
    for one in plan.graph.inputs:
        if one.role is Role.PARAM:
            row = LayoutRow(
                pattern_of(one.name), str(one.meta), plan.inputs[one.name], states.get(one.name), 0, 0
            )
            known = groups.get(row, row)
            total = known.num_bytes + one.meta.num_bytes
            groups[row] = replace(known, count=known.count + 1, num_bytes=total)
    return sorted(groups.values(), key=lambda row: -row.num_bytes)


def module_rows(plan: Plan) -> list[ModuleRow]:
    """Modules in the order in which forward meets them, those without an op of their own at the end."""
    results = _largest_results(plan)
    params = _largest_parameters(plan)
    counts: dict[ModuleRow, int] = {}
    for module in dict.fromkeys([*results, *params]):
        name = params.get(module)
        stored = gradient = None
        if name is not None:
            own, meta = name.removeprefix(f"{module}."), str(plan.graph.input_of[name].meta)
            stored = Cell(own, meta, tuple(map(str, plan.inputs[name])))
            laid = _gradient(plan, name)
            gradient = Cell(own, meta, tuple(map(str, laid))) if laid is not None else None
        node, meta = results.get(module, (None, None))
        made = None
        if node is not None:
            axes = tuple(map(str, plan.layouts(node)[0]))
            made = Cell(op_name(node.target).removeprefix("aten.").removesuffix(".default"), str(meta), axes)
        row = ModuleRow(pattern_of(module), stored, made, gradient, 0)
        counts[row] = counts.get(row, 0) + 1
    return [replace(row, count=count) for row, count in counts.items()]


def _largest_results(plan: Plan) -> dict[str, tuple[fx.Node, TensorMeta]]:
    """Per module: its own largest result in forward, the last of equals; views only where all are."""
    found: dict[str, tuple[tuple[bool, int], fx.Node, TensorMeta]] = {}
    for node in plan.graph.calls():
        info, meta = info_of(node), metas_of(node)[0]
        if info.phase is Phase.FORWARD and meta is not None and not is_getitem(node):
            rank = not may_share_memory(node.target), meta.num_bytes
            if info.module not in found or rank >= found[info.module][0]:
                found[info.module] = rank, node, meta
    return {module: (node, meta) for module, (_, node, meta) in found.items()}


def _largest_parameters(plan: Plan) -> dict[str, str]:
    """Per module: the name of its own largest parameter."""
    found: dict[str, str] = {}
    for one in plan.graph.inputs:
        if one.role is Role.PARAM:
            module = one.name.rpartition(".")[0]
            known = found.get(module)
            if known is None or one.meta.num_bytes > plan.graph.input_of[known].meta.num_bytes:
                found[module] = one.name
    return found


def _gradient(plan: Plan, name: str) -> NdSbp | None:
    """The layout in which a parameter's update takes its gradient; None if it is not updated."""
    shape = plan.graph.input_of[name].meta.shape
    for one, node in zip(plan.graph.outputs, plan.graph.results, strict=True):
        if one.replaces == name:
            update, _ = source_of(node)
            if update.op == "placeholder":
                return None
            for source, wanted in zip(tensor_args(update), plan.wanted(update), strict=True):
                meta = metas_of(source)[0]
                if source_of(source)[0].op != "placeholder" and meta is not None and meta.shape == shape:
                    return wanted
    return None


# --- time ----------------------------------------------------------------------------------------------


def timeline(plan: Plan, machine: Machine) -> Iterator[tuple[str, str, float, str]]:
    """The step item by item, as the prediction has it: lane, phase, seconds, and what runs.

    Of several stages it is the one that holds most. What is walked is one item, with the seconds of all
    micro-batches. Lanes are "compute", "local move" and the mesh axes that are sent along.
    """
    prices = Prices(machine)
    walk = fullest(plan, prices)
    for item, cost in zip(walk.made.items, item_costs(plan, walk, prices), strict=True):
        name = item.node.name if isinstance(item, Op) else f"{item.move.kind} of {item.source.name}"
        times = f" x {plan.micro_batches}" if item.walked else ""
        yield cost.kind, cost.phase, cost.seconds, f"{name}{times}"
