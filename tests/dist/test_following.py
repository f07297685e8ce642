"""Steps on real ranks begin before the ones before are over, and nobody can tell but by the time."""

from __future__ import annotations

import gc
import random
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import monoflow as flow
from monoflow.runtime.actors import Engine
from monoflow.runtime.recorder import Fired
from monoflow.runtime.transport import DistTransport
from monoflow.step.pending import Flight, is_waiting
from tests.conftest import RunCli, RunRanks
from tests.dist.test_pending import TABLE_STEP, batches, build, flow_whole
from tests.local.test_on_nan import batch
from tests.local.test_on_nan import build as build_checked
from tests.null.test_following import TWO, sharded


def with_norm(plan: str) -> tuple[nn.Module, torch.optim.Optimizer, flow.Step]:
    """A model with state that no optimizer updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
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


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    moments = [one for own in optimizer.state_dict()["state"].values() for one in own.values()]
    held = [*model.parameters(), *model.buffers(), *moments]
    return [flow_whole(one.detach()).double().flatten().tolist() for one in held]


class Trained(NamedTuple):
    losses: list[float]
    outs: list[float]
    state: list[list[float]]
    most: int  # steps on their way at a time


def trained(plan: str, norm: bool, look: int) -> Trained:
    """Many steps, of which every so manieth is waited for."""
    model, optimizer, step = (with_norm if norm else build)(plan)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    buffer = torch.empty(6, 8)
    losses, outs, most = [], [], 0
    for number, x in enumerate([*batches(), *batches(), *batches()]):
        loss, out = step(buffer.copy_(x))
        buffer.fill_(float("nan"))
        schedule.step()
        losses.append(loss)
        outs.append(out)
        most = max(most, sum(map(is_waiting, losses)))
        if number % look == look - 1:
            flow.synchronize()
    sums = [float(flow_whole(one).double().sum()) for one in outs]
    return Trained([float(one) for one in losses], sums, state_of(model, optimizer), most)


CASES = [("data", True), ("zero", False), ("zero", True), ("tensor", False)]


def skipped(look: int) -> tuple[list[float], list[list[float]], int]:
    """Losses and state of steps of which some are refused and left out."""
    step, model, optimizer = build_checked(plan="zero", on_nan="skip")
    losses = []
    for seed in range(8):
        losses.append(step(batch(seed, bad=seed in (2, 3, 6))))
        if seed % look == look - 1:
            flow.synchronize()
    values = [float(one) for one in losses]
    return [-1.0 if one != one else one for one in values], state_of(model, optimizer), step.num_skipped


def kept_of_dropped() -> int:
    """How many steps are remembered after many whose results nobody looked at."""
    _, _, step = build("zero")
    for _ in range(300):
        step(batches()[0])
    gc.collect()
    return sum(isinstance(one, Flight) for one in gc.get_objects())


def both_ways() -> tuple[list[tuple[Trained, Trained]], int, bool]:
    found = [(trained(plan, norm, 1), trained(plan, norm, 100)) for plan, norm in CASES]
    alone, followed = skipped(1), skipped(100)
    return found, kept_of_dropped(), followed == alone and alone[0].count(-1.0) == alone[2] == 3


def test_steps_that_follow_give_the_bits_of_one_after_the_other(run_ranks: RunRanks) -> None:
    for found, kept, skips_alike in run_ranks(2, both_ways):
        assert kept <= 3
        assert skips_alike
        for case, (alone, followed) in zip(CASES, found, strict=True):
            assert followed[:3] == alone[:3], case
            assert (alone.most, followed.most) == (1, 2), case


def looked_between(follows: bool) -> list[Any]:
    """What a user sees who does something after every second call that two steps may be on their way for."""
    model, optimizer, step = build("zero")
    other = flow.graph(model, optimizer, plan="zero")(lambda x: model(x).sum())
    x = batches()
    seen: list[Any] = []

    def call(times: int = 2) -> torch.Tensor:
        for number in range(times):
            loss, _ = step(x[number % 4])
            if not follows:
                flow.synchronize()
        return loss  # pyright: ignore[reportPossiblyUnboundVariable]

    seen.append(float(call()))
    call()
    seen.append([float(flow_whole(one.detach()).double().sum()) for one in model.parameters()])
    call()
    state = optimizer.state_dict()["state"]
    seen.append([float(flow_whole(one["exp_avg"]).double().sum()) for one in state.values()])
    call()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    call()
    with torch.no_grad():
        model[0].bias.mul_(0.5)  # type: ignore[union-attr, operator]
    call()
    seen.append(float(other(x[0])))  # another step of the same model
    first, _ = step(x[0])
    second, _ = step(x[1])
    seen += [float(first), float(second), float(first)]
    _, out = step(x[0])
    seen.append(float(step(out.full_tensor().repeat(1, 2))[0]))  # of what the step before gave
    call()
    seen.append(step.verify(x[0]).largest < 1e-4)
    seen += [step.stats().calls(), step.num_steps, float(step.eager(x[2])[0])]
    call()
    seen.append(state_of(model, optimizer))
    return seen


def looked() -> tuple[list[Any], list[Any]]:
    return looked_between(False), looked_between(True)


def test_whatever_a_user_does_in_between_sees_steps_one_after_the_other(run_ranks: RunRanks) -> None:
    for alone, followed in run_ranks(2, looked):
        assert followed == alone


class Raced(NamedTuple):
    losses: list[float]
    state: list[list[float]]
    early: set[str]  # of any step, what began before the one before was over


def raced(follows: bool) -> Raced:
    """Steps of a program that was made by hand, with random delays."""
    rank, draw, rows = dist.get_rank(), random.Random(dist.get_rank()), []

    class Recording:
        def record(self, fired: Fired) -> None:
            rows.append(fired)

    def delay(name: str) -> None:
        time.sleep(draw.random() * 3e-3 if follows and draw.random() < 0.3 else 0)
        time.sleep(0.01 if follows and name == "count" else 0)

    program, generator = sharded(rank, delay=delay), torch.Generator().manual_seed(rank)
    shapes = [program.registers[port.register].shape for port in program.inputs[1:]]
    state = [torch.rand(shape, generator=generator) for shape in shapes]
    names = {port.name: tensor for port, tensor in zip(program.inputs[1:], state, strict=True)}
    homes = {rank: [names.get(port.replaces) for port in program.outputs]}
    engine = Engine({rank: program}, TWO, DistTransport(TWO, rank), str, lanes=True)
    engine.recorder = Recording()
    tickets = []
    for x in torch.randn(20, 4, generator=torch.Generator().manual_seed(1)):
        engine.admit(follows)
        tickets.append(engine.start({rank: [x.clone(), *state]}, homes))
    losses = [float(one.result()[rank][0]) for one in tickets]
    ends = {row.step: row.end for row in sorted(rows, key=lambda one: one.end)}
    early = {row.name for row in rows if row.start < ends.get(row.step - 1, 0)}
    return Raced(losses, [one.tolist() for one in state], early)


def raced_both_ways() -> tuple[Raced, Raced]:
    return raced(follows=False), raced(follows=True)


def test_a_gather_of_the_next_step_goes_beside_the_end_of_a_step(run_ranks: RunRanks) -> None:
    for alone, followed in run_ranks(2, raced_both_ways):
        assert followed[:2] == alone[:2]
        assert not alone.early
        assert "gather 0" in followed.early and followed.early <= {"gather 0", "prologue", "gather 1"}


def test_a_failure_is_said_once_and_the_next_step_shows_nothing(tmp_path: Path, run_cli: RunCli) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        TABLE_STEP
        + textwrap.dedent(
            """\
            good, bad = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 9])
            losses, count = [step(good)], 0
            try:
                losses.append(step(bad))
                losses.append(step(good))
                print("value", float(losses[2]))
            except Exception as error:
                count += 1
                print("raised", *(note for note in error.__notes__ if "called at" in note))
            flow.synchronize()
            values = [float(one) for one in losses]
            print("then", values[0] == values[0], all(one != one for one in values[1:]), count)
            """
        )
    )
    done = run_cli("run", "-n", "2", script)
    lines = [line.split("] ")[-1] for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert lines.count(f"raised in the step that was called at {script}:17") == 2, done.stdout
    assert lines.count("then True True 1") == 2, done.stdout
    assert "value" not in done.stdout
