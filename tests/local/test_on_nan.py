"""Steps whose loss or gradients are not finite change nothing, and say where it began."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monoflow as flow
from monoflow.errors import FlowError, NonFiniteError
from monoflow.step import Step

ROWS = 8


class Model(nn.Module):
    """Takes a logarithm, which negative numbers have none of, and a root, which has no slope at 0."""

    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.log(x)  # the line of the NaN
        x = self.norm(self.first(x))
        return self.last(torch.relu(x)).square().sum(1).sqrt()


LINE = next(
    number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "the line of" in line
)


def build(clip: bool = True, root: bool = False, **options: Any) -> tuple[Step, nn.Module, Any]:
    torch.manual_seed(0)
    model = Model(batch_norm="micro_batches" not in options)
    if root:  # outputs of exactly 0: a finite loss, whose gradient is 0 / 0
        nn.init.zeros_(model.last.weight)
        nn.init.zeros_(model.last.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer, **options)
    def train_step(x: Tensor) -> Tensor:
        loss = model(x).mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step, model, optimizer


def batch(seed: int, bad: bool = False) -> Tensor:
    x = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(seed)) + 0.5
    if bad:
        x[5, 2] = -1
    return x


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"{number}:{key}": value.clone() for key, value in state.items()}
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


LAYOUTS = [
    (1, {}),
    (2, {"plan": "data", "micro_batches": 2}),
    (2, {"plan": "zero"}),
    (2, {"plan": "pipeline", "micro_batches": 2}),
]
IDS = ["one", "data in micro-batches", "zero", "pipeline"]


@pytest.mark.parametrize(("num_ranks", "options"), LAYOUTS, ids=IDS)
@pytest.mark.parametrize("clip", [True, False], ids=["clip", "no clip"])
def test_the_first_op_is_named_and_nothing_changes(
    num_ranks: int, options: dict[str, Any], clip: bool
) -> None:
    with flow.simulate(num_ranks):
        step, model, optimizer = build(clip, **options)
        step(batch(0))
        before = state_of(model, optimizer)
        with pytest.raises(NonFiniteError) as caught:
            step(batch(1, bad=True))
        text = str(caught.value)
        assert re.search(r"the loss \(result\) is nan", text), text
        assert ("the norm of the gradients is nan" in text) == clip
        assert f"{__file__}:{LINE}" in text and "op log" in text, text
        assert "The first NaN was made on rank" in text
        assert_same(before, state_of(model, optimizer))
        step(batch(2))  # and can go on
        after, fresh = state_of(model, optimizer), build(clip, **options)
        for seed in (0, 2):
            fresh[0](batch(seed))
        assert_same(state_of(*fresh[1:]), after)


@pytest.mark.parametrize(("num_ranks", "options"), LAYOUTS[::2], ids=IDS[::2])
@pytest.mark.parametrize("clip", [True, False], ids=["clip", "no clip"])
def test_skipped_steps_change_nothing_and_count(num_ranks: int, options: dict[str, Any], clip: bool) -> None:
    with flow.simulate(num_ranks):
        step, model, optimizer = build(clip, on_nan="skip", **options)
        plain, *rest = build(clip, **options)
        for seed in range(4):
            loss = step(batch(seed, bad=seed in (0, 2)))
            assert bool(loss.isnan()) == (seed in (0, 2))
            if seed in (1, 3):
                assert torch.equal(plain(batch(seed)), loss)
        assert step.num_skipped == 2 and plain.num_skipped == 0
        assert_same(state_of(*rest), state_of(model, optimizer))


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_loss_is_what_any_backward_pass_begins_at(way: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = model(x).mean()
        if way == "backward":
            torch.autograd.backward([loss])
        else:
            params = list(model.parameters())
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(batch(0))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteError, match="the loss"):
        step(batch(1, bad=True))
    assert_same(before, model.state_dict())
    assert step.num_steps == 2


@pytest.mark.parametrize("length", [0, 700])
def test_what_scales_a_clipped_gradient_is_looked_at_too(length: int) -> None:
    """The norm that clips was finite; the gradient that the optimizer sees is not, however far that comes."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer, on_nan="skip")
    def step(x: Tensor, scale: Tensor) -> Tensor:
        loss = model(x).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for _ in range(length):
            scale = scale + 1
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(batch(0), torch.tensor(1.0))
    before = copy.deepcopy(model.state_dict())
    step(batch(1), torch.tensor(float("inf")))
    assert step.num_skipped == 1
    assert_same(before, model.state_dict())


def test_gradients_alone(clip: bool = False) -> None:
    step, model, _ = build(clip, root=True, on_nan="skip")
    before = copy.deepcopy(model.state_dict())
    assert step(batch(0)).item() == 0 and step.num_skipped == 1
    assert_same(before, model.state_dict())
    step, model, _ = build(clip=True, root=True)
    with pytest.raises(
        NonFiniteError, match=r"train_step: the norm of the gradients is nan\. The first (NaN|Inf)"
    ):
        step(batch(0))
    assert_same(before, model.state_dict())


def test_gradients_that_nothing_looked_at_show_in_the_next_loss() -> None:
    step, _, _ = build(clip=False, root=True)
    assert step(batch(0)).item() == 0
    with pytest.raises(NonFiniteError, match=r"the loss \(result\) is nan\. \S+ held NaN before this step"):
        step(batch(1))


def test_what_it_costs_in_the_graph() -> None:
    graphs = {
        (clip, on_nan): build(clip, on_nan=on_nan)[0].capture(batch(0))
        for clip in (False, True)
        for on_nan in ("raise", "skip")
    }
    checked = {key: [one.name for one in graph.outputs if one.checked] for key, graph in graphs.items()}
    assert checked[False, "raise"] == ["result"]
    for key in ((False, "skip"), (True, "raise"), (True, "skip")):
        assert checked[key] == ["result", "checked:gradients"], key
    size = {key: len(list(graph.calls())) for key, graph in graphs.items()}
    assert size[True, "raise"] == size[True, "skip"]
    # Per gradient a norm, then one stack and one sum.
    num_grads = len(list(Model().parameters()))
    assert size[False, "skip"] - size[False, "raise"] <= 2 * num_grads + 2


@pytest.mark.parametrize("plan", ["data", "zero", "tensor"])
def test_what_it_costs_in_a_plan(plan: str) -> None:
    """Updates run in place behind the gate; to look at all gradients costs no more than to clip them."""
    with flow.simulate(2):
        found = {}
        for clip in (True, False):
            for on_nan in ("raise", "skip"):
                step, _, _ = build(clip, plan=plan, on_nan=on_nan)
                step(batch(0))
                program = next(iter(step._require().lowered.programs.values()))
                donated = sum(port.donated for port in program.inputs)
                assert donated == 3 * 6 and any(task.gated for task in program.tasks)
                found[clip, on_nan] = step.stats().calls(), step.stats().num_bytes()
        assert found[True, "raise"] == found[True, "skip"]
        (calls, num_bytes), (clip_calls, clip_bytes) = found[False, "skip"], found[True, "skip"]
        assert calls <= clip_calls and num_bytes <= clip_bytes, found


def test_metrics_may_be_what_they_are() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def train_step(x: Tensor) -> dict[str, Tensor]:
        total = model(x).square().sum()
        loss = total / 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"total": total.detach(), "endless": (total.detach() + 1000).exp()}

    found = train_step(batch(0))
    assert found["endless"].isinf() and found["total"].isfinite()
    checked = [one.name for one in train_step.plan.graph.outputs if one.checked]
    assert checked == ["result.total"]


def test_rollback_loads_the_last_snapshot(tmp_path: Path) -> None:
    step, model, optimizer = build(on_nan="rollback")
    step(batch(9, bad=True))
    with pytest.raises(FlowError, match=r"there is no flow.checkpointer"):
        step(batch(0))
    step, model, optimizer = build(on_nan="rollback")
    with flow.checkpointer(tmp_path, step, every=2) as series:
        for seed in range(5):
            step(batch(seed, bad=seed == 3))
            series.after_step()
    # Steps 0 to 2, of which the last is forgotten; 3 is refused; 4 is the third step.
    assert step.num_steps == 3 and step.num_skipped == 1
    plain, *rest = build()
    for seed in (0, 1, 4):
        plain(batch(seed))
    assert_same(state_of(*rest), state_of(model, optimizer))


def test_no_such_policy() -> None:
    with pytest.raises(FlowError, match=r"on_nan='ignore' is none of raise, skip, rollback"):
        build(on_nan="ignore")
