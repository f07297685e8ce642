"""How much of communication compute hides: `python bench/overlap.py`.

The GPT example on 2 and 4 ranks of one thread each, under the data and the zero layout. The link between them
is slowed (what MONOFLOW_LINK_DELAY does) until moves take a chosen part of the time that compute takes just
then. Every firing is recorded; communication is exposed while its rank computes nothing. Beside it, in turns,
the same programs with one thread for all actors (what MONOFLOW_LANES=0 does), which hides nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from cases import gpt
from ranks import Recorder, Told, recorded

import monoflow as flow
from monoflow.boxing.route import LinkCost
from monoflow.runtime.actors import Engine
from monoflow.runtime.messages import without_waiting
from monoflow.runtime.recorder import Fired
from monoflow.runtime.trace import (
    COMMUNICATION,
    COMPUTE,
    Event,
    exposed_communication,
    intervals_of,
    length,
)
from monoflow.runtime.transport import DistTransport
from monoflow.runtime.wiring import Wiring

#: Bytes that take as long as the start of a move; so it is on the machine that templates are planned for.
_START = 6e4
#: Windows of a batch, per rank.
_ROWS = 8


class Job(NamedTuple):
    """What the ranks run.

    Attributes:
        part: of the time of compute that moves take.
    """

    plan: str
    num_ranks: int
    part: float
    repeats: int


_PROGRAM = "gpt"


class Numbered(Recorder):
    """Keeps events; steps are numbered by whoever sets `step`."""

    step = 0

    def record(self, fired: Fired) -> None:
        """As `runtime.recorder` says."""
        super().record(fired._replace(step=self.step, time=0))


class Run(NamedTuple):
    """A step of all ranks.

    Attributes:
        compute, moving: seconds of a rank, the mean.
        share: of communication, what nothing hides.
        span: seconds of the step.
    """

    compute: float
    moving: float
    share: float
    span: float


def run(job: Job) -> tuple[list[Run], list[Run]]:
    """The steps of a job with lanes and without."""
    events, wirings = recorded(job.num_ranks, _steps, job)
    by_step: dict[int, list[Event]] = defaultdict(list)
    for event in without_waiting(events, wirings):
        by_step[event.step].append(event)
    runs = [_of_step(by_step[step]) for step in sorted(by_step)]
    return runs[0::2], runs[1::2]


def _of_step(events: Sequence[Event]) -> Run:
    ranks = {event.rank for event in events}
    compute, moving = (
        statistics.mean(_seconds([one for one in events if one.rank == rank], kinds) for rank in ranks)
        for kinds in (COMPUTE, COMMUNICATION)
    )
    span = max(one.end for one in events) - min(one.start for one in events)
    return Run(compute, moving, exposed_communication(events).share, span / 1e9)


def _seconds(events: Sequence[Event], kinds: frozenset[str]) -> float:
    return length(intervals_of(events, kinds)) / 1e9


def _steps(rank: int, job: Job) -> Told:
    """What a rank did, even steps with lanes and odd ones without, and its wiring. Every rank calls it."""
    torch.manual_seed(0)
    step, _ = gpt(job.plan, flow.placement("cpu", list(range(job.num_ranks))))
    ids = torch.randint(0, 256, (_ROWS * job.num_ranks, 128))
    batch = {"input_ids": ids, "labels": ids}
    step(batch).item()
    compiled = step._require()
    programs, transport = compiled.lowered.programs, compiled.transport
    assert isinstance(transport, DistTransport)
    placement = compiled.plan.placement
    engines = [Engine(programs, placement, transport, str, lanes=lanes) for lanes in (True, False)]
    recorder, quiet = Numbered(_PROGRAM), Numbered(_PROGRAM)

    def fire(engine: Engine, told: Recorder) -> None:
        inputs = step._bound(compiled).read((batch,), {})
        dist.barrier()
        engine.recorder = told
        engine.run(inputs)
        engine.recorder = None

    for engine in engines:
        fire(engine, Numbered(_PROGRAM))
    before = compiled.stats().num_bytes()
    fire(engines[0], Numbered(_PROGRAM))
    sent = compiled.stats().num_bytes() - before
    for number in range(job.repeats):
        transport.link = None
        quiet.events.clear()
        fire(engines[1], quiet)  # one thread: what compute and moves take by themselves
        transport.link = _link(quiet.events, job.part, sent)
        for odd, engine in enumerate(engines):
            recorder.step = 2 * number + odd
            fire(engine, recorder)
    return [tuple(one) for one in recorder.events], [Wiring.of(_PROGRAM, programs[rank]).as_data()]


def _link(events: Sequence[Event], part: float, sent: int) -> LinkCost:
    """The link with which moves take a part of the time that compute takes, the same on all ranks."""
    compute = torch.tensor(_seconds(events, COMPUTE))
    dist.all_reduce(compute)
    moving = torch.tensor(_seconds(events, COMMUNICATION))
    dist.all_reduce(moving, dist.ReduceOp.MIN)  # of the rank that came last, which waited for no other
    beta = max(0.0, part * compute.item() / dist.get_world_size() - moving.item()) / sent
    return LinkCost(_START * beta, beta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--plans", nargs="+", default=["data", "zero"])
    parser.add_argument("--part", type=float, default=0.45, help="of the time of compute that moves take")
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    print("| ranks | layout | lanes | moves / compute | exposed | lowest - highest | step ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_ranks in options.ranks:
        for plan in options.plans:
            found = run(Job(plan, num_ranks, options.part, options.repeats))
            for lanes, own in zip(("on", "off"), found, strict=True):
                shares = [one.share for one in own]
                ratio = statistics.median(one.moving / one.compute for one in own)
                span = statistics.median(one.span for one in own)
                print(
                    f"| {num_ranks} | {plan} | {lanes} | {ratio:.2f} | {statistics.median(shares):.0%} | "
                    f"{min(shares):.0%} - {max(shares):.0%} | {1e3 * span:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
