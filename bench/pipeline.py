"""The bubble of a pipeline against the theory of its schedule: `python bench/pipeline.py`.

A small model on 2 and 4 stages, real ranks, of which every layer's one large product is a sleep: forward, the
gradient of its input and that of its weight take equally long. So the schedule is measured and not the cores,
of which there may be fewer than ranks.

1F1B has a bubble of (S - 1) / (k + S - 1) with S stages and k micro-batches (Narayanan et al., 2021). When a
stage sends the gradient of its input before it computes that of its weights, the way back through the stages
takes the first alone, and a stage idles for (S - 1) (F + B), not (S - 1) (F + B + W) (after Qi et al., "Zero
Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import PROGRAM, Recorder, Told, recorded
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.runtime.messages import messages, most_live
from monoflow.runtime.trace import Event, bubble
from monoflow.runtime.wiring import Wiring

WIDTH, LENGTH, VOCABULARY = 16, 8, 32


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
    """What the ranks run: a layer a stage."""

    stages: int
    micro_batches: int
    steps: int
    milliseconds: float


class Result(NamedTuple):
    """Of a job.

    Attributes:
        bubbles: of every step.
        live: the most micro-batches that forward left for backward at a time, by stage.
        slots: of those registers, by stage.
        overflows: registers that held more than they have slots.
    """

    bubbles: list[float]
    live: list[int]
    slots: list[int]
    overflows: int


def run(job: Job) -> Result:
    """Runs a job on processes of its own."""
    events, wirings = recorded(job.stages, _steps, job)
    return judged(events, wirings)


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
    register()
    torch.manual_seed(0)
    model = Model(job.stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    where = flow.placement("cpu", list(range(job.stages)))

    @flow.graph(model, optimizer, placement=where, plan="pipeline", micro_batches=job.micro_batches)
    def step(ids: Tensor) -> Tensor:
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for stage in range(job.stages):
        step.stage(f"blocks.{stage}", stage)
    return step, torch.randint(0, VOCABULARY, (job.micro_batches, LENGTH))


def _steps(rank: int, job: Job) -> Told:
    """What the steps of a rank did, and its wiring. Every rank calls it."""
    step, batch = compiled(job)
    step(batch).item()
    found, recorder = step._require(), Recorder()
    _Clock.seconds = job.milliseconds / 1e3
    found.engine.recorder = recorder
    for _ in range(job.steps):
        dist.barrier()
        step(batch).item()
    found.engine.recorder = None
    wiring = Wiring.of(PROGRAM, found.lowered.programs[rank])
    return [tuple(one) for one in recorder.events], wiring.as_data()


def theory(job: Job) -> tuple[float, float]:
    """The bubble of 1F1B, and of 1F1B that sends before it computes the gradients of weights."""
    stages, count = job.stages, job.micro_batches
    return (stages - 1) / (count + stages - 1), 2 * (stages - 1) / (3 * count + 2 * (stages - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=20, help="that a product sleeps")
    options = parser.parse_args()
    print(
        "| stages | micro-batches | 1F1B | sends first | measured | lowest - highest | live / slots | over |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for stages in options.stages:
        for count in options.micro_batches:
            job = Job(stages, count, options.steps, options.milliseconds)
            found = run(job)
            whole, split = theory(job)
            kept = ", ".join(f"{a}/{b}" for a, b in zip(found.live, found.slots, strict=True))
            low, high, median = min(found.bubbles), max(found.bubbles), statistics.median(found.bubbles)
            print(
                f"| {stages} | {count} | {whole:.1%} | {split:.1%} | {median:.1%} | "
                f"{low:.1%} - {high:.1%} | {kept} | {found.overflows} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
