"""The budget of work: how much is looked at, the same every time, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monoflow as flow
from monoflow.graph.step_graph import StepGraph
from monoflow.mesh import placement
from monoflow.plan.budget import RATE, Budget
from monoflow.plan.cost import REFERENCE
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step

FOUR = placement("cpu", [0, 1, 2, 3])


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step.capture(torch.randn(16, 64))


def made(graph: StepGraph, **options: Any) -> Plan:
    return plan_step(graph, FOUR, "auto", machine=REFERENCE, refine=True, **options)


def test_work_is_counted_in_ops() -> None:
    budget = Budget.of(2.0)
    assert budget.total == 2 * RATE and budget.allows() and budget.left_out == 0
    budget.spent = budget.total
    assert not budget.allows() and not budget.allows() and budget.left_out == 2


def test_more_is_looked_at_with_more_of_it_and_nothing_is_lost(graph: StepGraph) -> None:
    num_ops = sum(1 for _ in graph.calls())
    half, ample = (made(graph, seconds=ops * num_ops / RATE) for ops in (6.0, 1e3))
    none = made(graph, seconds=0.0)
    plans = (none, half, ample)
    tried = [set(one.search.tried) for one in plans if one.search is not None]
    assert tried[0] < tried[1] <= tried[2] and "data" not in tried[0] and "data" in tried[1]
    seconds = [one.predicted.seconds for one in plans if one.predicted is not None]
    assert seconds == sorted(seconds, reverse=True)
    assert all(one.search is not None and 0 <= one.search.gap < 1 for one in plans)
    assert ample.search is not None and ample.search.left_out == 0


def test_it_stops_at_the_same_plan_every_time(graph: StepGraph) -> None:
    num_ops = sum(1 for _ in graph.calls())
    for ops in (0.0, 4.0, 9.0):
        first, second = (made(graph, seconds=ops * num_ops / RATE) for _ in range(2))
        assert first.dumps() == second.dumps()
