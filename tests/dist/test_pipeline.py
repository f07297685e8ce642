"""Pipelines on real ranks: the numbers of one device, and each rank holds the state of its stage alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import monoflow as flow
from monoflow.runtime.messages import messages, most_live
from monoflow.runtime.recorder import Fired
from monoflow.runtime.trace import Event
from monoflow.runtime.wiring import Wiring
from monoflow.step import Step, full_state_dict
from tests.conftest import RunRanks
from tests.parity.models import KINDS, batch_of, training

TOLERANCE = {
    "result": 1e-5, "gradient": 1e-5, "parameter": 1e-4, "buffer": 1e-5, "optimizer state": 1e-4,
}  # fmt: skip
GRIDS = {2: [0, 1], 4: [[0, 1], [2, 3]]}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [value for own in optimizer.state.values() for value in own.values()]
    return [*model.parameters(), *(one for one in kept if isinstance(one, torch.Tensor))]


def held_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of memory that this rank has for tensors."""
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(part.untyped_storage().nbytes() for part in parts)


class Kept(list[Event]):
    """Keeps what an engine tells of its firings."""

    def record(self, fired: Fired) -> None:
        self.append(Event.of("step", fired))


def live_and_slots(step: Step, batch: Any) -> list[tuple[int, int]]:
    """Of every register of this rank: the most tensors that were in it during a step, and its slots."""
    compiled, events = step._require(), Kept()
    (program,) = compiled.lowered.programs.values()
    compiled.engine.recorder = events
    step(batch).item()
    compiled.engine.recorder = None
    wiring = Wiring.of("step", program)
    found = most_live(messages(events, [wiring]))
    return [(most, program.registers[register].slots) for (_, _, register), most in found.items()]


def train(name: str, plan: str, num_ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    model, optimizer, function = training(name, "adamw")
    where = flow.placement("cpu", GRIDS[num_ranks])
    step = flow.graph(model, optimizer, placement=where, plan=plan, **options)(function)
    batch = batch_of(KINDS[name], 8)
    report = step.verify(batch, steps=2)
    losses = [step(batch).item() for _ in range(2)]
    live = live_and_slots(step, batch)
    state = state_of(model, optimizer)
    whole = full_state_dict(model)
    assert all(one.judged > 0 for one in report.deviations), report.text()
    return {
        "deviations": {one.kind: (one.largest, one.worst) for one in report.deviations},
        "losses": losses,
        "live": live,
        "held": held_bytes(state),
        "checked": {} if step.plan.memory is None else dict(step.plan.memory.ranks),
        "whole": sum(one.numel() * one.dtype.itemsize for one in state),
        "sums": {key: value.double().sum().item() for key, value in whole.items()},
        "shapes": {key: tuple(value.shape) for key, value in whole.items()},
        "expected": {
            key: tuple(value.shape) for key, value in training(name, "adamw")[0].state_dict().items()
        },
    }


@pytest.mark.parametrize(
    ("name", "plan", "num_ranks", "replicas", "options"),
    [
        ("t5", "pipeline", 2, 1, {"micro_batches": 3}),
        ("gpt2", "pipeline", 2, 1, {"micro_batches": 4, "stages": 4, "schedule": "zero-bubble"}),
        ("gpt2", "pipeline x data", 4, 2, {"micro_batches": 2, "schedule": "zero-bubble"}),
    ],
)
def test_equals_one_device(
    run_ranks: RunRanks, name: str, plan: str, num_ranks: int, replicas: int, options: dict[str, Any]
) -> None:
    found = run_ranks(num_ranks, train, name, plan, num_ranks, options)
    for one in found:
        assert all(most <= slots for most, slots in one["live"])
        assert max(slots for _, slots in one["live"]) > 1
        for kind, (largest, worst) in one["deviations"].items():
            assert largest <= TOLERANCE[kind], (kind, largest, worst)
        assert one["losses"] == found[0]["losses"] and one["sums"] == found[0]["sums"]
        assert one["shapes"] == one["expected"]
    # The first rank checks one rank of every stage before the run, the others themselves.
    for rank, one in enumerate(found):
        stages = range(0, num_ranks, replicas)
        assert set(one["checked"]) == (set(stages) if rank == 0 else {rank})
        for checked, registers in one["checked"].items():
            assert registers == found[checked]["checked"][checked]
            assert registers.num_bytes > found[checked]["held"]
    # Every tensor of the state is at one stage, and there is no memory for it at any other.
    assert sum(one["held"] for one in found) == replicas * found[0]["whole"]
    assert all(0 < one["held"] < found[0]["whole"] for one in found)
