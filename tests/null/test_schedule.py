"""The order of ops and moves: updates as soon as they can, reductions at once, and still in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.plan import overlap
from monoflow.plan.donate import donations, overwritten
from monoflow.plan.memory import CATEGORIES, timeline
from monoflow.plan.order import IN_PLACE
from monoflow.plan.schedule import Box, Op, Schedule, schedule
from monoflow.sbp.layout import Partial
from monoflow.step import Step


class Mlp(nn.Module):
    """Four equal layers; `tied` uses the first one twice."""

    def __init__(self, tied: bool = False, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.layers[0](x) if self.tied else x


def compiled(
    plan: str,
    num_ranks: int,
    clip: bool = False,
    tied: bool = False,
    returns: Callable[[nn.Module, Tensor], object] | None = None,
    width: int = 16,
) -> Step:
    torch.manual_seed(0)
    model = Mlp(tied, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @flow.graph(model, optimizer, plan=plan, placement=flow.placement("cpu", list(range(num_ranks))))
    def step(x: Tensor) -> object:
        loss = model(x).square().sum()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return returns(model, loss) if returns else loss

    with flow.simulate(num_ranks):
        step.compile(torch.randn(8, width))
    return step


def updates(made: Schedule) -> list[int]:
    """Positions of the updates."""
    return [i for i, item in enumerate(made.items) if isinstance(item, Op) and item.node.target in IN_PLACE]


def in_place(step: Step, made: Schedule) -> int:
    """How many updates overwrite their state."""
    return len(donations(step.plan, made, [[item] for item in made.items]).nodes)


@pytest.mark.parametrize("tied", [False, True])
def test_an_update_runs_when_its_gradient_is_there_and_nothing_reads_the_old_value(tied: bool) -> None:
    step = compiled("data", 1, tied=tied)
    made = schedule(step.plan)
    ops = [(i, item) for i, item in enumerate(made.items) if isinstance(item, Op)]
    made_at = {value: i for i, item in ops for value in item.outputs}
    found = updates(made)
    assert len(found) == 8 and in_place(step, made) == 8
    for at in found:
        update = made.items[at]
        assert isinstance(update, Op)
        state = set(overwritten(update))
        reads = [i for i, item in ops if i != at and state & set(item.inputs)]
        needs = [made_at[value] for value in update.inputs if value in made_at]
        between = made.items[max(needs + reads) + 1 : at]
        assert max(needs + reads) < at
        # Only the update's own preparations, or updates that became due together with it.
        assert all(str(item.phase) == "update" for item in between)
    last_product = max(i for i, item in ops if item.node.target is torch.ops.aten.mm.default)
    assert sum(at < last_product for at in found) >= 5, "all but the first layer's, and one more"


def test_with_a_common_norm_updates_come_last() -> None:
    step = compiled("data", 1, clip=True)
    made = schedule(step.plan)
    last_backward = max(i for i, item in enumerate(made.items) if str(item.phase) == "backward")
    assert min(updates(made)) > last_backward and in_place(step, made) == 8


def test_a_copy_that_is_made_after_the_update_is_of_the_new_value() -> None:

    def returns(model: nn.Module, loss: Tensor) -> object:
        return loss, model.get_parameter("layers.0.weight").detach().clone()

    step = compiled("data", 1, returns=returns)
    _, copied = step(torch.randn(8, 16))
    current = step._subject.params["layers.0.weight"].detach()
    torch.testing.assert_close(copied, current)
    assert copied.data_ptr() != current.data_ptr()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move goes by itself: even the smallest bundle is full."""
    monkeypatch.setattr(overlap, "_START", 1.0)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gradient_is_reduced_right_after_it_is_made(num_ranks: int, alone: None) -> None:
    made = schedule(compiled("zero", num_ranks, clip=True).plan)
    partial = {
        value: i
        for i, item in enumerate(made.items)
        if isinstance(item, Op)
        for value in item.outputs
        if any(isinstance(one, Partial) for one in value.layout)
    }
    reductions = [
        (i, item)
        for i, item in enumerate(made.items)
        if isinstance(item, Box) and item.move.kind in ("reduce_scatter", "all_reduce")
    ]
    assert len(reductions) >= 8
    for position, box in reductions:
        assert position - partial[box.source] == 1, box.source.name


def test_gradients_of_split_state_are_never_whole_together(alone: None) -> None:
    """With a common norm every gradient waits for its update: in its stored parts."""
    step = compiled("zero", 2, clip=True, width=256)
    column = CATEGORIES.index("gradients")
    most = max(row[column] for row in timeline(step.plan, schedule(step.plan)).held)
    layer = 4 * (256 * 256 + 256)
    assert most <= 4 * layer // 2 + layer  # all in parts, and a square or another copy of one


def test_updates_at_once_hold_one_gradient_at_a_time() -> None:
    column = CATEGORIES.index("gradients")
    at_once, waiting = (
        max(row[column] for row in timeline(step.plan, schedule(step.plan)).held)
        for step in (compiled("data", 1), compiled("data", 1, clip=True))
    )
    assert waiting >= 4 * 4 * (16 * 16 + 16)
    assert at_once <= 2 * 4 * (16 * 16 + 16)


@pytest.mark.parametrize("plan", ["data", "zero", "tensor"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_order_changes_no_number(plan: str, tied: bool) -> None:
    """Against eager steps; AdamW, so that a gradient of another sample or an update too early would show."""
    torch.manual_seed(0)
    reference = Mlp(tied)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    step = compiled(plan, 2, tied=tied)
    batches = torch.randn(3, 8, 16)
    for x in batches:
        expected = reference(x).square().sum()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        with flow.simulate(2):
            torch.testing.assert_close(step(x), F.mse_loss(expected, torch.zeros(()), reduction="sum").sqrt())
    for name, value in reference.named_parameters():
        torch.testing.assert_close(step._subject.params[name].detach(), value.detach(), atol=2e-6, rtol=1e-4)
