"""Pipelines by the clock of the planner: as long as the programs that are lowered from them take."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from monoflow.graph.step_graph import Phase
from monoflow.plan.facts import facts_of
from monoflow.plan.memory import LocalShapes, timeline
from monoflow.plan.schedule import Op, Schedule
from monoflow.plan.together import clocks
from tests.null.pipeline_clock import PRODUCT, Clock, chain, parts_of, pipeline, programs_of

GRAPHS = {size: chain(size, 16) for size in (2, 4, 6)}
CASES = [(2, 1, 8), (4, 1, 8), (2, 2, 8), (3, 2, 5), (2, 2, 3)]


def seconds_of(part: Schedule, forward: float, backward: float, send: float) -> Sequence[float]:
    """A product's, a send's; nothing else takes time."""
    found = []
    for item in part.items:
        is_forward = item.phase is Phase.FORWARD
        is_product = isinstance(item, Op) and item.node.target is PRODUCT
        is_send = not isinstance(item, Op) and item.move.kind == "send" and item.walked
        found.append((forward if is_forward else backward) if is_product else send if is_send else 0.0)
    return found


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_what_a_schedule_keeps_is_in_the_predicted_peak(ranks: int, chunks: int) -> None:
    """Zero-bubble keeps more on every rank but the first: by the bytes of its registers' slots."""
    peaks, slots = [], []
    for zero_bubble in (False, True):
        plan = pipeline(GRAPHS[ranks * chunks], ranks, chunks, 8, zero_bubble)
        shapes = [LocalShapes(plan, facts_of(plan.graph), (rank,)) for rank in range(ranks)]
        peaks.append([timeline(plan, *one).peak_bytes for one in zip(parts_of(plan), shapes, strict=True)])
        slots.append([sum(one.num_bytes for one in own.registers) for own in programs_of(plan).values()])
    more = [after - before for before, after in zip(*slots, strict=True)]
    assert more[0] == 0 and all(more[1:])
    assert [after - before for before, after in zip(*peaks, strict=True)] == more


@pytest.mark.parametrize("zero_bubble", [False, True], ids=["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "chunks", "count"), CASES)
def test_it_is_the_programs_clock(ranks: int, chunks: int, count: int, zero_bubble: bool) -> None:
    draw = random.Random(count)
    plan = pipeline(GRAPHS[ranks * chunks], ranks, chunks, count, zero_bubble)
    parts = {(rank,): part for rank, part in enumerate(parts_of(plan))}
    programs = programs_of(plan)
    for _ in range(3):
        forward, backward, send = draw.uniform(0.5, 2), draw.uniform(0.5, 2), draw.choice([0.0, 0.07])
        given = {stage: seconds_of(part, forward, backward, send) for stage, part in parts.items()}
        found = clocks(parts, given, count)
        costs = {"forward": forward, "backward": backward}
        ran = Clock(programs, lambda _, phase, __, costs=costs: costs[phase], send)
        assert max(one.end for one in found.values()) == pytest.approx(ran.end, rel=1e-6)
        for (rank,), one in found.items():
            busy = sum(fired.end - fired.start for fired in ran.fired if fired.rank == rank)
            assert sum(one.waits.values()) + busy == pytest.approx(one.end)
