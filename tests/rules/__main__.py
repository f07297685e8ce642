"""`make test-rules`: every rule on every sample, a report, and an exit status that says if any is wrong."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tests.rules.collect import PROVABLE, collected
from tests.rules.core_aten import coverage
from tests.rules.prove import Proof, prove_samples, search_samples
from tests.rules.record import Sample
from tests.rules.report import show
from tests.rules.stand_ins import kernels_as_maths
from tests.rules.workers import Died, run_all

_LIMIT = 200  # samples of one op from torch
_PIECE = 10  # samples of one task
_NARROW = 3  # samples of one task in float32 too
_SEARCHED, _LAYOUTS = 4, 200  # samples of one op searched for what is missing, and layouts tried in each


class _Task(NamedTuple):
    """A piece of an op's samples to prove, or (first None) the op to search. Ops go by name."""

    op: str
    first: int | None


def main() -> int:
    """The exit status: 0 if no rule is wrong, every op was proven, and core ATen is covered."""
    proofs: dict[str, Proof] = {str(op): Proof(str(op)) for op in PROVABLE}
    crashed: list[str] = []
    with warnings.catch_warnings(), kernels_as_maths():
        warnings.simplefilter("ignore")
        samples = {str(op): calls for op, calls in collected(_LIMIT).items()}
        tasks = [_Task(op, None) for op in samples]
        tasks += [_Task(op, i) for op, calls in samples.items() for i in range(0, len(calls), _PIECE)]
        for task, result in run_all(lambda task: _run(task, samples), tasks, len(os.sched_getaffinity(0))):
            if not isinstance(result, Died):
                proofs[task.op].add(result)
            elif task.first is None and result.crashed:
                crashed.append(task.op)
            else:
                proofs[task.op].wrong.append(f"{task.op}: {result.why}")
    covered = coverage()
    show(proofs, crashed, covered, Console(width=None if sys.stdout.isatty() else 160))
    failed = any(one.wrong or not one.samples for one in proofs.values()) or covered.missing
    return 1 if failed else 0


def _run(task: _Task, samples: dict[str, list[Sample]]) -> Proof:
    # torch's kernels warn from C++ about empty shards, once a call; a failed assertion of theirs is told too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    calls = samples[task.op]
    if not calls:
        return Proof(task.op)
    rule = PROVABLE[calls[0].op]
    if task.first is None:
        return search_samples(rule, calls, _SEARCHED, _LAYOUTS)
    return prove_samples(rule, calls[task.first : task.first + _PIECE], _NARROW)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    sys.exit(main())
