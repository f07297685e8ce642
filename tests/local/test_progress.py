"""flow.progress: what the line says, where it is shown, and what counts as waiting for data."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import monoflow as flow
from monoflow.data.progress import Progress
from monoflow.log import IDLE, SOURCE, Wait, tell
from tests.conftest import RunRanks


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def waited(start: float, end: float, kind: str = SOURCE) -> None:
    tell(Wait(kind, "", 0, int(start * 1e9), int(end * 1e9)))


def test_a_plain_line_every_few_seconds_and_at_the_end() -> None:
    clock, out = Clock(), io.StringIO()
    batches = [torch.zeros(4, 3)] * 5
    steps = Progress(batches, 105, 100, every=10.0, file=out, clock=clock)
    for number, _ in enumerate(steps):
        steps.show(loss=torch.tensor(1.5 - number / 10))
        clock.now += 4.0
    assert out.getvalue().splitlines() == [
        "step 103/105  loss 1.3000  0.25 steps/s  1 samples/s  waits for data 0%  0:08 left",
        "step 105/105  loss 1.1000  0.25 steps/s  1 samples/s  waits for data 0%",
    ]


def test_a_terminal_has_one_line_that_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    clock, out = Clock(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    steps = Progress(({"ids": torch.zeros(2, 50, dtype=torch.int64)} for _ in range(3)), clock=clock)
    for _ in steps:
        clock.now += 1.0
        if clock.now == 102:
            steps.print("in between")
            print("the script's own")
        if clock.now == 103:
            steps.show(loss=1.0)
    assert sys.stdout is out  # as it was
    text = re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]", "", out.getvalue())
    assert [line for line in re.split(r"[\r\n]+", text) if line] == [
        "step 1  1.00 steps/s  100 tokens/s  waits for data 0%",
        "in between",
        "step 1  1.00 steps/s  100 tokens/s  waits for data 0%",
        "the script's own",
        "step 1  1.00 steps/s  100 tokens/s  waits for data 0%",
        "step 2  1.00 steps/s  100 tokens/s  waits for data 0%",
        *["step 3  loss 1.0000  1.00 steps/s  100 tokens/s  waits for …"] * 2,  # and at the end
    ]
    assert out.getvalue().count("\x1b[2K") == 5  # the line goes, for each print and each new one


def test_nothing_is_printed_if_nothing_shall_be(capsys: pytest.CaptureFixture[str]) -> None:
    steps = flow.progress([1, 2, 3], every=0)
    assert list(steps) == [1, 2, 3]
    assert capsys.readouterr().out == ""
    assert list(flow.progress([])) == []
    assert capsys.readouterr().out == ""
    assert list(flow.progress([1])) == [1]
    assert capsys.readouterr().out.startswith("step 1/1  ")


def test_only_the_part_of_a_wait_counts_in_which_nothing_ran() -> None:
    clock, out = Clock(), io.StringIO()

    def batches() -> Iterator[int]:
        waited(100, 103)  # a batch
        yield 0
        waited(104, 110)
        yield 1
        waited(110, 111)
        yield 2
        waited(111, 112)

    steps = Progress(batches(), 3, every=1e-9, file=out, clock=clock)
    for number in steps:
        if number == 0:
            waited(0, 103.5, IDLE)  # a step begins; nothing ran since long ago
            assert steps.wait_seconds == pytest.approx(3)
            clock.now = 110
        elif number == 1:
            waited(108, 110, IDLE)  # the step before was over at 108
            assert steps.wait_seconds == pytest.approx(3 + 2)
            clock.now = 114
        else:
            waited(111, 111, IDLE)  # it still runs
            assert steps.wait_seconds == pytest.approx(3 + 2)
            clock.now = 115
    assert steps.wait_seconds == pytest.approx(5)
    waited(200, 300)
    waited(0, 300, IDLE)
    assert steps.wait_seconds == pytest.approx(5)  # it no longer listens
    shares = [line.split("waits for data ")[1].split("%")[0] for line in out.getvalue().splitlines()]
    assert shares == ["30", "50", "0"]


def test_batches_without_a_step_between_count_whole() -> None:
    steps = Progress(flow.stream(torch.arange(6.0), 2), every=0)
    for _ in steps:
        pass
    assert steps.wait_seconds >= 0
    waited_before = steps.wait_seconds
    for _ in steps:
        pass
    assert steps.wait_seconds > waited_before


def test_a_real_step_says_when_nothing_ran() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    stream = flow.stream(torch.randn(32, 3), 8)
    steps = Progress(stream, every=0)
    for batch in steps:
        steps.show(loss=step(batch))
    # One device: steps are over when their call returns, so that every wait was one of compute.
    assert steps.wait_seconds == pytest.approx(stream.stats.wait_seconds)


def test_a_step_that_fails_is_not_looked_at_when_a_loop_ends_early() -> None:
    class Failed(torch.Tensor):
        def __float__(self) -> float:
            raise AssertionError("it was read")

    out = Terminal()
    steps = Progress([1, 2, 3], file=out, clock=Clock())
    for _ in steps:
        steps.show(loss=torch.zeros(()).as_subclass(Failed))
        break
    assert out.getvalue() in ("", "\n")


def on_two_ranks() -> tuple[str, str]:
    rank, out = dist.get_rank(), io.StringIO()
    stream = flow.stream(torch.randn(12, 3), 4)
    steps = Progress(stream, every=1e-9, file=out)
    for _ in steps:
        steps.show(loss=0.5)
    mesh = init_device_mesh("cpu", (2,))
    try:
        steps.show(out=DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]))
    except flow.FlowError as error:
        return out.getvalue(), str(error)
    return out.getvalue(), f"rank {rank} was not refused"


def test_rank_0_alone_prints_and_no_rank_waits_for_others(run_ranks: RunRanks) -> None:
    (first, refused), (second, also) = run_ranks(2, on_two_ranks)
    assert [line.split("  ")[:2] for line in first.splitlines()] == [
        [f"step {number}/3", "loss 0.5000"] for number in (1, 2, 3)
    ]
    assert second == ""
    assert refused == also and "progress shows out, a global tensor of which ranks hold parts" in refused
