"""The compiled step on one device: results, state and memory as eager PyTorch has them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.errors import FlowError
from monoflow.step import Step


class Net(nn.Module):
    """A small classifier with dropout and batch norm."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8, bias=False)  # a bias before a norm has noise for a gradient
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.norm(self.inner(x)))))


def batches(count: int, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def classifier(
    dropout: float = 0.2, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[Net, torch.optim.Optimizer, Step]:
    torch.manual_seed(0)
    model = Net(dropout)
    optimizer = make(model.parameters(), **({"lr": 0.05} | options))

    @flow.graph(model, optimizer)
    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def curve(
    step: Callable, count: int = 6, between: Callable[[int], None] = lambda number: None
) -> list[float]:
    losses = []
    for number, batch in enumerate(batches(count)):
        losses.append(step(*batch).item())
        between(number)
    return losses


def test_eager_and_compiled_steps_take_turns() -> None:
    expected = curve(classifier()[2].eager)
    _, _, step = classifier()
    turns = iter([step, step.eager, step.eager, step, step.eager, step])
    assert curve(lambda *batch: next(turns)(*batch)) == pytest.approx(expected, abs=1e-5)


def test_scheduler_and_modes_between_steps() -> None:
    def run(choose: Callable[[Step], Callable]) -> list[float]:
        model, optimizer, step = classifier()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # warns if it sees no optimizer step

        def between(number: int) -> None:
            schedule.step()
            model.train(number != 2)

        return curve(choose(step), between=between)

    assert run(lambda step: step) == pytest.approx(run(lambda step: step.eager), abs=1e-5)


def test_optimizer_state_is_saved_and_loaded() -> None:
    expected = curve(classifier()[2])
    model, optimizer, step = classifier()
    saved: dict[str, Any] = {}

    def save(number: int) -> None:
        if number == 2:
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            saved.update(model=state[0], optimizer=state[1], random=torch.get_rng_state())

    curve(step, between=save)
    assert saved["optimizer"]["state"][0]["step"] == 3
    assert saved["optimizer"]["state"][0]["exp_avg"].shape == (8, 6)
    other, other_optimizer, other_step = classifier()
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    resumed = [other_step(*batch).item() for batch in batches(6)[3:]]
    assert resumed == pytest.approx(expected[3:], abs=1e-6)


def test_state_loaded_between_steps_counts() -> None:
    model, optimizer, step = classifier(dropout=0.0)
    first = batches(1)[0]
    step(*first)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = [step(*first).item() for _ in range(2)]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [step(*first).item() for _ in range(2)] == pytest.approx(expected, abs=1e-6)


def test_a_parameter_group_added_later_is_trained() -> None:
    def run(choose: Callable[[Step], Callable]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)

        @flow.graph(model, optimizer)
        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            return loss

        def between(number: int) -> None:
            if number == 1:
                optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})

        return curve(choose(step), between=between)

    assert run(lambda step: step) == pytest.approx(run(lambda step: step.eager), abs=1e-6)


def test_a_module_replaced_after_the_first_step_is_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))

    @flow.graph(model)
    def step(x: Tensor) -> Tensor:
        return model(x)

    x = batches(1)[0][0]
    step(x)
    model[1] = nn.Linear(8, 2)
    torch.testing.assert_close(step(x), model(x).detach())
    model[0].weight = nn.Parameter(torch.ones(8, 6))
    torch.testing.assert_close(step(x), model(x).detach())
    model.double()
    torch.testing.assert_close(step(x.double()), model(x.double()).detach())


def test_an_optimizer_left_with_old_parameters_is_refused() -> None:
    model, _, step = classifier()
    step(*batches(1)[0])
    model.head = nn.Linear(8, 3)
    with pytest.raises(FlowError, match="parameter 3 of group 0 of AdamW"):
        step(*batches(1)[0])


def test_grad_modes_and_autocast_around_the_call() -> None:
    model, _, step = classifier(dropout=0.0)
    x, labels = batches(1)[0]
    expected = classifier(dropout=0.0)[2].eager(x, labels)
    with torch.no_grad():
        torch.testing.assert_close(step(x, labels), expected.detach())

    @flow.graph(model)
    def evaluate(x: Tensor) -> Tensor:
        return model(x)

    plain = evaluate(x)
    assert plain.dtype == torch.float32 and not plain.requires_grad
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        cast, eager = evaluate(x), evaluate.eager(x)
    assert cast.dtype == eager.dtype == torch.bfloat16
    torch.testing.assert_close(cast, eager.detach())


def test_equal_arguments_of_other_types_are_other_steps() -> None:
    @flow.graph()
    def scaled(x: Tensor, factor: float) -> Tensor:
        return x * factor

    x = torch.ones(2, dtype=torch.int64)
    assert scaled(x, 1).dtype == torch.int64
    assert scaled(x, 1.0).dtype == torch.float32
    assert scaled(x, True).dtype == torch.int64


# --- memory -----------------------------------------------------------------------------------------


def test_state_keeps_its_memory_and_results_are_apart_from_it() -> None:
    model, optimizer, step = classifier()
    first = batches(1)[0]
    step(*first)

    def pointers() -> list[int]:
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [x.data_ptr() for x in (*model.parameters(), *model.buffers(), *states)]

    before = pointers()
    for batch in batches(4):
        step(*batch)
    assert pointers() == before
    code = next(iter(step._last.lowered.programs.values())).tasks[-1].compute.code  # type: ignore[union-attr]
    assert "aten._fused_adamw_." in code


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_results_and_copies_keep_values_from_before_the_update(optimizer_class: type) -> None:
    class Remembering(nn.Module):
        previous: Tensor
        before_that: Tensor
        row: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
            self.register_buffer("previous", torch.zeros(2, 3))
            self.register_buffer("before_that", torch.zeros(2, 3))
            self.register_buffer("row", torch.zeros(3))

    def make() -> tuple[Remembering, Step]:
        model = Remembering()
        optimizer = optimizer_class(model.parameters(), lr=0.5)

        @flow.graph(model, optimizer)
        def step(x: Tensor) -> dict[str, Tensor]:
            row = model.weight[0].clone()
            with torch.no_grad():
                model.before_that.copy_(model.previous)
                model.previous.copy_(model.weight)
                model.row.copy_(model.weight[1])
            (model.weight * x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return {"row": row, "whole": model.previous.clone(), "weight": model.weight, "x": x}

        return model, step

    model, step = make()
    reference, reference_step = make()
    kept = []
    for number in range(3):
        x = torch.full((2, 3), float(number + 1))
        kept.append((step(x), {k: v.detach().clone() for k, v in reference_step.eager(x).items()}))
        torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))
    for found, expected in kept:  # no later step wrote over an earlier one's results
        torch.testing.assert_close(found, expected)


def test_gradients_that_a_step_leaves_are_apart() -> None:
    left, right = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    model = nn.ParameterList([left, right])

    @flow.graph(model)
    def step(x: Tensor) -> None:
        ((left + right) * x).sum().backward()

    step(torch.ones(3))
    assert left.grad is not None and right.grad is not None
    left.grad.mul_(2)
    assert right.grad.tolist() == [1, 1, 1]
    step(torch.ones(3))
    assert left.grad.tolist() == [3, 3, 3] and right.grad.tolist() == [2, 2, 2]


def test_steps_leave_no_objects_behind() -> None:
    _, _, step = classifier()
    batch = batches(1)[0]
    for _ in range(3):
        step(*batch)

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    before = num_tensors()
    for _ in range(20):
        step(*batch)
    assert num_tensors() <= before


def test_the_plan_says_what_its_registers_need() -> None:
    _, _, step = classifier()
    batch = batches(1)[0]
    with flow.simulate(2):
        plan = step.compile(*batch)
    assert plan.memory is not None and set(plan.memory.ranks) == {0, 1}
    assert all(
        f"rank {rank}: {one.num_bytes:,} bytes" in step.text() for rank, one in plan.memory.ranks.items()
    )
    assert "no timing of actors deadlocks" in step.text()
    held = sum(one.nbytes for one in [*step.subject.params.values(), *batch])
    assert plan.memory.num_bytes > held / 2
