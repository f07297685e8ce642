"""Pipelines of every model against one device, on simulated ranks, alone and with other axes."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

import monoflow as flow
from monoflow.plan.by_stage import stages_of
from monoflow.runtime.liveness import verify_live
from monoflow.runtime.network import Network
from monoflow.sbp.layout import At
from monoflow.step import Step
from tests.parity.harness import Layout, assert_exact
from tests.parity.models import KINDS, batch_of, training

_SQUARE = ([0, 1], [2, 3])
_CUBE = (([0, 1], [2, 3]), ([4, 5], [6, 7]))
PIPELINES = {
    "pipeline-2": Layout((0, 1), "pipeline"),
    "pipeline-4": Layout((0, 1, 2, 3), "pipeline"),
    "pipeline-x-data": Layout(_SQUARE, "pipeline x data"),
    "pipeline-x-tensor": Layout(_SQUARE, "pipeline x tensor"),
    "zero-x-pipeline": Layout(_SQUARE, "zero x pipeline"),
    "data-x-tensor-x-pipeline": Layout(_CUBE, "data x tensor x pipeline"),
}
#: Every model on some layouts, every layout with some models; optimizers and micro-batches take turns.
CASES = [
    ("gpt2", "adamw", "pipeline-2", 1),
    ("gpt2", "sgd", "pipeline-2", 4),
    ("gpt2", "adamw", "pipeline-4", 8),
    ("gpt2", "sgd", "data-x-tensor-x-pipeline", 1),
    ("llama", "adamw", "pipeline-x-data", 2),
    ("t5", "adamw", "pipeline-4", 1),
    ("t5", "adamw", "pipeline-2", 3),
    ("bert", "sgd", "pipeline-2", 1),
    ("bert", "adamw", "zero-x-pipeline", 2),
    ("vit", "adamw", "pipeline-x-tensor", 1),
    ("tied", "adamw", "pipeline-4", 4),
    ("frozen", "sgd", "pipeline-2", 1),
    ("resnet", "sgd", "pipeline-2", 1),
]


#: Several stages a rank, gradients of weights that wait, and both.
SCHEDULES = [
    ("gpt2", "adamw", "pipeline-2", 5, 4, "zero-bubble"),
    ("gpt2", "sgd", "pipeline-x-data", 4, 4, "1f1b"),
    ("llama", "adamw", "pipeline-2", 4, 4, "1f1b"),
    ("llama", "sgd", "pipeline-x-tensor", 2, 2, "zero-bubble"),
    ("t5", "sgd", "pipeline-4", 4, 8, "zero-bubble"),
    ("t5", "adamw", "pipeline-2", 3, 4, "1f1b"),
    ("vit", "sgd", "pipeline-4", 8, 4, "zero-bubble"),
    ("vit", "adamw", "zero-x-pipeline", 2, 4, "zero-bubble"),
    ("tied", "adamw", "pipeline-2", 4, 4, "zero-bubble"),
    ("gpt2", "sgd", "pipeline-2", 1, 4, "1f1b"),
]


@pytest.mark.parametrize(("name", "optimizer", "layout", "micro_batches"), CASES)
def test_equals_one_device(name: str, optimizer: str, layout: str, micro_batches: int) -> None:
    """Dropout is on, and the gradients' common norm is clipped."""
    check(name, optimizer, layout, micro_batches)


@pytest.mark.parametrize(("name", "optimizer", "layout", "micro_batches", "stages", "order"), SCHEDULES)
def test_schedules_equal_one_device(
    name: str,
    optimizer: str,
    layout: str,
    micro_batches: int,
    stages: int,
    order: Literal["1f1b", "zero-bubble"],
) -> None:
    """Also on lanes, all ranks together, they could not deadlock."""
    step = check(name, optimizer, layout, micro_batches, stages=stages, schedule=order)
    plan = step.plan
    assert stages_of(plan).num == stages and plan.zero_bubble == (order == "zero-bubble")
    verify_live(Network(step._require().lowered.programs, plan.placement, one_order=False))


def check(name: str, optimizer: str, layout: str, micro_batches: int, **options: Any) -> Step:
    where = PIPELINES[layout]
    model, steps, function = training(name, optimizer)
    with where.ranks():
        step = flow.graph(
            model, steps, placement=where.placement, plan=where.plan, micro_batches=micro_batches, **options
        )(function)
        assert_exact(step.verify(batch_of(KINDS[name], 8), steps=2))
        plan = step.plan
    (axis,) = [number for number, one in enumerate(where.plan.split(" x ")) if one == "pipeline"]
    stages = {one for axes in plan.signatures.values() for one in axes[axis].outputs}
    assert {At(stage) for stage in range(where.placement.shape[axis])} <= stages, "a stage does nothing"
    return step


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_stage_may_lose_its_only_op(micro_batches: int) -> None:
    """As many stages as forward ops; what depends on the batch alone is not the model's, nor any stage's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with flow.simulate(12):
        step = flow.graph(model, optimizer, plan="pipeline", micro_batches=micro_batches)(train_step)
        assert_exact(step.verify(torch.randn(8, 6), torch.rand(8), steps=2))
        assert step.plan.predicted is not None
        verify_live(Network(step._require().lowered.programs, step.plan.placement, one_order=False))
