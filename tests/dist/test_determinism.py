"""One seed, plan and placement give one curve, bit for bit: run after run, resumed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import monoflow as flow
from monoflow.step import Step
from tests.conftest import RunRanks

STEPS = 4
PLANS = ("data", "zero", "tensor", "pipeline")
LAZY = ("pipeline",)  # what is built lazily begins with numbers of its own


class Model(nn.Module):
    """Dropout, an embedding and layers that a pipeline can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.layers(self.embedding(ids))))


def build(plan: str, lazy: bool = False, seed: int = 0) -> tuple[Step, nn.Module, flow.data.Stream]:
    torch.manual_seed(seed)
    if lazy:
        with flow.lazy():
            model = Model()
    else:
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @flow.graph(model, optimizer, plan=plan)
    def step(ids: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ids = torch.randint(0, 13, (STEPS * 8, 6), generator=torch.Generator().manual_seed(5))
    return step, model, flow.stream(ids, batch_size=8, seed=3)


def curve(step: Step, batches: Any, count: int = STEPS) -> list[float]:
    found = []
    for batch in batches:
        found.append(step(batch).item())
        if len(found) == count:
            break
    return found


def curves(path: Path) -> dict[str, list[list[float]]]:
    """One rank: by plan, the curve of a run, of another like it, and of one that a third goes on from."""
    found = {}
    for plan in PLANS:
        lazy = plan in LAZY
        runs = []
        for _ in range(2):
            step, _, batches = build(plan, lazy)
            runs.append(curve(step, batches))
        step, _, batches = build(plan, lazy)
        begun = curve(step, batches, STEPS // 2)
        flow.save(path / plan, step, stream=batches)
        step, model, batches = build(plan, lazy, seed=7)
        flow.load(path / plan, step, stream=batches)
        runs.append(begun + curve(step, batches))
        assert plan == "data" or any(isinstance(one, DTensor) for one in model.parameters())
        flow.save(path / f"{plan} at the end", step, stream=batches)
        found[plan] = runs
    return found


def test_one_curve_bit_for_bit(run_ranks: RunRanks, tmp_path: Path) -> None:
    alone = {}
    for lazy in (False, True):
        step, _, batches = build("data", lazy)
        alone[lazy] = curve(step, batches)
    ranks = run_ranks(2, curves, tmp_path)
    for plan in PLANS:
        runs, expected = ranks[0][plan], alone[plan in LAZY]
        assert runs[0] == runs[1] == runs[2], plan
        assert all(one[plan] == runs for one in ranks)
        torch.testing.assert_close(runs[0], expected, rtol=0, atol=1e-5)
        # What several ranks saved at stages of a pipeline, of a model built lazily too, one device goes on from.
        step, _, batches = build("data", seed=9)
        flow.load(tmp_path / plan, step, stream=batches)
        torch.testing.assert_close(
            curve(step, batches), expected[STEPS // 2 :], rtol=0, atol=1e-5, msg=lambda text: f"{plan}: {text}"
        )
