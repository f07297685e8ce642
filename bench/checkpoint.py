"""What saving costs: the stall of the copy, and steps while a thread writes against steps while none does.

`python bench/checkpoint.py --help`. Steps with and without a writer alternate in one run, so that both see
the same machine. Ranks are real processes with one thread each; a machine with more cores than ranks lets the
writers have cores of their own.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import monoflow as flow


class Cost(NamedTuple):
    """Of one number of ranks; seconds are medians, of the slowest rank.

    Attributes:
        num_bytes: of the checkpoint.
        share: bytes that one rank copies and writes.
        quiet: seconds of a step while no writer runs.
        ratio: steps while one runs, over those just before and after; of a round each, the median.
        cpu_ratio: the same of the seconds of the CPU that the step's own thread takes.
        stall: seconds from the call until training goes on.
        write: seconds until the checkpoint is in its place.
        load: seconds to verify and load it.
    """

    ranks: int
    num_bytes: int
    share: int
    quiet: float
    ratio: float
    cpu_ratio: float
    stall: float
    write: float
    load: float


def main(
    ranks: Annotated[str, typer.Option(help="numbers of ranks, with commas")] = "1,2",
    rounds: Annotated[int, typer.Option(help="saves of a measurement")] = 8,
    layers: Annotated[int, typer.Option(help="of 1024 x 1024 with AdamW: 12 MiB of state each")] = 16,
    plan: Annotated[str, typer.Option(help="on several ranks")] = "zero",
    folder: Annotated[str | None, typer.Option(help="where to write")] = None,
) -> None:
    """Prints what saving costs, and whether steps take at most 5 % longer while a writer runs."""
    table = Table(
        "ranks", "MB", "MB a rank", "step ms", "ratio", "CPU ratio", "stall ms", "write s", "load s"
    )
    for number in map(int, ranks.split(",")):
        cost = on_ranks(number, rounds, layers, plan, folder)
        table.add_row(
            str(number),
            f"{cost.num_bytes / 1e6:.0f}",
            f"{cost.share / 1e6:.0f}",
            f"{cost.quiet * 1e3:.1f}",
            f"{cost.ratio:.3f}",
            f"{cost.cpu_ratio:.3f}",
            f"{cost.stall * 1e3:.0f}",
            f"{cost.write:.2f}",
            f"{cost.load:.2f}",
        )
    Console(width=110).print(table)


def on_ranks(number: int, rounds: int, layers: int, plan: str, folder: str | None) -> Cost:
    """Measures on that many processes."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        queue = context.SimpleQueue()
        processes = [
            context.Process(
                target=_rank, args=(rank, number, place, rounds, layers, plan, queue), daemon=True
            )
            for rank in range(number)
        ]
        for process in processes:
            process.start()
        cost: Cost = queue.get()
        for process in processes:
            process.join()
    return cost


def _rank(rank: int, number: int, place: str, rounds: int, layers: int, plan: str, queue: Any) -> None:
    torch.set_num_threads(1)
    if number > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=number)
    cost = measured(number, Path(place), rounds, layers, plan if number > 1 else "data")
    if rank == 0:
        queue.put(cost)
    if number > 1:
        dist.barrier()
        dist.destroy_process_group()


def measured(number: int, place: Path, rounds: int, layers: int, plan: str) -> Cost:
    """Every rank calls it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    placement = flow.placement("cpu", list(range(number)))

    @flow.graph(model, optimizer, placement=placement, plan=plan)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batch = torch.randn(64 * number, 1024)
    quiet: list[list[tuple[float, float]]] = []
    writing: list[list[tuple[float, float]]] = []
    stalls, writes = [], []
    with flow.checkpointer(place / "run", step, keep_last=1, on_signal=False) as series:
        for _ in range(3):
            step(batch).item()
        series.save(wait=True)
        series.save()
        series.wait()
        quiet.append([_timed(step, batch) for _ in range(4)])
        for _ in range(rounds):
            start = time.perf_counter()
            series.save()
            stalls.append(time.perf_counter() - start)
            writing.append([])
            while _any(series.saver.is_writing):
                seconds = _timed(step, batch)
                if series.saver.is_writing:  # it wrote for all of the step
                    writing[-1].append(seconds)
            writes.append(time.perf_counter() - start)
            series.wait()
            quiet.append([_timed(step, batch) for _ in range(4)])
        share = series.saver.num_bytes
    start = time.perf_counter()
    flow.load(place / "run", step)
    load = time.perf_counter() - start
    num_bytes = sum(one.stat().st_size for one in (place / "run").glob("*/*.safetensors"))
    medians = [statistics.median(stalls), statistics.median(writes), load]
    step_seconds = statistics.median(one[0] for some in quiet for one in some)
    ratios = [_ratio(quiet, writing, clock) for clock in (0, 1)]
    quiet_seconds, ratio, cpu_ratio, stall, write, load = _largest([step_seconds, *ratios, *medians])
    return Cost(number, num_bytes, share, quiet_seconds, ratio, cpu_ratio, stall, write, load)


def _ratio(
    quiet: list[list[tuple[float, float]]], writing: list[list[tuple[float, float]]], clock: int
) -> float:
    """The median over the rounds of steps with a writer over their neighbours without."""
    found = []
    for before, during, after in zip(quiet, writing, quiet[1:], strict=False):
        if during:
            around = statistics.median(one[clock] for one in (*before, *after))
            found.append(statistics.median(one[clock] for one in during) / around)
    return statistics.median(found)


def _timed(step: Any, batch: Tensor) -> tuple[float, float]:
    """Seconds of a step, and of the CPU that this thread takes for it."""
    start, own = time.perf_counter(), time.thread_time()
    step(batch).item()
    return time.perf_counter() - start, time.thread_time() - own


def _any(flag: bool) -> bool:
    """Whether it is so on any rank."""
    return bool(_largest([float(flag)])[0])


def _largest(values: list[float]) -> list[float]:
    """The largest of every value over all ranks."""
    if not dist.is_initialized():
        return values
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


if __name__ == "__main__":
    typer.run(main)
