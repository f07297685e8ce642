"""Micro-batches that real ranks pull: a slow rank does fewer, and the numbers are the same."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

import monoflow as flow
from monoflow.compiler import Compiled
from tests.conftest import RunRanks

STEPS, MICRO_BATCHES = 4, 6


def build(**options: Any) -> tuple[Any, Tensor, Tensor]:
    """A step with dropout, ignored labels in the first rows only, and rows as a result."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @flow.graph(model, optimizer, plan="data", micro_batches=MICRO_BATCHES, **options)
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = model(x)
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, scores.argmax(-1)

    x, y = torch.randint(0, 11, (24, 5)), torch.randint(0, 11, (24, 5))
    y[:7] = -100
    y[8, 2:] = -100
    return step, x, y


def train(step: Any, x: Tensor, y: Tensor) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(1)
    losses, found = [], []
    for _ in range(STEPS):
        loss, best = step(x, y)
        losses.append(loss.item())
        found.append(best.full_tensor())
    return losses, found


def noted(compiled: Compiled, seconds: float) -> list[int]:
    """Makes the lane of compute slower; returns the units that this rank pulls, as it does."""
    firing, units = compiled.engine.firing, []
    compute, pull = firing._compute, firing._pull

    def slow(actor: Any, time_: int, given: list[Tensor]) -> Any:
        if actor.is_pulled:
            time.sleep(seconds)
        return compute(actor, time_, given)

    def seen(actor: Any) -> Any:
        results = pull(actor)
        units.extend(int(one) for one in results[0])
        return results

    firing._compute, firing._pull = slow, seen  # pyright: ignore[reportAttributeAccessIssue]
    return units


def compare() -> dict[str, Any]:
    rank = dist.get_rank()
    still, x, y = build()
    expected, rows = train(still, x, y)
    expected.append(still(x, y)[0].item())
    step, *_ = build(balance="dynamic")
    assert step.compile(x, y).is_pulled
    compiled = step._compiled_for((x, y), {})
    units = noted(compiled, 0.04 if rank else 0.01)
    losses, own = train(step, x, y)
    pulled = list(units)
    parts = [flow.from_local(one.chunk(2)[rank], "S(0)") for one in (x, y)]
    losses.append(step(*parts)[0].item())  # what lies in parts is gathered
    name = compiled.engine.firing.units._name  # type: ignore[union-attr]
    return {
        "losses": (expected, losses),
        "equal": all(torch.equal(one, other) for one, other in zip(rows, own, strict=True)),
        "units": pulled,
        "left": any(_get_default_store().check([f"{name}/{walk}"]) for walk in range(STEPS)),
    }


def test_a_slow_rank_does_fewer_and_the_losses_are_the_same(run_ranks: RunRanks) -> None:
    fast, slow = run_ranks(2, compare)
    for one in (fast, slow):
        expected, found = map(torch.tensor, one["losses"])
        assert len(set(expected.tolist())) == len(found) == STEPS + 1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert one["equal"], "rows of a result are not where they belong"
        assert not one["left"], "the count of a walk that is over is still in the store"
    assert sorted(fast["units"] + slow["units"]) == sorted(list(range(2 * MICRO_BATCHES)) * STEPS)
    assert 0 < len(slow["units"]) < len(fast["units"])
