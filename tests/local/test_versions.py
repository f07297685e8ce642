"""What a step is captured for again, what it says about it, and what it refuses."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoflow as flow
from monoflow.errors import CaptureError
from monoflow.step import Step


class Scaled(nn.Module):
    """A linear layer whose forward reads a plain number and an inner module's setting."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x)) * self.scale


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @flow.graph(model, optimizer)
    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def _doubled(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def num_versions(step: Step) -> int:
    return sum(map(len, step._versions._of.values()))


def test_numbers_of_modules_that_change_are_seen() -> None:
    torch.manual_seed(0)
    model = Scaled()
    step = flow.graph(model)(lambda x: model(x).sum())
    model.dropout.p = 0.0
    x = torch.randn(3, 4)
    for model.scale in (1.0, 10.0):
        torch.testing.assert_close(step(x), model(x).sum().detach())
    model.dropout.p = 1.0
    assert step(x) == 0
    assert num_versions(step) == 3


def test_hooks_that_come_later_are_seen() -> None:
    model = nn.Linear(4, 4)
    step = flow.graph(model)(lambda x: model(x))
    x = torch.randn(3, 4)
    before = step(x)
    model.register_forward_hook(_doubled)
    torch.testing.assert_close(step(x), before * 2)


def test_the_learning_rate_captures_nothing_again() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step = trained(model, optimizer)
    for _ in range(10):
        step(torch.randn(3, 4))
        scheduler.step()
    assert num_versions(step) == 1


def test_cycling_momentum_says_so_and_stays_bounded(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
    step = trained(model, optimizer)
    with caplog.at_level(logging.WARNING, "monoflow.capture"):
        for _ in range(20):
            step(torch.randn(3, 4))
            scheduler.step()
    assert num_versions(step) <= 16
    assert len(step._forms) <= 16 and len(step._bindings) <= 16
    (message,) = [one.getMessage() for one in caplog.records if "captured" in one.getMessage()]
    assert "train_step was captured 8 times" in message and "the optimizers' settings" in message


def test_changing_shapes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    step = flow.graph(model)(lambda x: model(x))
    with caplog.at_level(logging.WARNING, "monoflow.capture"):
        for rows in range(1, 10):
            step(torch.randn(rows, 4))
    (message,) = [one.getMessage() for one in caplog.records if "captured" in one.getMessage()]
    assert "[7, 4] to [8, 4]" in message and "shapes" in message


def test_slices_are_arguments_like_others() -> None:
    model = nn.Linear(4, 4)
    step = flow.graph(model)(lambda x, rows: model(x[rows]))
    x = torch.randn(6, 4)
    for rows in (slice(0, 2), slice(0, 2), slice(2, 6), slice(0, 2)):
        torch.testing.assert_close(step(x, rows), model(x[rows]).detach())
    assert num_versions(step) == 2


def test_a_step_inside_a_step_is_refused_by_name() -> None:
    model = nn.Linear(4, 4)

    @flow.graph(model)
    def inner(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    @flow.graph(model)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match="inner is called inside outer"):
        outer(x)
    torch.testing.assert_close(inner(x), model(x).detach())


def test_threads_take_turns() -> None:
    """Two threads that call one step give the updates of two calls, one after the other."""
    results = []
    for threaded in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        step = trained(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(3, 4)

        def work(step: Step = step, x: torch.Tensor = x) -> None:
            for _ in range(20):
                step(x)

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start() if threaded else work()
        for worker in workers:
            if threaded:
                worker.join()
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"plan": 3}, "plan=3 is no plan"),
        ({"placement": [0, 1]}, r'write flow.placement\("cpu", \[0, 1\]\)'),
        ({"batch_stats": "mine"}, "batch_stats='mine'"),
        ({"memory": -5}, "memory=-5 is not a size of memory"),
        ({"memory": True}, "memory=True is not a size of memory"),
        ({"memory": float("nan")}, "memory=nan is not a size of memory"),
        ({"memory": "20 apples"}, "memory='20 apples' is not a size of memory"),
        ({"memory": "1GB", "plan": "data"}, "plan='data' is no search"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], facts: str) -> None:
    with pytest.raises(flow.FlowError, match=facts):
        flow.graph(nn.Linear(2, 2), **settings)


def test_a_pin_that_is_no_layout_is_named() -> None:
    model = nn.Linear(2, 2)
    step = flow.graph(model)(lambda x: model(x))
    with pytest.raises(flow.LayoutError, match="3 is not a layout"):
        step.pin("weight", 3)  # pyright: ignore[reportArgumentType]
