"""Does faults to jobs and looks at what is left of their curves."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .faults import Fault
from .job import Job, Line

#: How far a loss may be from that of a run without faults: it is summed in another order.
TOLERANCE = 2e-4
#: Steps between two faults.
APART = 3


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    Attributes:
        at: the last step before it.
        loses: see `Fault`.
        saved: the newest step that was saved before it, and was still to be had after it.
        again: the first step after it; no later than the next one, as none may be left out.
        seconds: until that step was done.
    """

    fault: str
    num_ranks: int
    loses: int | None
    at: int
    saved: int
    again: int
    seconds: float


def endure(
    job: Job, faults: Sequence[Fault], choice: random.Random, deadline: float = math.inf
) -> list[Outcome]:
    """Does faults to a job, one after the other, each some steps after the job went on from the last.

    Args:
        deadline: by the monotonic clock; none is done after it.

    Raises:
        Hang: the job did not go on.
    """
    outcomes: list[Outcome] = []
    life, begun = 0, 0
    for fault in faults:
        if time.monotonic() > deadline:
            break
        due = choice.randint(APART, 2 * APART)

        def has_stepped(life: int = life, begun: int = begun, due: int = due) -> bool:
            lines = job.lines()[begun:]
            return sum(line.pid != life for line in lines) >= due

        job.wait(has_stepped, f"{due} steps before {fault.name!r}")
        saved = 0 if fault.damages else job.newest(in_memory=not fault.restarts_launcher)
        fault.do(job, choice)
        started = time.monotonic()
        lines = job.lines()
        life, begun = lines[-1].pid, len(lines)
        if fault.restarts_launcher:
            job.start()
        job.wait(
            lambda life=life, begun=begun: any(line.pid != life for line in job.lines()[begun:]),
            f"step after {fault.name!r}",
        )
        after = next(line for line in job.lines()[begun:] if line.pid != life)
        last = [line for line in job.lines() if line.pid == life][-1]
        seconds = time.monotonic() - started
        outcomes.append(
            Outcome(fault.name, after.num_ranks, fault.loses, last.step, saved, after.step, seconds)
        )
    return outcomes


def finish(job: Job) -> None:
    """Waits for the end of a job. Raises AssertionError if it is not a good one."""
    (job.folder / "stop").touch()
    job.wait(job.is_over, "end of the job")
    assert job.process.returncode == 0, job.errors.read_text()[-4000:]
    left = list(Path("/dev/shm").glob(f"monoflow-*-{job.process.pid}-*"))
    assert not left, f"snapshots are left in memory: {left}"


def check(lines: Sequence[Line], expected: Mapping[int, Line], outcomes: Sequence[Outcome]) -> None:
    """Raises AssertionError if samples or saved steps were lost, or a loss is another than without faults."""
    for line in lines:
        assert line.samples == expected[line.step].samples, f"step {line.step} took other samples"
        gap = abs(line.loss - expected[line.step].loss)
        assert gap <= TOLERANCE, f"step {line.step}: loss {line.loss}, {expected[line.step].loss} expected"
    exact: dict[tuple[int, int], float] = {}
    for line in lines:  # of one number of ranks, bit for bit
        first = exact.setdefault((line.step, line.num_ranks), line.loss)
        assert line.loss == first, f"step {line.step} on {line.num_ranks} ranks: {line.loss}, before {first}"
    steps = [line.step for line in lines]
    assert steps[0] == 1
    for before, after in itertools.pairwise(steps):
        assert after <= before + 1, f"steps {before + 1} to {after - 1} were left out"
    for one in outcomes:
        assert one.saved < one.again <= one.at + 1, f"{one}: steps that had been saved were lost"
        assert one.loses is None or one.at + 1 - one.again <= one.loses, f"{one}: too many steps were lost"


def endured(
    folder: Path,
    num_ranks: int,
    faults: Sequence[Fault],
    seed: int,
    expected: Mapping[int, Line],
    deadline: float = math.inf,
) -> tuple[list[Outcome], int]:
    """A job from its start to its end, with faults in between; what became of them, and its steps."""
    folder.mkdir(parents=True)
    job = Job(folder, num_ranks, "--pause", "0.1", "--steps", str(max(expected)))
    try:
        outcomes = endure(job, faults, random.Random(seed), deadline)
        finish(job)
        lines = job.lines()
        check(lines, expected, outcomes)
        twice, last = sum(one.at + 1 - one.again for one in outcomes), lines[-1].step
        assert len(lines) == last + twice, (
            f"{len(lines)} steps, of which faults cost {twice}, led to step {last}"
        )
    finally:
        job.close()
    shutil.rmtree(folder)
    return outcomes, len(lines)
