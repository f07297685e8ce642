"""Ranks that hold what should be the same differently: refused or made alike, never a silent wrong number."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import monoflow as flow
from monoflow.errors import LayoutError
from monoflow.step import Step
from tests.conftest import RunRanks


def build(plan: str, num_ranks: int) -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grid = [[0, 1], [2, 3]] if num_ranks == 4 else [0, 1]

    @flow.graph(model, optimizer, placement=flow.placement("cpu", grid), plan=plan)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, step


def seeded_differently(plan: str, num_ranks: int) -> tuple[float, dict[str, list]]:
    torch.manual_seed(dist.get_rank())
    model, step = build(plan, num_ranks)
    torch.manual_seed(7)
    x, y = torch.randn(5, 6), torch.randn(5, 4)
    loss = step(x, y).item()
    return loss, {name: value.tolist() for name, value in flow.full_state_dict(model).items()}


@pytest.mark.parametrize(("plan", "num_ranks"), [("data", 2), ("zero", 2), ("data x tensor", 4)])
def test_models_that_began_differently_go_on_as_rank_0s(
    run_ranks: RunRanks, plan: str, num_ranks: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    x, y = torch.randn(5, 6), torch.randn(5, 4)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    for got, state in run_ranks(num_ranks, seeded_differently, plan, num_ranks):
        assert abs(got - loss.item()) < 1e-6
        for name, value in model.state_dict().items():
            torch.testing.assert_close(torch.tensor(state[name]), value)


def different_batches(num_ranks: int) -> str:
    torch.manual_seed(0)
    _, step = build("data", num_ranks)
    torch.manual_seed(100 + dist.get_rank())
    try:
        step(torch.randn(4, 6), torch.ones(4, 4))
    except LayoutError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_plain_batch_that_differs_between_ranks_is_refused_on_all(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    for message in run_ranks(num_ranks, different_batches, num_ranks):
        assert "batch.0" in message and "differs between the ranks" in message
        assert "flow.from_local" in message


def own_parts() -> float:
    torch.manual_seed(0)
    _, step = build("data", 2)
    torch.manual_seed(7)
    x, y = torch.randn(4, 6), torch.randn(4, 4)
    rows = slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
    return step(*flow.from_local((x[rows], y[rows]))).item()


def test_what_each_rank_loaded_itself_is_taken_as_its_part(run_ranks: RunRanks) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    torch.manual_seed(7)
    x, y = torch.randn(4, 6), torch.randn(4, 4)
    expected = F.mse_loss(model(x), y).item()
    assert run_ranks(2, own_parts) == pytest.approx([expected] * 2, abs=1e-6)


def different_calls(what: str, num_ranks: int) -> str:
    """Rank 1 does one thing otherwise; returns the error that this rank got."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grid = [[0, 1], [2, 3]] if num_ranks == 4 else [0, 1]
    factor = 1.0 + rank if what == "a number in Python" else 1.0

    @flow.graph(model, optimizer, placement=flow.placement("cpu", grid))
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x) * factor, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x, y = torch.ones(6, 6), torch.ones(6, 4)
    try:
        step(x, y)
        if what == "a later shape" and rank == 1:
            x, y = x[:5], y[:5]
        if what == "the learning rate":
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        if what == "the mode":
            model.train(rank != 1)
        step(x, y)
    except LayoutError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("a number in Python", "the captured graphs"),
        ("a later shape", "shapes"),
        ("the learning rate", "the learning rates"),
        ("the mode", "train/eval mode"),
    ],
)
def test_ranks_that_call_differently_are_refused_on_all(run_ranks: RunRanks, what: str, named: str) -> None:
    num_ranks = 4 if what == "a later shape" else 2
    for message in run_ranks(num_ranks, different_calls, what, num_ranks):
        assert named in message and "Every rank must run the same program" in message
