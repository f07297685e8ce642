"""Saved plans run again with the same numbers, and only on the step and the ranks that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import monoflow as flow
from monoflow.errors import PlanError
from monoflow.graph.passes.recompute import AGAIN
from monoflow.mesh import Placement
from monoflow.plan.cost import REFERENCE
from monoflow.plan.rewrites import PREPARE
from monoflow.plan.search import Space
from monoflow.sbp.rules import RULES
from monoflow.step import Step

from .harness import LAYOUTS, assert_exact

FOUR = LAYOUTS["data-4"].placement
GRID = LAYOUTS["zero-x-tensor"].placement


class Net(nn.Module):
    """Layers alike, with activations that are worth dropping."""

    def __init__(self, width: int = 12, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
            for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def step_of(plan: str | Path, placement: Placement) -> Step:
    torch.manual_seed(0)
    model = Net()
    updates = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @flow.graph(model, updates, plan=plan, placement=placement)
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss

    return train_step


def batch(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(1))


def losses(step: Step, num_steps: int = 2) -> list[float]:
    return [step(batch()).item() for _ in range(num_steps)]


def saved(path: Path, plan: str, placement: Placement) -> tuple[Step, list[float]]:
    """A step that ran by a plan, which is in the file now, and its losses."""
    step = step_of(plan, placement)
    numbers = losses(step)
    step.plan.save(path)
    return step, numbers


@pytest.mark.parametrize(
    ("name", "placement"), [("auto", GRID), ("zero", FOUR), ("data x tensor", GRID)], ids=str
)
def test_a_saved_plan_runs_with_the_same_numbers(name: str, placement: Placement, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with flow.simulate(4):
        first, expected = saved(path, name, placement)
        again = step_of(path, placement)
        assert losses(again) == expected  # the same program: to the bit
        assert again.plan.text() == first.plan.text()
        assert again.plan.dumps() == first.plan.dumps()
        assert again.stats() == first.stats()
        assert_exact(again.verify(batch(), steps=1))


def test_a_plan_that_computes_again_is_saved_with_that(tmp_path: Path) -> None:
    """To the bit the numbers of the plan without: what is computed again is what would have been kept."""
    plain, again = tmp_path / "plain.json", tmp_path / "again.json"
    with flow.simulate(4):
        graph = step_of("auto", GRID).capture(batch())
        space = Space(graph, (PREPARE,), GRID, REFERENCE, {}, RULES)
        choice = space.problem.choice(space.fastest.choices)
        dropped = frozenset(node.name for node in space.graph.calls() if "tanh.default" in str(node.target))
        space.candidate(choice, "plain").plan.save(plain)
        space.candidate(choice, "again", dropped).plan.save(again)
        step = step_of(again, GRID)
        assert losses(step) == losses(step_of(plain, GRID))
        copies = {node.meta[AGAIN] for node in step.plan.graph.calls() if AGAIN in node.meta}
        assert dropped <= copies and step.plan.rewrites[-1] == ("recompute", tuple(sorted(dropped)))
        assert_exact(step.verify(batch(), steps=1))


def test_a_plan_is_for_one_step_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with flow.simulate(4):
        saved(path, "zero", FOUR)
        with pytest.raises(
            PlanError, match=r"was made for graph \w+, this step is \w+; model, batch"
        ) as caught:
            step_of(path, FOUR)(batch(rows=32))
    assert str(path) in str(caught.value)


def test_a_plan_is_for_its_ranks_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with flow.simulate(4):
        saved(path, "zero", FOUR)
    with (
        flow.simulate(2),
        pytest.raises(PlanError, match=r"is for placement\(cpu: .*ranks \[0, 1, 2, 3\]\), this job has .*=2"),
    ):
        step_of(path, LAYOUTS["data-2"].placement)(batch())


def test_a_plan_on_a_grid_comes_back_on_it(tmp_path: Path) -> None:
    """The file says the grid: a job that gives none runs on that."""
    path = tmp_path / "plan.json"
    with flow.simulate(4):
        _, expected = saved(path, "zero x tensor", GRID)
        again = step_of(path, FOUR)
        assert losses(again) == expected and again.plan.placement == GRID
