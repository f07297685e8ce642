"""A call of a step on several ranks returns before the step is done; whoever looks waits."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import monoflow as flow
from tests.conftest import RunCli, RunRanks

#: A script's step, which fails at an index above 3, at its line 7.
TABLE_STEP = """\
import torch, monoflow as flow
torch.manual_seed(0)
table = torch.nn.Embedding(4, 3)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

@flow.graph(table, optimizer, plan="data")
def step(ids):
    loss = table(ids).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

"""


def build(plan: str) -> tuple[nn.Module, torch.optim.Optimizer, flow.Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @flow.graph(model, optimizer, plan=plan)
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, out

    return model, optimizer, step


def batches() -> torch.Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


def curve_without_looking(plan: str) -> tuple[list[float], list[bool], list[float]]:
    """Losses that are read at the end, of a batch that is filled anew as soon as a call has returned."""
    _, optimizer, step = build(plan)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    buffer = torch.empty(6, 8)
    losses, waiting, outs = [], [], []
    for x in batches():
        loss, out = step(buffer.copy_(x))
        buffer.fill_(float("nan"))
        schedule.step()
        waiting.append(type(loss) is not torch.Tensor and type(out) is not torch.Tensor)
        losses.append(loss)
        outs.append(out)
    flow.synchronize()
    waiting.append(all(type(one) is torch.Tensor for one in losses))
    return [float(one) for one in losses], waiting, [float(flow_whole(one).sum()) for one in outs]


def flow_whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


def eager_curve() -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses, outs = [], []
    for x in batches():
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        outs.append(out.sum().item())
    return losses, outs


@pytest.mark.parametrize("plan", ["data", "zero", "tensor"])
def test_steps_that_nobody_looks_at_give_the_same_curve(plan: str, run_ranks: RunRanks) -> None:
    expected_losses, expected_outs = eager_curve()
    for losses, waiting, outs in run_ranks(2, curve_without_looking, plan):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert outs == pytest.approx(expected_outs, rel=1e-4, abs=1e-5)
        assert all(waiting), "a call waited for its step"


def looked_at(plan: str) -> tuple[list[float], list[float], bool]:
    """Sums of the parameters and of the first moments right after every call, and of a copy of the model."""
    model, optimizer, step = build(plan)
    sums, moments, same = [], [], True
    for x in batches():
        step(x)
        sums.append(sum(float(flow_whole(one.detach()).sum()) for one in model.parameters()))
        step(x)
        state = optimizer.state_dict()["state"]
        moments.append(sum(float(flow_whole(one["exp_avg"]).abs().sum()) for one in state.values()))
        step(x)
        twin = copy.deepcopy(model)
        pairs = zip(twin.parameters(), model.parameters(), strict=True)
        same &= all(torch.equal(flow_whole(a.detach()), flow_whole(b.detach())) for a, b in pairs)
    return sums, moments, same


@pytest.mark.parametrize("plan", ["data", "zero"])
def test_parameters_and_state_are_those_after_the_step(plan: str, run_ranks: RunRanks) -> None:
    sums, moments, _ = looked_at(plan)  # one device: every step is over when its call returns
    for found_sums, found_moments, same in run_ranks(2, looked_at, plan):
        assert found_sums == pytest.approx(sums, rel=1e-4, abs=1e-4)
        assert found_moments == pytest.approx(moments, rel=1e-4)
        assert same


def test_a_script_may_end_with_a_step_on_its_way(tmp_path: Path, run_cli: RunCli) -> None:
    script = tmp_path / "train.py"
    script.write_text(TABLE_STEP + "step(torch.tensor([0, 1, 2, 3]))\nraise SystemExit(0)\n")
    done = run_cli("run", "-n", "2", script, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_last_step_that_fails_fails_the_job(tmp_path: Path, run_cli: RunCli) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        TABLE_STEP
        + textwrap.dedent(
            """\
            step(torch.tensor([0, 1, 2, 3]))
            step(torch.tensor([0, 1, 2, 9]))
            print("the script is at its end")
            """
        )
    )
    done = run_cli("run", "-n", "2", script)
    assert done.returncode != 0
    assert "train.py:8" in done.stderr and "the script is at its end" in done.stdout
    assert "signal" not in done.stderr
