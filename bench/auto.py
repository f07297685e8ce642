"""The automatic plan against every template, side by side: `python bench/auto.py --help`.

Ranks are real processes, started by `monoflow run`. All plans of a model live in the same processes and take
their steps in turn, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from contests import CONTESTS, Grid
from rich.console import Console
from rich.progress import Progress as Bar
from standings import AUTO, GOAL, Entry, grouped, is_met, markdown, table

import monoflow as flow
from monoflow.cli.calibrate import calibrate
from monoflow.cli.measure import Progress
from monoflow.plan.devices import machine_for
from monoflow.plan.plan import Plan
from monoflow.plan.predict import predict
from monoflow.runtime.launch import ensure_process_group

#: By number of ranks: the templates, and the grid that each runs on (None for the one that auto picks).
TEMPLATES: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = {
    2: (("data", (2,)), ("zero", (2,)), ("tensor", (2,))),
    4: (
        ("data", (4,)),
        ("zero", (4,)),
        ("tensor", (4,)),
        ("data x tensor", (2, 2)),
        ("zero x tensor", (2, 2)),
    ),
}
WARM_UP = 3


# --- a rank ------------------------------------------------------------------------------------------


def rank_main(models: Sequence[str], rounds: int, out: Path) -> None:
    """Runs all contests of this number of ranks; rank 0 writes the entries and tells how far it is."""
    ensure_process_group("cpu")
    total = sum(len(TEMPLATES[dist.get_world_size()]) + 1 + rounds for _ in models)
    teller = _Teller(total)
    entries = [entry for model in models for entry in contest(model, rounds, teller)]
    if dist.get_rank() == 0:
        out.write_text(json.dumps([asdict(one) for one in entries]))


class _Teller:
    """Says on rank 0's output how far it is."""

    def __init__(self, total: int) -> None:
        self.done, self.total = 0, total

    def step(self, text: str) -> None:
        self.done += 1
        if dist.get_rank() == 0:
            print(Progress(self.done, self.total, text).line(), flush=True)


def contest(model: str, rounds: int, teller: _Teller) -> list[Entry]:
    """All plans of one model, built one after the other, stepped in turn."""
    size = dist.get_world_size()
    wanted: list[tuple[str, Grid]] = [(plan, _grid(shape)) for plan, shape in TEMPLATES[size]]
    wanted.append((AUTO, None))
    cases, losses = [], []
    for plan, grid in wanted:
        torch.manual_seed(0)
        case = CONTESTS[model](plan, grid)
        losses.append(float(case.step(case.batch)))
        for _ in range(WARM_UP - 1):
            case.step(case.batch)
        flow.synchronize()
        cases.append(case)
        teller.step(f"{model}: compiled {plan}")
    _check_equal(model, [plan for plan, _ in wanted], losses)
    seconds: list[list[tuple[float, float]]] = [[] for _ in cases]
    for number in range(rounds):
        # Nobody always follows the same one; every rank draws the same order.
        for at in random.Random(number).sample(range(len(cases)), len(cases)):
            seconds[at].append(_timed(*cases[at]))
        teller.step(f"{model}: round {number + 1}")
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    made = {plan: case.step._require().plan for (plan, _), case in zip(wanted, cases, strict=True)}
    return [
        _entry(model, plan, made, slowest[at].T.tolist(), losses[at]) for at, (plan, _) in enumerate(wanted)
    ]


def _grid(shape: tuple[int, ...]) -> Grid:
    """The ranks in a grid, its axes named as the search names them."""
    ranks = torch.arange(torch.Size(shape).numel()).view(shape).tolist()
    return flow.placement("cpu", ranks, axes=("outer", "inner") if len(shape) > 1 else ("data",))


def _timed(step: Any, batch: Any) -> tuple[float, float]:
    """Seconds of one step, and those of the CPU."""
    dist.barrier()
    start, on_cpu = time.perf_counter(), time.process_time()
    step(batch)
    flow.synchronize()
    return time.perf_counter() - start, time.process_time() - on_cpu


def _check_equal(model: str, plans: Sequence[str], losses: Sequence[float]) -> None:
    """A plan that computes something else takes no part."""
    for plan, loss in zip(plans, losses, strict=True):
        if abs(loss - losses[0]) > 1e-4 * abs(losses[0]):
            raise AssertionError(f"{model}: the loss is {loss} by {plan}, {losses[0]} by {plans[0]}")


def _entry(
    model: str, plan: str, plans: Mapping[str, Plan], seconds: list[list[float]], loss: float
) -> Entry:
    made = plans[plan]
    predicted = predict(made, machine_for(made.placement))
    like = next(
        name for name, one in plans.items() if one.placement == made.placement and made.diff(one).is_equal
    )
    kinds = {kind for by_kind in predicted.seconds_by.values() for kind in by_kind}
    return Entry(
        model,
        dist.get_world_size(),
        plan,
        like,
        tuple(made.placement.shape),
        predicted.seconds,
        {kind: predicted.seconds_of(kind) for kind in sorted(kinds)},
        sum(predicted.collectives.values()),
        sum(predicted.sent.values()),
        tuple(seconds[0]),
        tuple(seconds[1]),
        loss,
    )


# --- the parent --------------------------------------------------------------------------------------


def run_ranks(num_ranks: int, models: Sequence[str], rounds: int, console: Console) -> list[Entry]:
    """Starts the ranks through `monoflow run` and reads what they found.

    Raises:
        RuntimeError: a rank failed; it has printed why.
    """
    with tempfile.TemporaryDirectory(prefix="monoflow-") as folder:
        out = Path(folder, "entries.json")
        command = [sys.executable, "-m", "monoflow.cli", "run", "-n", str(num_ranks), __file__]
        command += ["--out", str(out), "--rounds", str(rounds), "--models", ",".join(models)]
        with (
            Bar(console=console, transient=True) as bar,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        ):
            task = bar.add_task(f"{num_ranks} ranks: starting", total=None)
            for line in process.stdout or ():
                told = Progress.of(line)
                what = f"{num_ranks} ranks: {told.text}"
                bar.update(task, completed=told.done, total=told.total, description=what)
        if process.returncode:
            raise RuntimeError(f"the ranks ended with status {process.returncode}")
        return [Entry.of(one) for one in json.loads(out.read_text())]


def main(
    models: Annotated[str, typer.Option(help="which, with commas")] = ",".join(CONTESTS),
    ranks: Annotated[str, typer.Option(help="numbers of ranks, with commas")] = "2,4",
    rounds: Annotated[int, typer.Option(help="steps of every plan")] = 25,
    fresh: Annotated[bool, typer.Option("--calibrate/--no-calibrate", help="measure the machine")] = True,
    out: Annotated[Path | None, typer.Option(help="write the table, in Markdown")] = None,
) -> None:
    """Steps auto and every template in turn; prints their seconds and the ratio to the fastest template."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    counts = [int(one) for one in ranks.split(",")]
    if fresh:
        calibrate(counts, console)
    entries = [one for count in counts for one in run_ranks(count, models.split(","), rounds, console)]
    console.print(table(entries))
    contests = grouped(entries)
    won = sum(map(is_met, contests))
    console.print(f"auto is at most {GOAL - 1:.0%} behind the fastest template in {won} of {len(contests)}")
    if out is not None:
        out.write_text(markdown(entries))


def _rank_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--models", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    if "RANK" in os.environ:
        options = _rank_arguments()
        rank_main(options.models.split(","), options.rounds, options.out)
    else:
        typer.run(main)
