"""The bubble of a pipeline against the theory of its schedule: `python bench/pipeline.py`.

A small model on 2 and 4 real ranks, of which every layer's one large product is a sleep: forward, the
gradient of its input and that of its weight take equally long. So the schedule is measured and not the cores,
of which there may be fewer than ranks.

With p ranks of v stages each, k micro-batches, and F, B and W what these three take of a rank in a
micro-batch, a rank idles in a step for

    1F1B, B and W in one piece (Narayanan et al., 2019)            (p - 1) (F + B + W)
    1F1B that sends before it computes gradients of weights        (p - 1) (F + B)
    interleaved 1F1B (Narayanan et al., 2021) that does so         (p - 1) (F + B) / v
    zero-bubble, ZB-H1 (Qi et al., 2023)                           (p - 1) (F + B - W)

beside its k (F + B + W) of work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from ranks import Recorder, Told, recorded
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.runtime.messages import messages, most_live
from monoflow.runtime.trace import Event, bubble
from monoflow.runtime.wiring import Wiring

WIDTH, LENGTH, VOCABULARY = 16, 8, 32
Order = Literal["1f1b", "zero-bubble"]


class _Clock:
    """How long a product takes; nothing while a step is compiled."""

    seconds = 0.0


def _slept(result: Tensor) -> Tensor:
    time.sleep(_Clock.seconds)
    return result


@torch.library.custom_op("bench_pipeline::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return _slept(x @ weight.t())


@torch.library.custom_op("bench_pipeline::product_of_input", mutates_args=())
def product_of_input(grad: Tensor, weight: Tensor) -> Tensor:
    return _slept(grad @ weight)


@torch.library.custom_op("bench_pipeline::product_of_weight", mutates_args=())
def product_of_weight(grad: Tensor, x: Tensor) -> Tensor:
    return _slept(grad.t() @ x)


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@product_of_input.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


@product_of_weight.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return product_of_input(grad, weight), product_of_weight(grad, x)


product.register_autograd(_back, setup_context=_keep)


def register() -> None:
    """The rules of the products, which are linear in both factors."""
    for op, letters in (
        (product, "bk,nk->bn"),
        (product_of_input, "bn,nk->bk"),
        (product_of_weight, "bn,bk->nk"),
    ):
        flow.sbp.register(op, letters, linear=[(0,), (1,)])


class Block(nn.Module):
    """A residual layer with a product that takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(product(self.norm(x).flatten(0, 1), self.weight)).view_as(x)


class Model(nn.Module):
    """A language model of so many blocks."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


class Job(NamedTuple):
    """What the ranks run: two layers each.

    Attributes:
        milliseconds: that a product sleeps.
    """

    ranks: int
    schedule: Order
    chunks: int
    micro_batches: int
    steps: int
    milliseconds: float

    @property
    def name(self) -> str:
        """Of its schedule."""
        return self.schedule + (f", {self.chunks} stages a rank" if self.chunks > 1 else "")

    @property
    def program(self) -> str:
        """Tells its events from those of others."""
        return f"{self.name}, {self.micro_batches}"


class Result(NamedTuple):
    """Of a job.

    Attributes:
        bubbles: of every step.
        live: the most micro-batches that forward left for backward at a time, by rank.
        slots: of those registers, by rank.
        overflows: registers that held more than they have slots.
    """

    bubbles: list[float]
    live: list[int]
    slots: list[int]
    overflows: int


def run(jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
    """Runs jobs of one number of ranks, one after the other, on processes of their own."""
    events, wirings = recorded(jobs[0].ranks, _all_steps, list(jobs))
    for job in jobs:
        own = [one for one in events if one.program == job.program]
        yield job, judged(own, [one for one in wirings if one.program == job.program])


def judged(events: Sequence[Event], wirings: Sequence[Wiring]) -> Result:
    """What the events of all ranks say."""
    steps: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        steps[event.step].append(event)
    live, slots, overflows = defaultdict(int), defaultdict(int), 0
    by_rank = {one.rank: one for one in wirings}
    for (_, rank, register), most in most_live(messages(events, wirings)).items():
        wiring = by_rank[rank]
        room = wiring.registers[register].slots
        overflows += most > room
        if wiring.register_class(register) == "forward -> backward" and wiring.registers[register].micro:
            live[rank], slots[rank] = max(live[rank], most), max(slots[rank], room)
    ranks = sorted(by_rank)
    return Result(
        [bubble(own) for own in steps.values()],
        [live[rank] for rank in ranks],
        [slots[rank] for rank in ranks],
        overflows,
    )


def compiled(job: Job) -> tuple[Any, Tensor]:
    """The step and its batch."""
    torch.manual_seed(0)
    model = Model(2 * job.ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stages = job.chunks * job.ranks

    @flow.graph(
        model, optimizer, placement=flow.placement("cpu", list(range(job.ranks))), plan="pipeline",
        micro_batches=job.micro_batches, stages=stages, schedule=job.schedule,
    )  # fmt: skip
    def step(ids: Tensor) -> Tensor:
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for block in range(2 * job.ranks):
        step.stage(f"blocks.{block}", block * stages // (2 * job.ranks))
    return step, torch.randint(0, VOCABULARY, (job.micro_batches, LENGTH))


def _all_steps(rank: int, jobs: Sequence[Job]) -> Told:
    """What the steps of a rank did in all jobs, and the wirings of these. Every rank calls it."""
    register()
    told: Told = [], []
    for job in jobs:
        events, wiring = _steps(rank, job)
        told[0].extend(tuple(one) for one in events)
        told[1].append(wiring.as_data())
    return told


def _steps(rank: int, job: Job) -> tuple[list[Event], Wiring]:
    step, batch = compiled(job)
    _Clock.seconds = 0.0
    step(batch).item()
    found, recorder = step._require(), Recorder(job.program)
    _Clock.seconds = job.milliseconds / 1e3
    found.engine.recorder = recorder
    for _ in range(job.steps):
        dist.barrier()
        step(batch).item()
    found.engine.recorder = None
    return recorder.events, Wiring.of(job.program, found.lowered.programs[rank])


def theory(job: Job) -> float:
    """The bubble of a job's schedule, if F, B and W take equally long."""
    idle = (job.ranks - 1) * (1 if job.schedule == "zero-bubble" else 2) / job.chunks
    return idle / (3 * job.micro_batches + idle)


SCHEDULES: list[tuple[Order, int]] = [("1f1b", 1), ("1f1b", 2), ("zero-bubble", 1), ("zero-bubble", 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=15, help="that a product sleeps")
    options = parser.parse_args()
    columns = ["ranks", "schedule", "micro-batches", "in one piece", "theory", "measured", "off"]
    columns += ["lowest - highest", "live / slots", "over"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for ranks in options.ranks:
        jobs = [
            Job(ranks, schedule, chunks, count, options.steps, options.milliseconds)
            for count in options.micro_batches
            for schedule, chunks in SCHEDULES
        ]
        for job, found in run(jobs):
            whole = (ranks - 1) / job.chunks / (job.micro_batches + (ranks - 1) / job.chunks)
            kept = ", ".join(f"{a}/{b}" for a, b in zip(found.live, found.slots, strict=True))
            low, high, median = min(found.bubbles), max(found.bubbles), statistics.median(found.bubbles)
            row = [ranks, job.name, job.micro_batches, f"{whole:.1%}", f"{theory(job):.1%}", f"{median:.1%}"]
            row += [f"{100 * (median - theory(job)):+.1f}", f"{low:.1%} - {high:.1%}", kept, found.overflows]
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
