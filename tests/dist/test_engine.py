"""The engine on real ranks: lanes in any timing, failures that reach everybody, a watchdog."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from monoflow.boxing.route import Move
from monoflow.errors import RunError
from monoflow.mesh import placement
from monoflow.runtime.actors import Engine
from monoflow.runtime.program import Program
from monoflow.runtime.transport import DistTransport, SimTransport
from monoflow.sbp.layout import B, P
from tests.conftest import RunRanks
from tests.null.hand_made import Hand, pipeline, pipeline_inputs

TWO = placement("cpu", [0, 1], axes=("data",))


def run_in_any_timing(lanes: bool, stages: int, count: int, rounds: int) -> int:
    """Steps with random delays in every computation; the user's own collectives in between."""
    rank, draw = dist.get_rank(), random.Random(dist.get_rank())

    def delay() -> None:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 2e-3)

    inputs, place = pipeline_inputs(stages, count), pipeline(stages, count)[0].placement
    expected = Engine(pipeline(stages, count), place, SimTransport(place), str).run(inputs)[rank]
    engine = Engine(
        {rank: pipeline(stages, count, delay=delay)[rank]},
        place,
        DistTransport(place, rank),
        str,
        lanes=lanes,
    )
    before = None
    for _ in range(rounds):
        ticket = engine.start({rank: inputs[rank]})
        own = torch.full((3,), float(rank))
        dist.all_reduce(own)
        assert own[0] == sum(range(stages))
        for found in (before, ticket):
            if found is not None:
                got = found.result()[rank]
                assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        before = ticket
    return engine.num_steps


@pytest.mark.parametrize(("lanes", "stages", "count"), [(True, 2, 5), (True, 4, 6), (False, 3, 4)])
def test_any_timing_gives_the_same_numbers(run_ranks: RunRanks, lanes: bool, stages: int, count: int) -> None:
    assert run_ranks(stages, run_in_any_timing, lanes, stages, count, 20) == [20] * stages


def summed(rank: int, function, with_move: bool = True) -> Program:  # type: ignore[no-untyped-def]
    """A function, a sum over both ranks, and the sum once more."""
    made = Hand(rank, TWO)
    start, part, total, again = (
        made.given((2,)),
        made.register((2,)),
        made.register((2,)),
        made.register((2,)),
    )
    made.compute("work", function, [start], part)
    move = Move(0, (P,), (B,), (2,), (2,))
    if with_move:
        made.move("first", move, [part], [total], 0)
        made.move("second", move, [total], [again], 1)
    made.give(again if with_move else part)
    return made.program()


def fail_on_one(lanes: bool) -> tuple[float, str, str]:
    rank = dist.get_rank()

    def work(x: torch.Tensor) -> torch.Tensor:
        if rank == 1 and bool(x[0] == 2):
            raise ValueError("no such luck")
        return x * 1

    transport = DistTransport(TWO, rank)
    engine = Engine(
        {rank: summed(rank, work)}, TWO, transport, lambda name: f"op {name}, train.py:7", lanes=lanes
    )
    for step in range(2):
        (total,) = engine.run({rank: [torch.full((2,), float(step))]})[rank]
        assert total[0] == 4 * step
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        engine.run({rank: [torch.full((2,), 2.0)]})
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    return time.monotonic() - start, f"{type(caught.value).__name__}: {caught.value}", notes


@pytest.mark.parametrize("lanes", [True, False])
def test_a_failure_on_one_rank_reaches_all_in_seconds(run_ranks: RunRanks, lanes: bool) -> None:
    (waited, other, _), (own_wait, own, notes) = run_ranks(2, fail_on_one, lanes)
    assert max(waited, own_wait) < 5
    assert own == "ValueError: no such luck"
    assert notes == "in task work (forward) of rank 1: op work, train.py:7"
    assert other.startswith("RunError: rank 1 failed:\nTraceback")
    for fact in ("ValueError: no such luck", "in work", "task work (forward) of rank 1: op work, train.py:7"):
        assert fact in other


def wait_for_nobody() -> str:
    """Rank 1 has another program, without the moves that rank 0 waits in."""
    rank = dist.get_rank()
    transport = DistTransport(TWO, rank)
    program = summed(rank, torch.neg, with_move=rank == 0)
    engine = Engine({rank: program}, TWO, transport, lambda name: f"op {name}, train.py:7", patience=1)
    try:
        engine.run({rank: [torch.ones(2)]})
    except RunError as error:
        return str(error)
    time.sleep(3)  # or rank 0 would see that it is gone
    return ""


def test_the_watchdog_ends_a_step_that_waits_for_ever(run_ranks: RunRanks) -> None:
    stuck, fine = run_ranks(2, wait_for_nobody)
    assert fine == ""
    first, *lines = stuck.splitlines()
    assert first.startswith("no actor has fired for 1 s")
    assert lines == [
        "task first (forward) of rank 0 runs",
        "task second (forward) of rank 0 waits for its turn after task first (forward) of rank 0; "
        "waits for register r2 (x2) from task first (forward) of rank 0",
    ]
