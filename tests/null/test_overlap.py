"""Where moves stand in a step so that they hide behind compute, and which of them go together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import monoflow as flow
from monoflow.boxing.route import LinkCost
from monoflow.graph.step_graph import Phase
from monoflow.plan import overlap
from monoflow.plan.schedule import Box, Op, Schedule, schedule
from monoflow.runtime.pace import paced
from monoflow.step import Step

LAYERS = 6


class Tower(nn.Module):
    def __init__(self, width: int = 16, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def compiled(plan: str, num_ranks: int = 2, bias: bool = False) -> Step:
    torch.manual_seed(0)
    model = Tower(bias=bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @flow.graph(model, optimizer, placement=flow.placement("cpu", list(range(num_ranks))), plan=plan)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with flow.simulate(num_ranks):
        step.compile(torch.randn(8, 16))
    return step


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move goes by itself: even the smallest bundle is full."""
    monkeypatch.setattr(overlap, "_START", 1.0)


def moves(made: Schedule, kind: str, phase: Phase | None = None) -> list[tuple[int, Box]]:
    return [
        (at, item)
        for at, item in enumerate(made.items)
        if isinstance(item, Box) and item.move.kind == kind and phase in (None, item.phase)
    ]


def readers(made: Schedule, box: Box) -> list[int]:
    return [at for at, item in enumerate(made.items) if box.target in item.inputs]


def computes_between(made: Schedule, start: int, end: int) -> int:
    """Products of matrices between two items: what a move can hide behind."""
    return sum(isinstance(one, Op) and "mm" in str(one.node.target) for one in made.items[start + 1 : end])


def test_parameters_are_gathered_one_layer_ahead(alone: None) -> None:
    made = schedule(compiled("zero").plan)
    gathers = moves(made, "all_gather", Phase.FORWARD)
    assert len(gathers) == LAYERS
    hidden = [computes_between(made, at, min(readers(made, box))) for at, box in gathers]
    assert hidden == [0, 1, 1, 1, 1, 1]


def test_no_more_than_two_layers_are_there_at_a_time(alone: None) -> None:
    made = schedule(compiled("zero").plan)
    spans = [(at, max(readers(made, box))) for at, box in moves(made, "all_gather")]
    there = [sum(begin <= at <= end for begin, end in spans) for at in range(len(made.items))]
    assert max(there) == 2


@pytest.mark.parametrize("plan", ["data", "zero"])
def test_an_update_waits_one_reduction_longer_than_it_must(alone: None, plan: str) -> None:
    made = schedule(compiled(plan).plan)
    kind = "all_reduce" if plan == "data" else "reduce_scatter"
    reduced = [(at, box) for at, box in moves(made, kind, Phase.BACKWARD)]
    assert len(reduced) == LAYERS
    hidden = [computes_between(made, at, min(readers(made, box))) for at, box in reduced]
    assert all(one >= 1 for one in hidden[:-1]), hidden
    for number, (_, box) in enumerate(reduced[:-2]):
        assert min(readers(made, box)) < reduced[number + 2][0], "an update waits longer than for one more"


@pytest.mark.parametrize(
    ("alpha", "sizes"), [(0.0, [1] * LAYERS), (0.1e-6, [1] * LAYERS), (0.2e-6, [2] * 3), (1e-4, [LAYERS])]
)
def test_a_full_bundle_spends_a_fifth_of_its_time_on_its_start(alpha: float, sizes: list[int]) -> None:
    """By hand: a gradient is 1,024 bytes at 1 ns each, an all-reduce starts twice.

    Two of them are full at 0.2 us: 0.4 us of 2.4 us is less than a fifth; one alone spends 0.4 of 1.4.
    """
    made = schedule(compiled("data").plan)
    plain = [replace(one, bundle=-1) if isinstance(one, Box) else one for one in made.items]
    arranged = overlap.overlapped(plain, [LinkCost(alpha=alpha, beta=1e-9)], set())
    weights = [one for one in arranged if isinstance(one, Box) and one.move.shape == (16, 16)]
    bundles = [one.bundle for one in weights if one.move.kind == "all_reduce"]
    assert list(Counter(bundles).values()) == sizes


@pytest.mark.parametrize(("plan", "kind"), [("data", "all_reduce"), ("zero", "reduce_scatter")])
def test_gradients_of_biases_go_with_those_of_weights(plan: str, kind: str) -> None:
    """Backward views a bias' gradient once it is reduced, which must not make that go alone."""
    made = schedule(compiled(plan, bias=True).plan)
    reduced = [box for _, box in moves(made, kind, Phase.BACKWARD)]
    assert len(reduced) == 2 * LAYERS
    assert len({box.bundle for box in reduced}) == 1


@pytest.mark.parametrize("plan", ["data", "zero"])
def test_the_third_compute_task_after_a_move_waits_for_it(alone: None, plan: str) -> None:
    (program, *_) = compiled(plan)._require().lowered.programs.values()
    pairs = set(paced(program))
    computes = [task.index for task in program.tasks if task.compute is not None]
    expected = set()
    for task in program.tasks:
        if task.compute is None:
            before = [index for index in computes if index < task.index]
            after = [index for index in computes if index > task.index]
            expected |= {(before[-1], task.index)} if before else set()
            expected |= {(task.index, after[2])} if len(after) > 2 else set()
    assert len(expected) > LAYERS
    assert pairs == expected


@pytest.mark.parametrize("plan", ["data", "zero", "tensor"])
def test_bundles_are_of_one_kind_and_lie_together(plan: str) -> None:
    made = schedule(compiled(plan, 4).plan)
    numbers = [one.bundle if isinstance(one, Box) else -1 for one in made.items]
    for number in set(numbers) - {-1}:
        places = [at for at, one in enumerate(numbers) if one == number]
        assert places == list(range(places[0], places[-1] + 1))
        boxes = [one for one in made.items if isinstance(one, Box) and one.bundle == number]
        assert len({(box.move.kind, box.move.axis, box.phase) for box in boxes}) == 1
        targets = {box.target for box in boxes}
        assert not any(box.source in targets for box in boxes)


@pytest.mark.parametrize("plan", ["data", "zero", "tensor"])
def test_everything_is_made_before_it_is_read(plan: str) -> None:
    made = schedule(compiled(plan, 4).plan)
    there = set(made.inputs)
    for item in made.items:
        assert set(item.inputs) <= there
        there.update(item.outputs)
    assert {value for _, value in made.outputs} <= there
