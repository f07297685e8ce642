"""Updates in place: only where nothing reads the old value any more, in whatever order tasks fire."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoflow as flow
from monoflow.capture.subject import subject_of
from monoflow.capture.trace import capture
from monoflow.graph.passes import PASSES
from monoflow.plan.donate import donations
from monoflow.plan.planner import plan_step
from monoflow.plan.schedule import schedule
from monoflow.runtime import actors
from monoflow.runtime.ready import Entry

ONE = flow.placement("cpu", [0])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def donated(step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of the inputs that a one-device program of a step overwrites."""
    batch = (torch.randn(5, 6), torch.randn(5, 4))
    graph = capture(step, subject_of([model, optimizer]), batch, {}, name="step", source="").graph
    for one in PASSES.values():
        graph = one(graph)
    plan = plan_step(graph, ONE, "data")
    made = schedule(plan)
    names = {node: name for name, node in plan.graph.placeholders.items()}
    found = donations(plan, made, [[item] for item in made.items])  # a task per item: the finest cut
    return {names[value.node] for value in found.values}


def trained(before: Callable[[nn.Module], Any], after: Callable[[nn.Module], Any]) -> set[str]:
    """What is overwritten by a step that also returns something read before or after its update."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        seen = before(model)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, seen, after(model)

    return donated(step, model, optimizer)


def weights(*names: str) -> set[str]:
    return {name for one in names for name in (one, f"{one}:exp_avg", f"{one}:exp_avg_sq")}


ALL = weights("0.weight", "0.bias", "2.weight", "2.bias")


def test_every_state_is_overwritten_when_nothing_reads_it_later() -> None:
    assert trained(lambda m: None, lambda m: None) == ALL


def test_a_copy_of_the_old_value_may_be_handed_out() -> None:
    assert trained(lambda m: m.get_parameter("0.weight").detach().t()[1:].clone(), lambda m: None) == ALL


def test_a_new_value_may_be_handed_out() -> None:
    assert trained(lambda m: None, lambda m: m.get_parameter("0.weight").detach().t()[1:]) == ALL


def test_results_are_the_values_before_and_after() -> None:
    """Through the whole path: copies keep the old value, views show the new one, as in eager."""
    curves = []
    for compiled in (False, True):
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor, m: Any = model, o: Any = optimizer) -> Any:
            view = m.get_parameter("0.weight").detach().t()
            old = view.clone()
            F.mse_loss(m(x), y).backward()
            o.step()
            o.zero_grad()
            return old, view

        call = flow.graph(model, optimizer)(step) if compiled else step
        torch.manual_seed(1)
        x, y = torch.randn(5, 6), torch.randn(5, 4)
        curves.append([[one.clone() for one in call(x, y)] for _ in range(3)])
    for (eager_old, eager_view), (old, view) in zip(*curves, strict=True):
        torch.testing.assert_close(old, eager_old)
        torch.testing.assert_close(view, eager_view)


class Shuffled(actors.Ready):
    """Ready actors, of which any is handed out."""

    chance = random.Random(0)

    def pop(self) -> Entry:
        return self.heap.pop(self.chance.randrange(len(self)))


@pytest.mark.parametrize("plan", ["data", "zero", "tensor"])
def test_any_firing_order_gives_the_same_bits(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-driven firing may run tasks in any order that registers and waits allow."""

    def curve(queue: type) -> list[torch.Tensor]:
        monkeypatch.setattr(actors, "Ready", queue)
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        @flow.graph(model, optimizer, placement=flow.placement("cpu", [0, 1]), plan=plan)
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        torch.manual_seed(1)
        x, y = torch.randn(5, 6), torch.randn(5, 4)
        with flow.simulate(2):
            losses = [step(x, y) for _ in range(8)]
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    expected = curve(actors.Ready)
    for seed in range(4):
        Shuffled.chance = random.Random(seed)
        for got, want in zip(curve(Shuffled), expected, strict=True):
            assert torch.equal(got, want)
