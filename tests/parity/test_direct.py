"""Loss curves and final states against a plain eager run that knows nothing of monoflow, dropout off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from torch import nn

from .harness import LAYOUTS, Cases
from .models import KINDS, batch_of, training

#: Layouts of every kind, under one optimizer or the other (test_models has every pair).
PAIRS = [("sgd", "zero-2"), ("sgd", "data-x-tensor"), ("adamw", "data-4"), ("adamw", "tensor-2")]
STEPS = 3
NOISE = 1e-5


class Run(NamedTuple):
    """Three steps of a plain loop: losses, the state before and after, and where gradients were noise."""

    losses: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    state: dict
    quiet: dict[str, torch.Tensor]


def plain_run(name: str, optimizer: str) -> Run:
    model, steps, function = training(name, optimizer, dropout=0.0)
    before = _whole(model)
    quiet = {key: torch.zeros(value.shape, dtype=torch.bool) for key, value in model.named_parameters()}

    def note(*_: object) -> None:
        grads = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
        scale = max(float(grad.abs().max()) for grad in grads.values())
        for key, grad in grads.items():
            quiet[key] |= (grad.abs() < NOISE * scale) & (grad != 0)

    steps.register_step_pre_hook(note)
    losses = [function(batch_of(KINDS[name], seed=seed)).item() for seed in range(STEPS)]
    return Run(losses, before, _whole(model), steps.state_dict(), quiet)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.fixture(scope="session")
def plain_runs() -> dict[tuple[str, str], Run]:
    return {}


@pytest.mark.parametrize(("name", "optimizer", "layout"), [(name, *pair) for name in KINDS for pair in PAIRS])
def test_equals_a_plain_loop(
    cases: Cases, plain_runs: dict[tuple[str, str], Run], name: str, optimizer: str, layout: str
) -> None:
    if (name, optimizer) not in plain_runs:
        plain_runs[name, optimizer] = plain_run(name, optimizer)
    run = plain_runs[name, optimizer]
    case = cases(name, optimizer, dropout=0.0)
    with case.under(LAYOUTS[layout]) as step:
        losses = [step(batch_of(KINDS[name], seed=seed)).item() for seed in range(STEPS)]
    assert losses == pytest.approx(run.losses, rel=1e-5)
    assert len(set(losses)) == STEPS
    _check_parameters(run, _whole(case.model))
    _check_state(run, case.model, case.optimizer.state_dict())


def _check_parameters(run: Run, got: Mapping[str, torch.Tensor]) -> None:
    """The way that parameters went in all steps is the same to a thousandth of the longest way."""
    assert got.keys() == run.after.keys()
    ways = {key: run.after[key] - run.before[key] for key in run.quiet}
    longest = max(float(way.abs().max()) for way in ways.values())
    for key, value in run.after.items():
        off = (got[key] - value)[~run.quiet[key]] if key in run.quiet else got[key] - value
        assert off.numel() == 0 or float(off.abs().max()) <= 1e-4, key
        if key in run.quiet:
            assert off.numel() == 0 or float(off.abs().max()) <= 1e-3 * longest + 1e-7, key


def _check_state(run: Run, model: nn.Module, got: dict) -> None:
    """The optimizer's state dict is that of the plain loop, entry by entry."""
    assert got["param_groups"] == run.state["param_groups"]
    assert got["state"].keys() == run.state["state"].keys()
    names = [key for key, value in model.named_parameters() if value.requires_grad]
    scales: dict[str, float] = {}
    for states in run.state["state"].values():
        for key, value in states.items():
            scales[key] = max(scales.get(key, 0.0), float(value.abs().max()))
    for index, states in run.state["state"].items():
        assert got["state"][index].keys() == states.keys()
        for key, value in states.items():
            off = got["state"][index][key] - value
            off = off[~run.quiet[names[index]]] if off.shape == run.quiet[names[index]].shape else off
            assert off.numel() == 0 or float(off.abs().max()) <= 1e-4 * scales[key], (names[index], key)
