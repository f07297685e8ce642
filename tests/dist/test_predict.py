"""Predicted peaks against what every rank of a real job allocates, Gloo's buffers included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.plan.cost import REFERENCE
from monoflow.plan.facts import facts_of
from monoflow.plan.memory import LocalShapes, timeline
from monoflow.plan.predict import predict
from monoflow.plan.schedule import schedule
from monoflow.runtime.allocations import allocations
from tests.conftest import RunRanks


class Net(nn.Module):
    """An embedding, an MLP and a classifier: large parameters, and activations as large."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(400, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 400)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


def run(plan: str, grid: list, rows: int) -> tuple[int, int]:
    """Predicted and measured peak bytes of this rank."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    placement = flow.placement("cpu", grid)

    @flow.graph(model, optimizer, plan=plan, placement=placement)
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ids = torch.randint(0, 400, (rows, 32))
    step(ids)
    compiled, rank = step._require(), dist.get_rank()
    inputs = step._bound(compiled).read((ids,), {})
    before = sum(one.nbytes for one in inputs[rank])
    shapes = LocalShapes(compiled.plan, facts_of(compiled.plan.graph), placement.coordinate(rank))
    predicted = timeline(compiled.plan, schedule(compiled.plan), shapes)  # of one thread, as is measured
    assert predicted.before == before
    on_lanes = predict(compiled.plan, REFERENCE, coordinate=placement.coordinate(rank))
    assert predicted.peak_bytes <= on_lanes.peak_bytes
    engine, peaks = compiled.engine.in_caller(), []
    for _ in range(5):  # now and then a free by one of Gloo's threads goes unseen
        inputs = step._bound(compiled).read((ids,), {})
        dist.barrier()
        peaks.append(allocations(lambda given=inputs: engine.run(given), torch.device("cpu"))[1].peak)
    return predicted.peak_bytes, before + min(peaks)


@pytest.mark.parametrize(
    ("plan", "grid", "rows"),
    [
        ("data", [0, 1], 8),
        ("zero", [0, 1], 7),
        ("tensor", [0, 1], 8),
        ("data x tensor", [[0, 1], [2, 3]], 8),
    ],
)
def test_every_rank_allocates_what_is_predicted(
    plan: str, grid: list, rows: int, run_ranks: RunRanks
) -> None:
    for predicted, measured in run_ranks(flow.placement("cpu", grid).size, run, plan, grid, rows):
        assert predicted == pytest.approx(measured, rel=0.05)
