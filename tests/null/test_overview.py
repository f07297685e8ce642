"""A plan as data to show: modules by layout, and the step item by item, as it is predicted."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch
from torch import nn

from monoflow.graph.step_graph import StepGraph
from monoflow.plan.cost import REFERENCE
from monoflow.plan.devices import machine_for
from monoflow.plan.overview import Cell, ModuleRow, layout_rows, module_rows, overview, timeline
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.sbp.layout import S

from .test_plan import FOUR, GRID, TWO, Mlp, captured, mlp_graph, trained


def stacked() -> StepGraph:
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    return trained(model, torch.randn(6, 8), torch.randn(6, 8))


def named(plan: Plan) -> dict[str, ModuleRow]:
    return {row.module: row for row in module_rows(plan)}


def test_modules_alike_are_one_row_in_the_order_of_forward() -> None:
    rows = module_rows(plan_step(stacked(), TWO, "zero"))
    assert [(row.module, row.count) for row in rows] == [("*.up", 3), ("*", 3), ("*.down", 3), ("", 1)]
    up, between, _, loss = rows
    assert up.parameter == Cell("weight", "float32[16, 8]", ("S(0)",))
    assert up.activation == Cell("addmm", "float32[6, 16]", ("S(0)",))  # the product, not the weight's view
    assert up.gradient == Cell("weight", "float32[16, 8]", ("S(0)",))
    assert (between.parameter, between.gradient) == (None, None)
    assert between.activation is not None and between.activation.name == "tanh"
    assert loss.parameter is None


def test_modules_that_lie_otherwise_are_rows_of_their_own() -> None:
    plan = plan_step(stacked(), TWO, "data", {"1.up.weight": (S(0),)})
    rows = [row for row in module_rows(plan) if row.module == "*.up"]
    assert sorted((row.count, row.parameter.axes) for row in rows if row.parameter) == [
        (1, ("S(0)",)),
        (2, ("B",)),
    ]


def test_gradients_are_as_the_optimizer_takes_them() -> None:
    data, zero = (named(plan_step(mlp_graph(), GRID, name)) for name in ("data", "zero x tensor"))
    assert data["up"].gradient == Cell("weight", "float32[16, 8]", ("B", "B"))
    assert zero["up"].gradient is not None and zero["up"].parameter is not None
    assert zero["up"].gradient.axes == zero["up"].parameter.axes == ("S(1)", "S(0)")


def test_a_step_without_updates_has_no_gradients() -> None:
    model = Mlp()
    plan = plan_step(captured(model, lambda x: model(x).sum(), torch.randn(6, 8)), TWO, "data")
    assert all(row.gradient is None for row in module_rows(plan))
    assert named(plan)["up"].parameter == Cell("weight", "float32[16, 8]", ("B",))


@pytest.mark.parametrize("name", ["data", "zero", "tensor x zero", "auto"])
def test_the_timeline_is_the_prediction(name: str) -> None:
    """Item by item it adds up to what is predicted by phase and lane, and memory has a row for each."""
    machine = machine_for(GRID, "a100-40gb")
    plan = plan_step(stacked(), GRID, name, machine=machine)
    assert plan.predicted is not None
    items = list(timeline(plan, machine))
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for lane, phase, seconds, _ in items:
        spent[phase][lane] += seconds
    assert spent.keys() == plan.predicted.seconds_by.keys()
    for phase, kinds in plan.predicted.seconds_by.items():
        assert spent[phase] == pytest.approx(kinds, rel=1e-9, abs=1e-15)
    assert len(items) == len(plan.predicted.memory.held)
    assert items[plan.predicted.peak_at][3] in plan.predicted.peak_item


def test_uneven_shards_cost_what_is_predicted_too() -> None:
    model = nn.Linear(7, 5)
    graph = trained(model, torch.randn(6, 7), torch.randn(6, 5))
    machine = machine_for(FOUR, "h100")
    plan = plan_step(graph, FOUR, "zero", machine=machine)
    assert plan.predicted is not None
    total = sum(seconds for _, _, seconds, _ in timeline(plan, machine))
    assert total == pytest.approx(plan.predicted.seconds, rel=1e-9)


def test_all_of_it_is_json_and_says_what_was_compared() -> None:
    machine = machine_for(GRID, "h100")
    plan = plan_step(stacked(), GRID, "auto", machine=machine, limit=10**6)
    assert plan.predicted is not None and plan.search is not None
    found = overview(plan, plan.predicted, machine, {"zero": (1.0, 5), "fast": (1e-9, 7)})
    assert json.loads(json.dumps(found)) == found
    assert found["limit_bytes"] == 10**6 and found["mesh"] == {"outer": 2, "inner": 2}
    assert list(found["compared"]) == ["fast", "auto", "zero"]  # by time
    assert found["compared"]["auto"]["peak_bytes"] == plan.predicted.peak_bytes
    assert found["search"] == {"bound": plan.search.bound, "gap": plan.search.gap}
    parameters = {(row["pattern"], row["count"]) for row in found["parameters"]}
    assert ("*.up.weight", 3) in parameters and len(found["timeline"]) == len(plan.predicted.memory.held)


def test_a_machine_without_end_is_no_limit() -> None:
    plan = plan_step(mlp_graph(), TWO, "data")
    assert plan.predicted is not None
    found = overview(plan, plan.predicted, REFERENCE, {})
    assert found["limit_bytes"] is None and found["search"] is None


def test_parameters_are_by_pattern_with_their_bytes() -> None:
    rows = layout_rows(plan_step(stacked(), TWO, "zero"))
    assert [(row.pattern, row.count, row.num_bytes) for row in rows[:2]] == [
        ("*.up.weight", 3, 3 * 128 * 4),
        ("*.down.weight", 3, 3 * 128 * 4),
    ]
    assert all(row.state == row.layout for row in rows)
