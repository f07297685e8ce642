"""Backward of a stage: what a send does not need comes after it."""

from __future__ import annotations

from collections import Counter

import pytest

import monoflow as flow
from monoflow.graph.step_graph import Phase
from monoflow.plan import schedule as schedules
from monoflow.plan.parts import Parts
from monoflow.plan.plan import Plan
from monoflow.plan.schedule import Box, Op, schedule
from tests.parity.models import KINDS, batch_of, training

STAGES = 3
BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)


@pytest.fixture(scope="module", params=["gpt2", "tied", "t5"])
def plan(request: pytest.FixtureRequest) -> Plan:
    model, optimizer, function = training(request.param, "sgd")
    where = flow.placement("cpu", list(range(STAGES)))
    with flow.simulate(STAGES):
        step = flow.graph(model, optimizer, placement=where, plan="pipeline", micro_batches=2)(function)
        step.compile(batch_of(KINDS[request.param], 4))
    return step.plan


def test_a_stage_computes_nothing_before_a_send_that_no_send_needs(plan: Plan) -> None:
    held_back = 0
    for stage in range(STAGES):
        items = [one for one in Parts(schedule(plan)).of((stage,)).items if one.walked]
        sends = [at for at, one in enumerate(items) if _leaves(one)]
        if not sends:
            continue
        for at, item in enumerate(items[: sends[-1]]):
            if item.phase in BACKWARD and not _leaves(item) and item.outputs:
                assert _leads_to(items, at) & set(sends), f"{item} waits for no send of stage {stage}"
        held_back += sum(isinstance(one, Op) and one.phase in BACKWARD for one in items[sends[-1] :])
    assert held_back >= STAGES - 1


def test_the_same_is_done_and_everything_is_made_before_it_is_read(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = schedule(plan)
    there = set(made.inputs)
    for item in made.items:
        needed = item.inputs if isinstance(item, Op) else (item.source,)
        assert set(needed) <= there
        there.update(item.outputs)
    monkeypatch.setattr(schedules, "by_stage", lambda plan, items: (items, None))
    plain = schedule(plan)
    assert _named(plain.items) == _named(made.items)
    assert [one.walked for one in plain.items] == [one.walked for one in made.items]
    assert plain.items != made.items


def _named(items: tuple[Op | Box, ...]) -> Counter[str]:
    return Counter(f"{type(one).__name__} {one.inputs} {one.outputs}" for one in items)


def _leaves(item: Op | Box) -> bool:
    if not isinstance(item, Box) or item.phase not in BACKWARD:
        return False
    return item.gives and item.move.kind in ("send", "broadcast")


def _leads_to(items: list[Op | Box], start: int) -> set[int]:
    """The items that read what an item makes, or what is made of that."""
    values, found = set(items[start].outputs), set()
    for at in range(start + 1, len(items)):
        if values & set(items[at].inputs):
            found.add(at)
            values.update(items[at].outputs)
    return found
