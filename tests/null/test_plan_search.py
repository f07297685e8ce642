"""The search: the optimum where everything can be tried, and what it must find on larger steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monoflow.boxing import LinkCost
from monoflow.errors import PlanError
from monoflow.graph.step_graph import Role, StepGraph, is_getitem
from monoflow.mesh import Placement, placement
from monoflow.plan.cost import REFERENCE, Machine
from monoflow.plan.fold import fold
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.predict import Prediction, predict
from monoflow.plan.problem import Problem
from monoflow.plan.search import Candidate, Space
from monoflow.plan.storages import free_goal
from monoflow.plan.template import TEMPLATES
from monoflow.sbp.layout import B, Split
from monoflow.sbp.rules import RULES

from .test_plan import FOUR, GRID, TWO, captured, trained


def predicted(plan: Plan) -> Prediction:
    assert plan.predicted is not None
    return plan.predicted


def state_bytes(plan: Plan) -> int:
    """Bytes of parameters and optimizer state that a rank stores."""
    split = predicted(plan).peak_split
    return split["parameters"] + split["optimizer state"]


# --- against trying everything -----------------------------------------------------------------------


class Product(nn.Module):
    """A product that gives a scalar, and its weight."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight).sum()


def product_graph(batch: int, rows: int, columns: int) -> StepGraph:
    model = Product(rows, columns)
    return captured(model, lambda x: model(x), torch.randn(batch, rows))


def dot_graph(size: int) -> StepGraph:
    model = nn.Module()
    weight = model.weight = nn.Parameter(torch.randn(size))
    return captured(model, lambda x: (x * weight).sum(), torch.randn(size))


def squared_graph(size: int) -> StepGraph:
    """A whole training step of few nodes."""
    model = nn.Module()
    weight = model.weight = nn.Parameter(torch.randn(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return captured(model, step, torch.randn(size), optimizer=optimizer)


def every_plan(graph: StepGraph, where: Placement, machine: Machine) -> Iterator[Plan]:
    """All plans, made one by one from the labels of every node and the storages of every input."""
    machine = machine.on(where.num_axes)
    goal = free_goal(graph, where, {})
    problem = Problem(graph, where, fold(graph, enabled=False), goal, RULES, machine)
    nodes = [node for node in graph.calls() if not is_getitem(node)]
    inputs = list(graph.placeholders)
    choices = [problem.labels.of[node] for node in nodes]
    storages = [goal.storages[name] for name in inputs]
    for labels, layouts in itertools.product(itertools.product(*choices), itertools.product(*storages)):
        signatures = {node.name: label for node, label in zip(nodes, labels, strict=True)}
        stored = dict(zip(inputs, layouts, strict=True))
        plan = Plan(graph, where, "tried", signatures, stored, {}, {}, machine)
        outputs = {}
        for one, node in zip(graph.outputs, graph.results, strict=True):
            given = plan.layouts(node)[0]
            handed = tuple(B if str(axis).startswith("P") else axis for axis in given)
            outputs[one.name] = stored[one.replaces] if one.replaces else handed
        yield replace(plan, outputs=outputs)


SLOW = Machine(REFERENCE.device, (LinkCost(1e-5, 1e-8, 1e-6),))
QUICK = Machine(replace(REFERENCE.device, flops={"float32": 1e8}), (LinkCost(1e-9, 1e-12, 1e-9),))


@pytest.mark.parametrize("machine", [REFERENCE, SLOW, QUICK])
@pytest.mark.parametrize(
    ("graph", "where"),
    [
        (product_graph(6, 40, 4), TWO),
        (product_graph(2, 4, 90), FOUR),
        (product_graph(3, 4, 8), placement("cpu", [0, 1, 2])),
        (squared_graph(64), TWO),
        (dot_graph(4096), GRID),
    ],
)
def test_it_finds_the_best_of_all_plans(graph: StepGraph, where: Placement, machine: Machine) -> None:
    found = plan_step(graph, where, "auto", machine=machine)
    machine = machine.on(where.num_axes)
    best = min(predict(plan, machine).seconds for plan in every_plan(graph, where, machine))
    assert predicted(found).seconds == pytest.approx(best, rel=1e-9)
    assert found.search is not None and found.search.gap <= 1e-6


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6, 0.55])
def test_under_a_limit_it_finds_the_best_of_all_plans_that_fit(share: float) -> None:
    graph = squared_graph(64)
    everything = [predict(plan, REFERENCE) for plan in every_plan(graph, TWO, REFERENCE)]
    limit = int(share * max(one.peak_bytes for one in everything))
    best = min((one.seconds for one in everything if one.peak_bytes <= limit), default=None)
    if best is None:
        with pytest.raises(PlanError, match=f"{limit:,} bytes"):
            plan_step(graph, TWO, "auto", machine=REFERENCE, limit=limit)
        return
    found = plan_step(graph, TWO, "auto", machine=REFERENCE, limit=limit)
    assert predicted(found).peak_bytes <= limit
    assert predicted(found).seconds == pytest.approx(best, rel=1e-9)


# --- what it must find -------------------------------------------------------------------------------


class Recommender(nn.Module):
    """Big embedding tables and a small tower on top."""

    def __init__(self, num_tables: int = 4, rows: int = 20_000, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(num_tables))
        self.top = nn.Sequential(nn.Linear(num_tables * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        looked_up = [table(x[:, number]) for number, table in enumerate(self.tables)]
        return self.top(torch.cat(looked_up, 1))


class Wide(nn.Module):
    """Products so wide that the weights outweigh the activations by far."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    """A residual layer of two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack_graph(depth: int = 4, width: int = 64, rows: int = 256) -> StepGraph:
    with torch.device("meta"):
        model = Stack(depth, width)
        return trained(model, torch.randn(rows, width), torch.randn(rows, width))


def on_axis(plan: Plan, kind: str) -> list[str]:
    """How the nodes of an op lie: their signatures along the only axis."""
    return [str(plan.signatures[node.name][0]) for node in plan.graph.calls() if kind in str(node.target)]


def test_big_tables_are_split_and_the_tower_is_data_parallel() -> None:
    with torch.device("meta"):
        x = torch.zeros(8192, 4, dtype=torch.int64)
        graph = trained(Recommender(), x, torch.zeros(8192, 1))
    plan = plan_step(graph, FOUR, "auto", machine=REFERENCE)
    tables = [one.name for one in graph.inputs if one.role is Role.PARAM and "tables" in one.name]
    assert all(isinstance(plan.inputs[name][0], Split) for name in tables)
    assert plan.inputs["top.0.weight"] == (B,)
    assert on_axis(plan, "addmm") == ["B, S(0), B -> S(0)"] * 2


def test_a_wide_mlp_at_a_small_batch_is_split_by_its_weights() -> None:
    with torch.device("meta"):
        graph = trained(Wide(), torch.zeros(4, 2048), torch.zeros(4, 2048))
    plan = plan_step(graph, FOUR, "auto", machine=REFERENCE)
    assert isinstance(plan.inputs["up.weight"][0], Split) and isinstance(plan.inputs["down.weight"][0], Split)
    assert sum(predicted(plan).sent.values()) < graph.input_of["up.weight"].meta.num_bytes / 50


def test_one_device_moves_nothing() -> None:
    plan = plan_step(stack_graph(2), placement("cpu", [0]), "auto")
    assert sum(predicted(plan).sent.values()) == 0 and not predicted(plan).collectives


def test_the_slow_axis_carries_the_fewest_bytes() -> None:
    slow, fast = LinkCost(2e-5, 1e-8, 1e-6), LinkCost(1e-6, 1e-10, 1e-6)
    where = placement("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], axes=("slow", "fast"))
    machine = Machine(REFERENCE.device, (slow, fast))
    graph = stack_graph(4, 64, 4096)
    plan = plan_step(graph, where, "auto", machine=machine)
    sent = predicted(plan).sent
    assert sent["slow"] < sent["fast"]
    for template in ("data", "zero", "data x tensor"):
        assert sent["slow"] <= predicted(plan_step(graph, where, template, machine=machine)).sent["slow"]


def test_a_tight_limit_splits_the_state_then_computes_again_in_the_order_of_their_price() -> None:
    graph = stack_graph(6, 64, 384)
    machine = Machine(REFERENCE.device, (LinkCost(1e-6, 1e-10, 1e-6),))
    free = plan_step(graph, TWO, "data", machine=machine)
    plans = []
    for share in (1.0, 0.8, 0.6, 0.52):
        limit = int(share * predicted(free).peak_bytes)
        plans.append(plan_step(graph, TWO, "auto", machine=machine, limit=limit, micro_batches=1))
        assert predicted(plans[-1]).peak_bytes <= limit
    seconds = [predicted(plan).seconds for plan in plans]
    assert all(a <= b * (1 + 1e-6) for a, b in itertools.pairwise(seconds))
    again = [sum(len(names) for kind, names in plan.rewrites if kind == "recompute") for plan in plans]
    assert again[0] == 0 and again[-1] > 0, again
    first = again.index(next(number for number in again if number))
    assert state_bytes(plans[first]) < state_bytes(free)


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_a_bound_under_a_limit_is_below_every_plan_that_fits(share: float) -> None:
    graph = stack_graph(3, 64, 96)
    limit = int(share * predicted(plan_step(graph, TWO, "auto", machine=SLOW)).peak_bytes)
    plan = plan_step(graph, TWO, "auto", machine=SLOW, limit=limit)
    assert plan.search is not None
    fitting = [
        predicted(plan),
        predicted(plan_step(graph, TWO, "auto", machine=SLOW, limit=limit * 99 // 100)),
    ]
    for one in fitting:
        assert one.peak_bytes <= limit and plan.search.bound <= one.seconds
    assert plan.search.gap == pytest.approx(1 - plan.search.bound / predicted(plan).seconds)


def test_of_what_does_not_fit_the_least_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    candidate, fitted = Space.candidate, Space.fitted
    kept: list[tuple[int, int]] = []

    def noted(self: Space, *args: Any, **options: Any) -> Candidate:
        found = candidate(self, *args, **options)
        made.append(found.predicted.peak_bytes)
        return found

    def compared(self: Space, *args: Any) -> Candidate:
        made.clear()
        found = fitted(self, *args)
        kept.append((found.predicted.peak_bytes, min(made)))
        return found

    monkeypatch.setattr(Space, "candidate", noted)
    monkeypatch.setattr(Space, "fitted", compared)
    model = nn.Sequential(
        nn.Linear(16, 32), *[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(3)]
    )
    graph = trained(model, torch.randn(64, 16), torch.randn(64, 32))
    with pytest.raises(PlanError):
        plan_step(graph, TWO, "auto", machine=REFERENCE, limit=30_000)
    assert kept and all(found == least for found, least in kept), kept


def test_what_cannot_fit_is_refused_with_what_would() -> None:
    graph = stack_graph(2)
    with pytest.raises(PlanError) as caught:
        plan_step(graph, TWO, "auto", machine=REFERENCE, limit=1000)
    message = str(caught.value)
    assert "at most 1,000 bytes" in message and "layers.0.up.weight float32[256, 64]" in message
    smallest = int(message.split("A limit of ")[1].split(" works")[0].replace(",", ""))
    needs = int(message.split("found needs ")[1].split(", ")[0].replace(",", ""))
    assert f"{needs - 1000:,} more" in message and needs <= smallest < 1.1 * needs
    plan = plan_step(graph, TWO, "auto", machine=REFERENCE, limit=smallest)
    assert predicted(plan).peak_bytes <= smallest


MESHES = {"2": TWO, "4": FOUR, "2x2": GRID, "8": placement("cpu", list(range(8)))}


@pytest.mark.parametrize("mesh", MESHES)
def test_never_slower_than_any_template(mesh: str) -> None:
    where = MESHES[mesh]
    graph = stack_graph(3, 64, 96)
    found = predicted(plan_step(graph, where, "auto", machine=REFERENCE)).seconds
    for names in itertools.product(TEMPLATES, repeat=where.num_axes):
        template = plan_step(graph, where, " x ".join(names), machine=REFERENCE)
        assert found <= predicted(template).seconds * (1 + 1e-3), names


def test_the_same_plan_every_time() -> None:
    first, second = (plan_step(stack_graph(3), GRID, "auto", machine=REFERENCE).dumps() for _ in range(2))
    assert first == second


def test_repeated_layers_are_decided_once() -> None:
    few, many = (fold(stack_graph(depth)) for depth in (4, 12))
    assert many.num_classes == few.num_classes and len(many.first) > 2 * len(few.first)
    plan = plan_step(stack_graph(5, 64, 2048), TWO, "auto", machine=REFERENCE)
    assert len({plan.inputs[f"layers.{i}.up.weight"] for i in range(5)}) == 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_limit_that_a_template_keeps_is_never_too_small(template: str) -> None:
    graph = stack_graph(3, 32, 64)
    peak = predicted(plan_step(graph, TWO, template, machine=REFERENCE)).peak_bytes
    assert predicted(plan_step(graph, TWO, "auto", machine=REFERENCE, limit=peak)).peak_bytes <= peak
