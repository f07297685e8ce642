"""Predicted against measured: peak bytes and step seconds of every example under every template.

`python bench/predict.py --help`. Ranks are real processes of this machine; every case is predicted and
measured by the ranks that run it, so that both see the same machine. It is calibrated right before, for as
many ranks. Peaks are compared in one thread, which is all that torch's profiler sees of the allocations; the
bound is that of a rank whose moves run beside its compute.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from cases import CASES
from rich.console import Console
from rich.table import Table

import monoflow as flow
from monoflow.cli.calibrate import calibrate
from monoflow.plan.devices import machine_for
from monoflow.plan.memory import timeline
from monoflow.plan.predict import predict
from monoflow.plan.schedule import schedule
from monoflow.runtime.allocations import allocations

#: Mesh shapes and the plans that are run on each.
MESHES: dict[tuple[int, ...], tuple[str, ...]] = {
    (1,): ("data",),
    (2,): ("data", "zero", "tensor", "auto"),
    (2, 2): ("data x tensor", "zero x tensor", "auto"),
}
PEAK_GOAL, SECONDS_GOAL = 0.10, 0.25


@dataclass(frozen=True)
class Row:
    """One example under one plan; of several ranks, the worst: each column is the largest of any rank.

    Attributes:
        predicted_bytes: the peak where moves and compute take turns, as they are measured.
        bound_bytes: what a rank holds at most where moves run beside compute.
    """

    example: str
    mesh: tuple[int, ...]
    plan: str
    predicted_bytes: int
    measured_bytes: int
    bound_bytes: int
    predicted_seconds: float
    measured_seconds: float
    compute_seconds: float

    @property
    def bytes_ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_bytes / self.measured_bytes

    @property
    def seconds_ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_seconds / self.measured_seconds


def main(
    examples: Annotated[str, typer.Option(help="which, with commas")] = ",".join(CASES),
    ranks: Annotated[str, typer.Option(help="numbers of ranks, with commas")] = "1,2,4",
    steps: Annotated[int, typer.Option(help="steps of a measurement, of which the median counts")] = 15,
    cpu: Annotated[bool, typer.Option(help="seconds of the CPU: for a machine that is not idle")] = False,
    fresh: Annotated[bool, typer.Option("--calibrate/--no-calibrate", help="measure the machine")] = True,
    out: Annotated[Path | None, typer.Option(help="write the table, in Markdown")] = None,
) -> None:
    """Prints predicted and measured peak bytes and step seconds, and their ratios."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=130)
    rows: list[Row] = []
    for mesh, plans in MESHES.items():
        size = torch.Size(mesh).numel()
        if str(size) in ranks.split(","):
            if fresh:
                calibrate([size], console)
            jobs = [(example, mesh, plan) for example in examples.split(",") for plan in plans]
            rows += on_ranks(size, jobs, steps, cpu)
    console.print(table(rows))
    misses = [row for row in rows if _missed(row)]
    console.print(f"{len(rows) - len(misses)} of {len(rows)} rows are within both goals")
    if out is not None:
        out.write_text(markdown(rows, cpu))


def on_ranks(
    num_ranks: int, jobs: Sequence[tuple[str, tuple[int, ...], str]], steps: int, cpu: bool
) -> list[Row]:
    """Runs jobs one after the other on that many processes."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        processes = [
            context.Process(
                target=_rank, args=(rank, num_ranks, folder, jobs, steps, cpu, queue), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        rows: list[Row] = queue.get()
        for process in processes:
            process.join()
    return rows


def _rank(rank: int, num_ranks: int, folder: str, jobs: Any, steps: int, cpu: bool, queue: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    if num_ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    rows = [measured(example, mesh, plan, steps, cpu) for example, mesh, plan in jobs]
    if rank == 0:
        queue.put(rows)
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def measured(example: str, mesh: tuple[int, ...], plan: str, steps: int, cpu: bool) -> Row:
    """One case, predicted and run. Every rank calls it."""
    torch.manual_seed(0)
    grid = torch.arange(torch.Size(mesh).numel()).view(mesh).tolist()
    placement = flow.placement("cpu", grid, axes=("outer", "inner")[: len(mesh)])
    step, batch = CASES[example](plan, placement)
    step(batch)
    step(batch)
    compiled = step._require()
    predicted = predict(compiled.plan, machine_for(placement))
    in_turn = timeline(compiled.plan, schedule(compiled.plan))
    held = min(_held(step, compiled, batch) for _ in range(5))  # frees by Gloo's threads may go unseen
    seconds = [_timed(step, batch, time.process_time if cpu else time.perf_counter) for _ in range(steps)]
    peak, median = _largest(held, statistics.median(seconds))
    return Row(
        example,
        mesh,
        plan,
        in_turn.peak_bytes,
        int(peak),
        predicted.peak_bytes,
        predicted.seconds,
        median,
        predicted.seconds_of("compute"),
    )


def _held(step: Any, compiled: Any, batch: Any) -> int:
    """The peak of one step on this rank: what comes in, and what is allocated."""
    inputs = step._bound(compiled).read((batch,), {})
    before = sum(tensor.nbytes for tensors in inputs.values() for tensor in tensors)
    _, found = allocations(lambda: compiled.engine.in_caller().run(inputs), torch.device("cpu"))
    return before + found.peak


def _timed(step: Any, batch: Any, clock: Callable[[], float]) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = clock()
    step(batch)
    flow.synchronize()
    return clock() - start


def _largest(*values: float) -> list[float]:
    """The largest of every value over all ranks."""
    if not dist.is_initialized():
        return list(values)
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def _missed(row: Row) -> bool:
    return abs(row.bytes_ratio - 1) > PEAK_GOAL or abs(row.seconds_ratio - 1) > SECONDS_GOAL


HEAD = (
    "example",
    "mesh",
    "plan",
    "predicted MB",
    "measured MB",
    "ratio",
    "bound MB",
    "predicted ms",
    "measured ms",
    "ratio",
)


def cells(row: Row) -> list[str]:
    """A row of the table as text."""
    return [
        row.example,
        "x".join(map(str, row.mesh)),
        row.plan,
        f"{row.predicted_bytes / 1e6:.2f}",
        f"{row.measured_bytes / 1e6:.2f}",
        f"{row.bytes_ratio:.3f}",
        f"{row.bound_bytes / 1e6:.2f}",
        f"{row.predicted_seconds * 1e3:.1f}",
        f"{row.measured_seconds * 1e3:.1f}",
        f"{row.seconds_ratio:.2f}",
    ]


def table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    made = Table(title="predicted against measured", caption="peak within 10 %, seconds within 25 %")
    for head in HEAD:
        made.add_column(head, justify="left" if head in HEAD[:3] else "right")
    for row in rows:
        made.add_row(*cells(row), style="red" if _missed(row) else "")
    return made


def markdown(rows: Sequence[Row], cpu: bool) -> str:
    """For RESULTS.md: the machine, the date and the table."""
    lines = [
        f"{date.today()}, {platform.processor() or platform.machine()} x {os.cpu_count()}, "
        f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}. Seconds are "
        f"{'of the CPU' if cpu else 'wall clock'}, the median of a rank's steps, the slowest rank's. "
        f"Goals: peak within {PEAK_GOAL:.0%}, seconds within {SECONDS_GOAL:.0%}.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{' --- |' * len(HEAD)}",
        *(f"| {' | '.join(cells(row))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
