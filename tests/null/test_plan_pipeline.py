"""`auto` and pipelines: against every pipeline there is, under limits, and where there shall be none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import monoflow as flow
from monoflow import compiler
from monoflow.boxing import LinkCost
from monoflow.errors import LayoutError, PlanError
from monoflow.graph.step_graph import StepGraph
from monoflow.mesh import Placement, placement
from monoflow.plan.batches import walked
from monoflow.plan.by_stage import stages_of
from monoflow.plan.choose import best_of
from monoflow.plan.cost import Device, Machine
from monoflow.plan.exact import require_exact
from monoflow.plan.pipelines import Work, repeated_layers, stage_counts, staged_plan, stages_at
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.predict import Prediction, predict
from monoflow.plan.search import search
from monoflow.plan.template import TEMPLATES
from monoflow.sbp.layout import At, B, S, Sbp
from monoflow.sbp.sources import RuleBook
from monoflow.step import Step, planning

RULES = RuleBook()
WIDTH, ROWS, LAYERS = 128, 32, 8
TWO, FOUR = placement("cpu", [0, 1]), placement("cpu", [0, 1, 2, 3])
GRID = placement("cpu", [[0, 1], [2, 3]], axes=("outer", "inner"))
#: Work takes a while, and the outermost axis is so slow that gradients are dear.
DEVICE = Device("slow", {"float32": 1e9}, 1e9, 1e-7, 1 << 40)
SLOW, FAST = LinkCost(1e-6, 1e-7, 1e-6), LinkCost(1e-6, 1e-10, 1e-6)


def deep(layers: int = LAYERS, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def step_of(model: nn.Module, **options: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer, **options)
    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), torch.zeros_like(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return step_of(deep()).capture(torch.randn(ROWS, WIDTH))


def predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted


def every_pipeline(graph: StepGraph, where: Placement, machine: Machine) -> Iterator[Plan]:
    """By hand: the outermost axis in stages and what is left, templates on the rest, micro-batches."""
    machine = machine.on(where.num_axes)
    for size in (2, 4):
        left, none = divmod(where.shape[0], size)
        if none or not left:
            continue
        shape = (size, left, *where.shape[1:]) if left > 1 else (size, *where.shape[1:])
        links = machine.links[:1] * (2 if left > 1 else 1) + machine.links[1:]
        grid = placement(where.device_type, np.reshape(where.ranks, shape).tolist())
        for names in itertools.product(TEMPLATES, repeat=len(shape) - 1):
            name, own = " x ".join(["pipeline", *names]), Machine(machine.device, links)
            whole = plan_step(graph, grid, name, machine=own, rules=RULES)
            for num in (1, 2, 4, 8, 16):
                try:
                    yield walked(whole, num, RULES)
                except PlanError:  # more than a rank has rows
                    continue


# --- the choice ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chosen(graph: StepGraph) -> Plan:
    return plan_step(graph, FOUR, "auto", machine=Machine(DEVICE, (SLOW,)), rules=RULES, refine=True)


def test_no_pipeline_and_no_template_is_faster(graph: StepGraph, chosen: Plan) -> None:
    machine, plan = Machine(DEVICE, (SLOW,)), chosen
    assert plan.has_stages and plan.placement.shape == (2, 2) and plan.micro_batches > 1
    pipelines = list(every_pipeline(graph, FOUR, machine))
    best = min(pipelines, key=lambda one: predicted(one).seconds)
    assert predicted(plan).seconds <= predicted(best).seconds * (1 + 1e-9)
    templates = [plan_step(graph, FOUR, name, machine=machine, rules=RULES) for name in TEMPLATES]
    for one in (*templates, search(graph, FOUR, machine, {}, RULES)):
        assert predicted(plan).seconds < 0.9 * predicted(one).seconds
    # What is said of it: the very prediction, the searched plan beside it, and a bound that all keep.
    assert plan.machine is not None and plan.search is not None
    assert predict(plan, plan.machine).seconds == predicted(plan).seconds
    own = f"{plan.name}, {plan.micro_batches} micro-batches"
    assert plan.search.tried[own] == (predicted(plan).seconds, predicted(plan).peak_bytes)
    assert "auto" in plan.search.tried
    work = Work.of(graph, DEVICE)
    for one in pipelines:
        bound = work.at_least(4, one.placement.shape[0], one.micro_batches)
        assert plan.search.bound <= bound <= predicted(one).seconds, f"{one.name} {one.micro_batches}"
    require_exact(plan, RULES, "the plan")
    assert f"{plan.name} of step on" in plan.text() and f"{plan.micro_batches} micro-batches" in plan.text()


def test_other_schedules_of_the_best_pipeline_are_looked_at(graph: StepGraph, chosen: Plan) -> None:
    assert chosen.search is not None
    own = chosen.name.replace(" in 4 stages", "").replace(", zero-bubble", "")
    head, rest = own[: len("pipeline of 2")], own[len("pipeline of 2") :]
    count = f", {chosen.micro_batches} micro-batches"
    tried = {
        form: chosen.search.tried[f"{head}{form}{rest}{count}"][0]
        for form in ("", ", zero-bubble", " in 4 stages", " in 4 stages, zero-bubble")
    }
    assert tried[", zero-bubble"] < tried[""]
    assert tried[" in 4 stages, zero-bubble"] < tried[" in 4 stages"]
    assert predicted(chosen).seconds <= min(tried.values()) / 0.99
    assert stages_of(chosen).num == (4 if " in 4 stages" in chosen.name else 2)
    assert chosen.zero_bubble == (", zero-bubble" in chosen.name)


def test_stages_are_found_from_the_ranks_that_modules_lie_at(graph: StepGraph) -> None:
    def of(*ranks: int) -> tuple[list[int], int]:
        found, num = stages_at(graph, {f"{layer}.0": rank for layer, rank in enumerate(ranks)}, 2)
        return list(found.values()), num

    assert of(0, 0, 0, 0, 1, 1, 1, 1) == ([0, 0, 0, 0, 1, 1, 1, 1], 2)
    assert of(0, 0, 1, 1, 0, 0, 1, 1) == ([0, 0, 1, 1, 2, 2, 3, 3], 4)
    assert of(0, 0, 1, 1, 0, 0) == ([0, 0, 1, 1, 2, 2], 4)


def test_across_a_slow_outer_axis_no_pipeline_is_clearly_faster(graph: StepGraph) -> None:
    machine = Machine(DEVICE, (SLOW, FAST))
    plan = plan_step(graph, GRID, "auto", machine=machine, rules=RULES, refine=True)
    best = min(predicted(one).seconds for one in every_pipeline(graph, GRID, machine))
    assert predicted(plan).seconds * (1 - (not plan.has_stages) * 0.1) <= best * (1 + 1e-9)


def test_the_same_plan_every_time_and_from_its_file(graph: StepGraph, chosen: Plan) -> None:
    again = plan_step(graph, FOUR, "auto", machine=Machine(DEVICE, (SLOW,)), refine=True)
    assert chosen.dumps() == again.dumps()
    read = Plan.parse(again.dumps(), graph, "a text")
    assert read.machine is not None
    assert predict(read, read.machine).seconds == predicted(again).seconds


def test_without_a_clear_gain_there_is_no_pipeline(graph: StepGraph) -> None:
    plain = plan_step(graph, TWO, "data", machine=Machine(DEVICE, (FAST,)))
    staged = plan_step(graph, TWO, "pipeline", machine=Machine(DEVICE, (FAST,)), micro_batches=4)

    def first(seconds: float, device_type: str) -> str:
        plans = [
            replace(
                one,
                placement=replace(TWO, device_type=device_type),
                predicted=replace(predicted(one), seconds=own),
            )
            for one, own in ((plain, 1.0), (staged, seconds))
        ]
        assert best_of(plans).name == best_of(plans[::-1]).name
        return best_of(plans).name

    assert first(0.92, "cpu") == "data" and first(0.88, "cpu") == "pipeline"
    assert first(0.995, "cuda") == "data" and first(0.98, "cuda") == "pipeline"
    auto = plan_step(graph, FOUR, "auto", machine=Machine(DEVICE, (FAST,)), refine=True)
    assert not auto.has_stages and auto.micro_batches == 1


def test_one_device_has_no_stages_and_one_micro_batch(graph: StepGraph) -> None:
    plan = plan_step(graph, placement("cpu", [0]), "auto", machine=Machine(DEVICE, (SLOW,)), refine=True)
    assert plan.micro_batches == 1 and not plan.has_stages
    assert plan.search is not None and list(plan.search.tried) == ["auto"]


def test_stages_are_powers_of_two_of_an_axis_up_to_the_layers(graph: StepGraph) -> None:
    def counts(size: int, refine: bool) -> list[int]:
        return list(stage_counts(graph, placement("cpu", list(range(size))), refine))

    assert repeated_layers(graph) == LAYERS
    assert counts(16, True) == [2, 4, 8] and counts(16, False) == []
    assert counts(4, True) == [2, 4] and counts(4, False) == [4]
    assert counts(6, True) == [2, 6] and counts(3, False) == [3] and counts(1, True) == []


# --- limits --------------------------------------------------------------------------------------------


def test_a_limit_that_needs_pipelines_or_micro_batches_is_kept_by_the_fastest_that_does() -> None:
    graph = step_of(deep(4, 64)).capture(torch.randn(256, 64))
    machine = Machine(DEVICE, (FAST,))
    spread = [plan_step(graph, TWO, name, machine=machine, rules=RULES) for name in TEMPLATES]
    staged = plan_step(graph, TWO, "pipeline", machine=machine, rules=RULES)
    limit = predicted(walked(staged, 8, RULES)).peak_bytes
    with pytest.raises(PlanError, match="holds at most"):
        plan_step(graph, TWO, "auto", machine=machine, limit=limit, micro_batches=1)
    plan = plan_step(graph, TWO, "auto", machine=machine, limit=limit)
    assert predicted(plan).peak_bytes <= limit and plan.micro_batches > 1
    assert plan.search is not None and plan.search.limit == limit and 0 <= plan.search.gap < 1
    for one in (*spread, staged):
        for num in (1, 2, 4, 8, 16):
            other = predicted(walked(one, num, RULES))
            slower = predicted(plan).seconds * (1 - 0.1 * one.has_stages) <= other.seconds * (1 + 1e-9)
            assert slower or other.peak_bytes > limit, f"{one.name}, {num}"


def test_under_a_limit_micro_batches_are_taken_where_they_cost_less_than_computing_again() -> None:
    graph = step_of(deep(4, 32)).capture(torch.randn(1024, 32))
    where, machine = placement("cpu", [0]), Machine(replace(DEVICE, launch=0.0), (FAST,))
    limit = int(0.8 * predicted(plan_step(graph, where, "data", machine=machine)).peak_bytes)
    again = search(graph, where, machine, {}, RULES, limit)
    plan = plan_step(graph, where, "auto", machine=machine, limit=limit)
    assert predicted(plan).peak_bytes <= limit and plan.micro_batches > 1
    assert predicted(plan).seconds < predicted(again).seconds


# --- what is stored already ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), [("batch.0", S(0)), ("0.0.weight", B)])
def test_a_pin_along_the_axis_keeps_stages_off_it(graph: StepGraph, name: str, layout: Sbp) -> None:
    machine = Machine(DEVICE, (SLOW,))
    pinned = plan_step(graph, FOUR, "auto", {name: (layout,)}, machine, refine=True)
    assert not pinned.has_stages and pinned.inputs[name] == (layout,)
    with pytest.raises(LayoutError, match="matches no parameter"):
        plan_step(graph, FOUR, "auto", {"nothing": (S(0),)}, machine)


def test_another_batch_runs_by_the_stages_that_hold_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "machine_for", lambda where: Machine(DEVICE, (SLOW,) * where.num_axes))
    monkeypatch.setattr(planning, "_rectangles", lambda *_: ())
    with flow.simulate(4):
        step = step_of(deep())
        losses = [step(torch.ones(ROWS, WIDTH)).item()]
        first = step.plan
        losses += [step(torch.ones(ROWS // 2, WIDTH)).item() for _ in range(2)]
        second = step.plan
    state = [name for name in first.inputs if name.endswith(("weight", "bias"))]
    assert first.has_stages and second.placement == first.placement and len(state) == 2 * LAYERS
    assert {first.inputs[name][0] for name in state} == {At(0), At(1)}
    assert [first.inputs[name] for name in state] == [second.inputs[name] for name in state]
    alone = step_of(deep())
    expected = [alone(torch.ones(rows, WIDTH)).item() for rows in (ROWS, ROWS // 2, ROWS // 2)]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_statistics_of_a_ranks_own_rows_are_not_cut_further() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(4)))
    step = step_of(model, batch_stats="local")
    graph = step.capture(torch.randn(ROWS, 16))
    plan = plan_step(graph, TWO, "auto", machine=Machine(DEVICE, (SLOW,)))
    assert not plan.has_stages and plan.micro_batches == 1


def test_stages_before_a_plan_leave_its_layouts(graph: StepGraph) -> None:
    source = plan_step(graph, GRID, "data x tensor", machine=Machine(DEVICE, (SLOW, FAST)))
    plan = staged_plan(source, 2)
    assert plan.placement == GRID
    for name, layout in source.inputs.items():
        assert plan.inputs[name][1] == layout[1]
        assert isinstance(plan.inputs[name][0], At) or plan.inputs[name][0] == B
    line = plan_step(graph, FOUR, "zero", machine=Machine(DEVICE, (SLOW,)))
    plan = staged_plan(line, 2)
    assert plan.placement.axes == ("stage", "axis0") and plan.placement.shape == (2, 2)
    assert plan.placement.ranks == FOUR.ranks and plan.machine is not None
    assert plan.machine.links == (SLOW, SLOW)
    assert all(plan.inputs[name][1] == layout[0] for name, layout in line.inputs.items())
