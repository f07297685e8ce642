"""Steps walked in micro-batches against one device with the whole batch: the same numbers on every layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import monoflow as flow
from monoflow.errors import PlanError
from monoflow.plan.schedule import Box, schedule
from monoflow.step import Step

from .harness import LAYOUTS, Case, Cases, assert_exact
from .models import KINDS, batch_of, image_loss, training

#: Dropout is on, gradients are clipped by their norm, and bert's and t5's ignored labels differ by sample.
#: Three micro-batches of four rows are two, two and none.
WALKED = [
    ("gpt2", "adamw", "one", 4),
    ("gpt2", "adamw", "zero-2", 2),
    ("gpt2", "sgd", "data-x-tensor", 2),
    ("llama", "sgd", "tensor-2", 2),
    ("bert", "adamw", "one", 3),
    ("bert", "sgd", "data-2", 2),
    ("t5", "sgd", "one", 2),
    ("vit", "sgd", "tensor-2", 2),
    ("dlrm", "adamw", "one", 3),
    ("dlrm", "sgd", "tensor-2", 2),
    ("tied", "adamw", "tensor-2", 2),
    ("frozen", "sgd", "zero-2", 2),
]


@pytest.mark.parametrize(("name", "optimizer", "layout", "num"), WALKED)
def test_micro_batches_equal_one_device(
    cases: Cases, name: str, optimizer: str, layout: str, num: int
) -> None:
    with cases(name, optimizer).under(LAYOUTS[layout], micro_batches=num) as step:
        report = step.verify(batch_of(KINDS[name]), steps=2)
        assert_exact(report)
        assert report["gradient"].judged > 0 and step.plan.micro_batches == num


@pytest.mark.parametrize(
    ("name", "layout", "rows", "num"),
    [
        ("tied", "one", 7, 3),
        ("dlrm", "data-2", 14, 3),
        ("dlrm", "one", 7, 2),
        ("dlrm", "data-x-tensor", 8, 2),
    ],
)
def test_batches_of_other_sizes_equal_one_device(name: str, layout: str, rows: int, num: int) -> None:
    """Where the last micro-batch is smaller; where devices cut rows in the middle of the step."""
    case = Case(*training(name, "sgd"))
    with case.under(LAYOUTS[layout], micro_batches=num) as step:
        assert_exact(step.verify(batch_of(KINDS[name], rows), steps=2))


def test_rows_too_few_for_devices_and_time_are_refused(cases: Cases) -> None:
    with (
        cases("tied", "adamw").under(LAYOUTS["tensor-2"], micro_batches=4) as step,
        pytest.raises(PlanError, match=r"cuts the batch's 4 rows in 2 parts .* a multiple of 8 rows"),
    ):
        step.compile(batch_of(KINDS["tied"]))


def test_gradient_accumulation_by_hand_goes_with_micro_batches() -> None:
    """A step that accumulates over two parts of its batch, each part of which is walked."""
    model, optimizer, _ = training("dlrm", "adamw")

    def by_hand(batch: dict[str, Tensor]) -> Tensor:
        parts = [
            dict(zip(batch, values, strict=True))
            for values in zip(*(v.chunk(2) for v in batch.values()), strict=True)
        ]
        losses = [KINDS["dlrm"].loss(model, part) / 2 for part in parts]
        for loss in losses:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach() for loss in losses]).sum()

    with Case(model, optimizer, by_hand).under(LAYOUTS["one"], micro_batches=2) as step:
        assert_exact(step.verify(batch_of(KINDS["dlrm"], 8), steps=2))
        folds = [item for item in schedule(step.plan).items if isinstance(item, Box) and item.folds]
        assert folds


def test_batch_norm_over_a_micro_batch_is_that_of_its_own_rows() -> None:
    """With batch_stats="local": as training on the parts and adding up, with the mean of their statistics."""
    model, optimizer, _ = training("resnet", "sgd", dropout=0.0)
    batch = batch_of(KINDS["resnet"], 4)
    eager = copy.deepcopy(model)
    begin = {name: value.clone() for name, value in eager.named_buffers()}
    losses, statistics = [], []
    for part in range(2):
        rows = {name: value.chunk(2)[part] for name, value in batch.items()}
        loss = image_loss(eager, rows) / 2
        loss.backward()
        losses.append(loss.detach())
        statistics.append({name: value.clone() for name, value in eager.named_buffers()})
        eager.load_state_dict({**eager.state_dict(), **begin})

    @flow.graph(model, optimizer, plan="data", batch_stats="local", micro_batches=2)
    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = image_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    torch.testing.assert_close(step(batch), sum(losses, torch.zeros(())), rtol=1e-5, atol=1e-6)
    for (name, found), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)
    for name, found in model.named_buffers():
        if "running" in name:
            mean = torch.stack([one[name] for one in statistics]).mean(0)
            torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-6, msg=name)
        else:
            assert int(found) == 1


def test_global_batch_norm_in_micro_batches_is_refused_with_its_line() -> None:
    with (
        Case(*training("resnet", "sgd")).under(LAYOUTS["one"], micro_batches=2) as step,
        pytest.raises(PlanError, match=r'models\.py:\d+ in .* needs all of the batch .*batch_stats="local"'),
    ):
        step.compile(batch_of(KINDS["resnet"]))


def limited(memory: int, micro_batches: Any = "auto") -> Step:
    """A step of a wide MLP, whose activations of a whole batch are most of what it holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer, memory=memory, micro_batches=micro_batches)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_the_planner_takes_the_fewest_micro_batches_that_fit() -> None:
    args = torch.randn(512, 8), torch.randn(512, 4)
    free = limited(0).compile(*args)
    assert free.micro_batches == 1, "without a limit the batch is not cut"
    peaks = {}
    for num in (2, 4):
        predicted = limited(0, num).compile(*args).predicted
        assert predicted is not None
        peaks[num] = predicted.peak_bytes
    assert free.predicted is not None and peaks[4] < peaks[2] < free.predicted.peak_bytes
    step = limited(peaks[4])
    plan = step.compile(*args)
    assert plan.micro_batches == 4 and plan.predicted is not None and plan.search is not None
    assert plan.predicted.peak_bytes <= peaks[4] == plan.search.limit
    assert_exact(step.verify(*args, steps=2))
    with pytest.raises(PlanError, match="with 2 micro-batches"):
        limited(peaks[4], 2).compile(*args)


@pytest.mark.parametrize("num", [0, -1, 1.5, True, "two"])
def test_what_is_no_number_of_micro_batches_is_refused(num: Any) -> None:
    with pytest.raises(PlanError, match=r'is no number of micro-batches; give 1, 2, \.\.\. or "auto"'):
        limited(0, num)
