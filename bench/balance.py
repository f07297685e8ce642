"""What pulling micro-batches gains beside a slow rank: `python bench/balance.py`.

The GPT example on two ranks of one thread each under plan "data". One of them sleeps after every computation
as long as that took, as if its device had half the speed. On a machine that others use too, `--device-ms 60`
lets a micro-batch of a small model take so long on a device that only sleeps, twice that on the slow rank.
Steps with static and with dynamic balance take turns in the same processes; medians are compared, and the
ratios of neighbours show how far they scatter. Who pulls last ends last: more micro-batches, less waiting.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from multiprocessing import get_context
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from cases import load_example

import monoflow as flow
from monoflow.step import Step

Balance = Literal["static", "dynamic"]
WAYS: tuple[Balance, ...] = ("static", "dynamic")


class Job(NamedTuple):
    """What the ranks run.

    Attributes:
        slowdown: how many times as long as the other's the second rank's computations take.
        rows: windows of 128 bytes in a batch.
        device: seconds that a micro-batch sleeps on the first rank, to which its computing adds; 0 for none.
    """

    micro_batches: int
    slowdown: float
    rounds: int
    rows: int
    device: float


class Found(NamedTuple):
    """What two ranks measured.

    Attributes:
        seconds: of every step, by balance.
        units: what the second rank pulled in a step.
        apart: how far a loss is from that of the other balance.
    """

    seconds: dict[Balance, list[float]]
    units: float
    apart: float


def run(job: Job) -> Found:
    """The steps of a job, in processes of their own."""
    context = get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, folder, job, queue), daemon=True) for rank in range(2)
        ]
        for process in processes:
            process.start()
        found = queue.get()
        for process in processes:
            process.join()
    return found


def _rank(rank: int, folder: str, job: Job, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    batch = _batch(job)
    steps: dict[Balance, Step] = {way: _step(way, job) for way in WAYS}
    units = {way: _slowed(steps[way], batch, job, job.slowdown if rank else 1.0) for way in WAYS}
    losses: dict[Balance, list[float]] = {
        way: [float(step(batch)) for _ in range(2)] for way, step in steps.items()
    }
    units["dynamic"].clear()
    seconds: dict[Balance, list[float]] = {way: [] for way in WAYS}
    for _ in range(job.rounds):
        for way, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            losses[way].append(float(step(batch)))
            dist.barrier()
            seconds[way].append(time.perf_counter() - start)
    if rank == 1:
        apart = max(abs(one - other) for one, other in zip(*losses.values(), strict=True))
        queue.put(Found(seconds, len(units["dynamic"]) / job.rounds, apart))
    dist.barrier()
    dist.destroy_process_group()


def _batch(job: Job) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (job.rows, 128), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _step(way: Balance, job: Job) -> Step:
    """A step of a model that begins the same; without dropout, since steps that take turns draw others."""
    code = load_example("gpt/model.py")
    torch.manual_seed(0)
    layers, width = (2, 64) if job.device else (4, 256)
    model = code.build(code.Shape("own", layers, width, 4, 128, 0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    @flow.graph(
        model, optimizer, placement=flow.placement("cpu", [0, 1]), plan="data",
        micro_batches=job.micro_batches, balance=way,
    )  # fmt: skip
    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def _slowed(step: Step, batch: dict[str, torch.Tensor], job: Job, slowdown: float) -> list[int]:
    """Makes a rank's computations take longer; returns the units that it pulls, as it does."""
    firing, units = step._compiled_for((batch,), {}).engine.firing, []
    compute, pull = firing._compute, firing._pull
    actors = firing.network.actors
    first = next(actor for actor in actors if actor.fires > 1 and actor.task.compute is not None)

    def slow(actor: Any, number: int, given: list[torch.Tensor]) -> Any:
        used = time.thread_time()
        results = compute(actor, number, given)
        if not job.device:
            time.sleep((slowdown - 1) * (time.thread_time() - used))
        elif actor is first:
            time.sleep(slowdown * job.device)
        return results

    def seen(actor: Any) -> Any:
        results = pull(actor)
        units.extend(int(one) for one in results[0])
        return results

    firing._compute, firing._pull = slow, seen  # pyright: ignore[reportAttributeAccessIssue]
    return units


def main() -> None:
    parser = argparse.ArgumentParser(description="static against dynamic balance beside a slow rank")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--device-ms", type=float, default=0.0)
    options = parser.parse_args()
    print("| second rank | static ms | dynamic ms | static / dynamic | its units | losses apart |")
    print("| --- | --- | --- | --- | --- | --- |")
    for slowdown in (1.0, 2.0):
        device = options.device_ms / 1e3
        found = run(Job(options.micro_batches, slowdown, options.rounds, options.rows, device))
        static, dynamic = (statistics.median(found.seconds[way]) for way in WAYS)
        ratios = [one / other for one, other in zip(*found.seconds.values(), strict=True)]
        print(
            f"| {slowdown:.0f}x as long | {1e3 * static:.0f} | {1e3 * dynamic:.0f} "
            f"| {static / dynamic:.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
            f"| {found.units:.1f} of {2 * options.micro_batches} | {found.apart:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
