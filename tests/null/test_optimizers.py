"""Every optimizer in a captured step: updates and state equal eager ones, the learning rate is an input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from monoflow.capture.trace import Captured
from monoflow.errors import CaptureError
from monoflow.graph.step_graph import Role

from .graph_run import GraphStep, Things, assert_close, compare, state_of, trace

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
BATCHES = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), LABELS) for i in range(4)]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, with tensor ops; `local` keeps the new state in a local variable first."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, local: bool = False) -> None:
        self.local = local
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    if self.local:
                        momentum = state["m"] = torch.zeros_like(p)
                    else:
                        state.setdefault("m", torch.zeros_like(p))
                        momentum = state["m"]
                else:
                    momentum = state["m"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((momentum * group["beta"] + p.grad * (1 - group["beta"])).sign(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - group["beta"])


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def training(
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
) -> Callable[[], tuple[Callable, Things]]:
    def make() -> tuple[Callable, Things]:
        model = small_model()
        optimizer = optimizer_of(model)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, (model, optimizer)

    return make


def of(kind: Callable, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), **settings)


OPTIMIZERS = {
    "sgd": of(torch.optim.SGD, lr=0.1),
    "sgd-momentum": of(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd-nesterov": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-maximize": of(torch.optim.SGD, lr=0.1, momentum=0.9, maximize=True),
    "adam": of(torch.optim.Adam, lr=0.01),
    "adam-decay": of(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": of(torch.optim.AdamW, lr=0.01),
    "adamw-amsgrad": of(torch.optim.AdamW, lr=0.01, amsgrad=True, maximize=True),
    "adagrad": of(torch.optim.Adagrad, lr=0.05, lr_decay=0.1, weight_decay=0.1),
    "adagrad-start": of(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.5),
    "rmsprop": of(torch.optim.RMSprop, lr=0.01),
    "rmsprop-centered": of(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9, weight_decay=0.1),
    "nadam": of(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "nadam-decoupled": of(torch.optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": of(torch.optim.RAdam, lr=0.01, weight_decay=0.1),
    "adamax": of(torch.optim.Adamax, lr=0.01, weight_decay=0.1),
    "adadelta": of(torch.optim.Adadelta, lr=0.5, weight_decay=0.1),
    "asgd": of(torch.optim.ASGD, lr=0.05, t0=1),
    "rprop": of(torch.optim.Rprop, lr=0.01),
    "lion": of(Lion),
    "lion-local": of(Lion, local=True),
    "adamw-foreach": of(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw-fused": of(torch.optim.AdamW, lr=0.01, fused=True),
    "sgd-fused": of(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad-fused": of(torch.optim.Adagrad, lr=0.1, fused=True),
    "rmsprop-foreach": of(torch.optim.RMSprop, lr=0.01, foreach=True, momentum=0.5),
    "adamw-tensor-lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "sgd-tensor-lr": lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)),
}


def reached_by_lr(captured: Captured) -> set[str]:
    """The parameters whose next value, or next state, depends on a learning rate that is an input."""
    graph = captured.graph
    depends = {graph.placeholders[one.name] for one in graph.inputs if one.role is Role.HYPER}
    for node in graph.calls():
        if any(argument in depends for argument in node.all_input_nodes):
            depends.add(node)
    pairs = zip(graph.outputs, graph.results, strict=True)
    return {captured.slots[one.replaces].of for one, node in pairs if one.replaces and node in depends}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_and_state_equal_eager_ones(name: str) -> None:
    step = compare(training(OPTIMIZERS[name]), BATCHES, tolerance=3e-6, between=halve_lr)
    if name != "rprop":  # which has a learning rate only at its start
        assert reached_by_lr(step.captures[0][1]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def halve_lr(things: Things) -> None:
    for optimizer in things:
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] *= 0.5


def test_dampening_takes_two_graphs() -> None:
    optimizer = of(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3)
    step = compare(training(optimizer), BATCHES, num_captures=2)
    first, later = (captured for _, captured in step.captures)
    assert first.begins == {
        f"{name}:momentum_buffer" for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    assert not later.begins and reached_by_lr(later)


def test_groups_have_their_own_rates_and_decay() -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, nn.Sequential)
        groups = [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.3},
            {"params": [model[0].bias, model[2].bias], "lr": 0.05, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    step = compare(training(optimizer_of), BATCHES, between=halve_lr)
    hypers = [one.name for one in step.captures[0][1].graph.inputs if one.role is Role.HYPER]
    assert hypers == ["group0:lr", "group1:lr"]


def test_a_scheduler_between_steps_needs_no_new_capture() -> None:
    def make() -> tuple[Callable, Things]:
        step, (model, optimizer) = training(of(torch.optim.AdamW, lr=0.01))()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        schedulers[id(optimizer)] = scheduler
        return step, (model, optimizer)

    def advance(things: Things) -> None:
        things[1]._opt_called = True
        schedulers[id(things[1])].step()

    schedulers: dict[int, Any] = {}
    # OneCycleLR moves the momentum too, which is a constant of the graph: a graph each.
    compare(make, BATCHES, between=advance, num_captures=4)


def test_eager_and_graph_steps_interleave() -> None:
    def make(kind: str) -> tuple[Callable, Things]:
        return training(OPTIMIZERS[kind])()

    for kind in ("adamw", "sgd-momentum", "adagrad"):
        torch.manual_seed(0)
        eager_step, eager_things = make(kind)
        torch.manual_seed(0)
        mixed_step, mixed_things = make(kind)
        graph_step = GraphStep(mixed_step, mixed_things)
        for number, batch in enumerate(BATCHES):
            eager_step(*batch)
            if number % 2:
                graph_step(torch.tensor(0), *batch)
            else:
                mixed_step(*batch)
        assert_close(state_of(mixed_things), state_of(eager_things), 1e-6, kind)
        assert mixed_things[1].state_dict()["param_groups"] == eager_things[1].state_dict()["param_groups"]


def test_parameters_without_gradient_get_no_state() -> None:
    def make() -> tuple[Callable, Things]:
        model = nn.ModuleDict({name: nn.Linear(4, 3) for name in ("used", "unused", "frozen")})
        model["frozen"].requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model["used"](x) + model["frozen"](x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step, (model, optimizer)

    step = compare(make, BATCHES)
    states = {one.of for one in step.captures[0][1].graph.inputs if one.role is Role.STATE}
    assert states == {"used.weight", "used.bias"}


class CountsInPython(torch.optim.SGD):
    """Keeps its step count as a Python number."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad * group["lr"] / state["count"])


def test_state_in_python_numbers_is_refused() -> None:
    step, things = training(of(CountsInPython, lr=0.1))()
    advice = r"CountsInPython keeps 'count' as a Python int.*state\['count'\] = torch.tensor"
    with pytest.raises(CaptureError, match=advice):
        trace(step, things, *BATCHES[0])
    step(*BATCHES[0])
    with pytest.raises(CaptureError, match=r"'count' as a Python int \(1, then 2\)"):
        trace(step, things, *BATCHES[0])


class RateToPython(torch.optim.SGD):
    """Takes its learning rate to a Python number."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * float(group["lr"]))


def test_a_learning_rate_taken_to_python_is_refused_at_its_line() -> None:
    step, things = training(of(RateToPython, lr=0.1))()
    line = Path(__file__).read_text().splitlines().index(" " * 16 + 'p.sub_(p.grad * float(group["lr"]))') + 1
    with pytest.raises(CaptureError, match=rf"learning rate.*{__file__}:{line}.*param.sub_"):
        trace(step, things, *BATCHES[0])


def test_sparse_gradients_are_refused() -> None:
    model = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids).sum()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(CaptureError, match=r"parameter 'weight' gets a sparse gradient.*sparse=False"):
        trace(step, (model, optimizer), torch.ones(2, 3, dtype=torch.int64))


def test_an_update_that_looks_at_values_is_refused() -> None:
    step, things = training(of(torch.optim.Adafactor))()
    with pytest.raises(CaptureError, match=r"the update of Adafactor takes a tensor's value to Python"):
        trace(step, things, *BATCHES[0])


def test_lbfgs_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        return closure()

    with pytest.raises(CaptureError, match="LBFGS"):
        trace(step, (model, optimizer), *BATCHES[0])
