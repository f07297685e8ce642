"""Every optimizer in a captured step: its state and updates equal eager ones, its learning rate is an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from monoflow.capture.trace import Captured
from monoflow.errors import CaptureError
from monoflow.graph.step_graph import Role

from .graph_run import GraphStep, Things, compare, trace

BATCHES = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), torch.tensor([0, 1, 2, 0, 1, 2])) for i in range(4)]


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


def training(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], tuple[Callable, Things]]:
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


def lr_is_input(captured: Captured) -> bool:
    """The learning rate is an input, every parameter's update depends on it, and no node holds it."""
    graph = captured.graph
    rates = {graph.placeholders[one.name] for one in graph.inputs if one.role is Role.HYPER}
    depends = set(rates)
    for node in graph.calls():
        if any(argument in depends for argument in node.all_input_nodes):
            depends.add(node)
    nexts = [node for one, node in zip(graph.outputs, graph.results, strict=True) if one.replaces in captured.slots
             and captured.slots[one.replaces].role is Role.PARAM]
    return bool(nexts) and all(node in depends for node in nexts)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_and_state_equal_eager_ones(name: str) -> None:
    def change_lr(things: Things) -> None:
        for group in things[1].param_groups:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                rate.mul_(0.5)
            elif name != "rprop":
                group["lr"] = rate * 0.5

    step = compare(training(OPTIMIZERS[name]), BATCHES, between=change_lr)
    assert name == "rprop" or lr_is_input(step.captures[0][1])
