"""What compute hides of moves: schedules by hand, and step by step on integer seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import monoflow as flow
from monoflow.boxing.route import LinkCost
from monoflow.plan import hiding
from monoflow.plan.cost import Device, Machine
from monoflow.plan.hiding import COMPUTE, Task, hidden, run
from monoflow.plan.plan import Plan
from monoflow.plan.predict import predict
from monoflow.plan.schedule import Box, Op, schedule
from monoflow.plan.time import micro_batched

from .test_overlap import compiled

OUTER, INNER = 0, 1


def task(lane: int, seconds: float, *needs: int) -> Task:
    return Task(lane, 0, 0, seconds, set(needs))


def test_a_lane_does_the_first_that_is_ready() -> None:
    """By hand: 2 waits for the move until 5 and 3 does not, so 3 goes first."""
    spans = run([task(COMPUTE, 1), task(OUTER, 4, 0), task(COMPUTE, 2, 1), task(COMPUTE, 3, 0)])
    assert spans == [(0, 1), (1, 5), (5, 7), (1, 4)]


def test_axes_carry_moves_at_once_and_each_axis_one_by_one() -> None:
    spans = run([task(OUTER, 4), task(INNER, 3), task(OUTER, 2, 0), task(COMPUTE, 1, 1, 2)])
    assert spans == [(0, 4), (0, 3), (4, 6), (6, 7)]


def test_what_is_shown_of_a_move_is_where_nothing_is_computed() -> None:
    """By hand: compute 0-2, the outer move 1-6 and the inner 3-7 beside compute 4-5; compute ends 7-8."""
    tasks = [task(COMPUTE, 2), task(OUTER, 5), task(INNER, 4), task(COMPUTE, 1), task(COMPUTE, 1)]
    spans = [hiding.Span(*pair) for pair in ((0, 2), (1, 6), (3, 7), (4, 5), (7, 8))]
    assert hiding._shown(tasks, spans) == [0, 2 + 1, 1, 0, 0]


# --- of plans ------------------------------------------------------------------------------------------


def plan_of(name: str) -> Plan:
    plan = compiled(name).plan
    return replace(plan, machine=Machine(Device("", {"float32": 1e9}, 1e9, 1e-6, 1), (LinkCost(0.0, 1e-9),)))


def seconds_of(items: Sequence[Op | Box], compute: int, move: int) -> list[float]:
    found = []
    for at, item in enumerate(items):
        is_move = isinstance(item, Box) and not item.is_local
        bundled = is_move and item.bundle >= 0 and at and getattr(items[at - 1], "bundle", -1) == item.bundle  # type: ignore[union-attr]
        found.append(0.0 if bundled else float(move if is_move else compute))
    return found


def stepped(items: Sequence[Op | Box], seconds: Sequence[float]) -> int:
    """The schedule second by second: item by item, as the lanes may."""
    position = {value: at for at, item in enumerate(items) for value in item.outputs}
    is_move = [isinstance(item, Box) and not item.is_local for item in items]
    task_of = [0] * len(items)
    for at in range(1, len(items)):
        same = is_move[at] == is_move[at - 1] and not (
            is_move[at] and not items[at].bundle == items[at - 1].bundle >= 0  # type: ignore[union-attr]
        )
        task_of[at] = task_of[at - 1] + (not same)
    members: dict[int, list[int]] = {}
    for at, number in enumerate(task_of):
        members.setdefault(number, []).append(at)
    needs: dict[int, set[int]] = {number: set() for number in members}
    for number, own in members.items():
        moves = is_move[own[0]]
        sources = {position[v] for at in own for v in items[at].inputs if v in position}
        needs[number] |= {task_of[one] for one in sources} - {number}
        computes = [one for one in range(number) if not is_move[members[one][0]]]
        if moves:
            needs[number] |= set(computes[-1:]) | {
                one for one in range(number) if is_move[members[one][0]]
            }  # one axis: in turn
        elif len(computes) >= 2:
            needs[number] |= {one for one in range(computes[-2]) if is_move[members[one][0]]}
    left = {number: sum(seconds[at] for at in own) for number, own in members.items()}
    done: set[int] = set()
    now, running = 0, {True: -1, False: -1}
    while len(done) < len(members):
        while True:  # also what takes no time
            for moves, one in running.items():
                if one < 0:
                    able = [
                        n
                        for n in members
                        if n not in done and is_move[members[n][0]] == moves and needs[n] <= done
                    ]
                    running[moves] = min(able, default=-1)
            over = [moves for moves, one in running.items() if one >= 0 and left[one] <= 0]
            if not over:
                break
            for moves in over:
                done.add(running[moves])
                running[moves] = -1
        if len(done) < len(members):
            now += 1
            for one in running.values():
                if one >= 0:
                    left[one] -= 1
    return now


@pytest.mark.parametrize("name", ["data", "zero", "tensor"])
@pytest.mark.parametrize(("compute", "move"), [(1, 1), (1, 7), (1, 40), (3, 2)])
def test_a_step_takes_what_it_takes_second_by_second(
    name: str, compute: int, move: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monoflow.plan.overlap._START", 1.0)
    items = schedule(plan_of(name)).items
    seconds = seconds_of(items, compute, move)
    found = hidden(items, seconds)
    assert sum(seconds) - sum(found) == stepped(items, seconds)
    for item, one, all_of in zip(items, found, seconds, strict=True):
        assert 0 <= one <= all_of and (one == 0 or (isinstance(item, Box) and not item.is_local))
    assert (sum(found) > 0) == (name != "tensor")  # whose moves are all waited for


def test_a_prediction_is_less_by_what_is_hidden() -> None:
    plan = plan_of("zero")
    assert plan.machine is not None
    device = plan.machine.device
    whole, none, half = (
        predict(plan, replace(plan.machine, device=replace(device, hiding=part))) for part in (1.0, 0.0, 0.5)
    )
    assert none.hidden == 0 < whole.hidden and half.hidden == pytest.approx(whole.hidden / 2)
    for one in (whole, none, half):
        spent = sum(sum(kinds.values()) for kinds in one.seconds_by.values())
        assert one.seconds == pytest.approx(spent - one.hidden) and spent == pytest.approx(none.seconds)


def test_a_sum_over_micro_batches_is_compute() -> None:
    """It runs there (`runtime.channels`), so that nothing hides it."""
    made = schedule(micro_batched(plan_of("data"), 2))
    folds = [item for item in made.items if isinstance(item, Box) and item.folds]
    assert folds and {hiding._lane(item) for item in folds} == {COMPUTE}


def test_where_bytes_are_limited_nothing_is_hidden() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer, placement=flow.placement("cpu", [0, 1]), memory="1GB")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    with flow.simulate(2):
        plan = step.compile(torch.randn(8, 64))
    assert plan.machine is not None
    hides = replace(plan.machine, device=replace(plan.machine.device, hiding=1.0))
    assert predict(plan, hides).hidden == 0
