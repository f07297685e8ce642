"""Moves beside compute on real ranks: what is counted of them. Times are a matter for bench/."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import monoflow as flow
from monoflow.boxing import Group
from monoflow.runtime.messages import messages, most_live
from monoflow.runtime.recorder import Fired
from monoflow.runtime.trace import Event
from monoflow.runtime.transport import DistTransport
from monoflow.runtime.wiring import Wiring
from tests.conftest import RunRanks

STEPS = 2


class Recorder:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, fired: Fired) -> None:
        self.events.append(Event.of("p", fired))


def trained(plan: str, num_ranks: int, micro_batches: int) -> dict[str, Any]:
    """What a rank did in two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = flow.placement("cpu", list(range(num_ranks)))

    @flow.graph(model, optimizer, placement=where, plan=plan, micro_batches=micro_batches)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(8, 12)
    step(x).item()
    compiled, recorder = step._require(), Recorder()
    before = compiled.stats().calls()
    compiled.engine.recorder = recorder
    losses = [step(x).item() for _ in range(STEPS)]
    compiled.engine.recorder = None
    (program,) = compiled.lowered.programs.values()
    live = most_live(messages(recorder.events, [Wiring.of("p", program)]))
    made = [task for task in program.tasks if task.compute is not None]
    return {
        "losses": losses,
        "calls": compiled.stats().calls() - before,
        "moves": [task.move.kind for task in program.tasks if task.move is not None],
        "fired": Counter(event.name for event in recorder.events),
        "names": [(task.name, task.rate, task.move is not None) for task in program.tasks],
        "over": [key for key, most in live.items() if most > program.registers[key[2]].slots],
        "kept": max(program.registers[at].slots for one in made for at in one.outputs),
        "held": len(live),
    }


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4)])
def test_no_register_of_a_pipeline_ever_holds_more_than_its_slots(
    run_ranks: RunRanks, stages: int, micro_batches: int
) -> None:
    found = run_ranks(stages, trained, "pipeline", stages, micro_batches)
    for rank, one in enumerate(found):
        assert not one["over"] and one["held"] > 10
        assert one["kept"] == min(stages - rank, micro_batches)
        expected = Counter()
        for name, rate, _ in one["names"]:
            expected[name] += STEPS * (micro_batches if rate == "micro-batch" else 1)
        assert one["fired"] == expected
    assert found[0]["losses"] == found[1]["losses"]


@pytest.mark.parametrize(("plan", "kind"), [("data", "all_reduce"), ("zero", "reduce_scatter")])
def test_small_gradients_of_weights_and_biases_are_reduced_together(
    run_ranks: RunRanks, plan: str, kind: str
) -> None:
    found = run_ranks(2, trained, plan, 2, 1)
    for one in found:
        assert one["moves"].count(kind) == {"data": 2, "zero": 1}[plan]  # of data, the loss besides
        assert one["calls"] == STEPS * len(one["moves"])
        assert not one["over"]
    assert found[0]["losses"] == found[1]["losses"]


def moved_over_a_slow_link() -> list[Any]:
    slept: list[float] = []
    where = flow.placement("cpu", [0, 1])
    rank = torch.distributed.get_rank()
    transport = DistTransport(where, rank, link=(1e-3, 1e-6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", slept.append)
        group, x = Group(0, (0, 1)), torch.full((8,), float(rank + 1))
        total = transport.all_reduce({rank: x}, "sum", group)[rank]
        parts = transport.all_gather({rank: x}, group)[rank]
        sent = transport.send({rank: x}, 0, 1, (8,), group)
    return [slept, total.tolist(), parts[:, 0].tolist(), [one.tolist() for one in sent.values()]]


def test_a_slow_link_sleeps_for_every_start_and_byte(run_ranks: RunRanks) -> None:
    """32 bytes: an all-reduce starts twice and sends them once on two ranks, the others start once."""
    for rank, (slept, total, parts, sent) in enumerate(run_ranks(2, moved_over_a_slow_link)):
        assert slept == pytest.approx([2e-3 + 32e-6, 1e-3 + 32e-6, 1e-3 + 32e-6])
        assert total == [3.0] * 8 and parts == [1.0, 2.0]
        assert sent == ([[1.0] * 8] if rank else [])
