"""`make test-faults`: random faults over short runs, in a table; exit status 1 if anything was lost."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .drive import Outcome, endured
from .faults import FAULTS, SLEEP, Fault, drawn
from .job import without_faults

#: Ranks of the jobs, and how many faults each of them meets.
JOBS = ((2, 9), (1, 9), (3, 5), (2, 5), (4, 3))
STEPS = 400
BOUND = 600  # seconds for all of it


def told_of(fault: Fault, num_ranks: int) -> Fault:
    """The fault, or of a rank alone that would sleep, which nobody waits for, one that stops it."""
    return (
        fault if num_ranks > 1 or fault.name != SLEEP else next(one for one in FAULTS if "stop" in one.name)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    total = sum(count for _, count in JOBS)
    faults = drawn(seed, total)
    started = time.monotonic()
    table = Table(
        "fault", "ranks", "after step", "went on at", "steps again", "seconds", title=f"seed {seed}"
    )
    done: list[Outcome] = []
    problem = ""
    with tempfile.TemporaryDirectory(prefix="monoflow-faults-") as place:
        (Path(place) / "expected").mkdir()
        expected = without_faults(Path(place) / "expected", "--steps", str(STEPS))
        for number, (num_ranks, count) in enumerate(JOBS):
            own = [told_of(one, num_ranks) for one in faults[len(done) : len(done) + count]]
            try:
                outcomes, num_steps = endured(
                    Path(place) / str(number), num_ranks, own, seed + number, expected, started + BOUND
                )
            except AssertionError as error:
                problem = f"job {number} of {num_ranks} ranks: {error}"
                break
            done += outcomes
            for one in outcomes:
                table.add_row(
                    one.fault, str(one.num_ranks), str(one.at), str(one.again),
                    str(one.at + 1 - one.again), f"{one.seconds:.1f}",
                )  # fmt: skip
            console.print(
                f"job {number}: {num_ranks} ranks, {len(outcomes)} faults, {num_steps} steps as expected"
            )
            if len(outcomes) < count:
                problem = f"not done after {BOUND} s"
                break
    console.print(table)
    console.print(
        f"{len(done)} of {total} faults endured in {time.monotonic() - started:.0f} s; "
        + (problem or "no sample lost, no curve diverged, no hang"),
        markup=False,
    )
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
