"""Checkpoints on real ranks: any layout into any other, each rank its parts, one end for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import monoflow as flow
from monoflow.checkpoint import Checkpoint
from monoflow.step import Step
from tests.conftest import RunRanks

NUM_STEPS = 6
FILES = ("model.safetensors", "state.safetensors")


class Model(nn.Module):
    """A tied, uneven vocabulary, dropout, running statistics, and a buffer that no state dict holds."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        x = self.norm(self.embedding(ids).flatten(0, 1))
        x = x + self.dropout(self.down(F.gelu(self.up(x))))
        return x @ self.embedding.weight.T


def build(axes: tuple[int, ...] = (1,), plan: str | None = None) -> tuple[Step, dict[str, Any]]:
    torch.manual_seed(len(axes))  # what is loaded replaces it
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    placement = flow.placement("cpu", torch.arange(torch.Size(axes).numel()).view(axes).tolist())

    @flow.graph(model, optimizer, placement=placement, plan=plan)
    def step(batch: Tensor) -> Tensor:
        loss = F.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, {"scheduler": scheduler}


def batches() -> flow.data.Stream:
    ids = torch.randint(0, 13, (NUM_STEPS * 8, 6), generator=torch.Generator().manual_seed(5))
    return flow.stream(ids, batch_size=8, seed=3)


def train(step: Step, extra: dict[str, Any], batches: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(step(next(batches)).item())
        extra["scheduler"].step()
    return losses


def file_bytes(path: Path) -> list[bytes]:
    return [(path / name).read_bytes() for name in FILES]


def bitwise(path: Path) -> dict[str, Any]:
    """One rank: a curve that is interrupted and resumed on the same plan."""
    step, extra = build((2,), "zero")
    stream = batches()
    iterator = iter(stream)
    losses = train(step, extra, iterator, 2)
    flow.save(path / "two", step, stream=stream, extra=extra)
    losses += train(step, extra, iterator, 2)
    flow.save(path / "four", step, stream=stream, extra=extra)
    again, extra = build((2,), "zero")
    moved = batches()
    flow.load(path / "two", again, stream=moved, extra=extra)
    resumed = train(again, extra, iter(moved), 2)
    split = sum(isinstance(p, DTensor) for p in again.subject.params.values())
    flow.save(path / "four again", again, stream=moved, extra=extra)
    return {"losses": losses, "resumed": resumed, "split": split, "step": again.num_steps}


def relay(
    path: Path, source: str, axes: tuple[int, ...], plan: str, target: str, late: bool
) -> dict[str, Any]:
    """One rank: takes over a checkpoint, writes it again as it was loaded, and goes on for a step.

    Args:
        late: whether it is loaded into a step that has run.
    """
    step, extra = build(axes, plan)
    stream = batches()
    if late:
        train(step, extra, iter(stream), 1)
    else:
        dist.barrier()
    objects = [id(one) for one in step.subject.params.values()]
    flow.load(path / source, step, stream=stream, extra=extra)
    kept = objects == [id(one) for one in step.subject.params.values()]
    step.compile(next(iter(batches())))
    flow.save(path / f"{target} as loaded", step, stream=stream, extra=extra)
    losses = train(step, extra, iter(stream), 1)
    flow.save(path / target, step, stream=stream, extra=extra)
    split = sum(isinstance(p, DTensor) for p in step.subject.params.values())
    return {"losses": losses, "split": split, "kept": kept}


def test_the_same_plan_resumes_bitwise(run_ranks: RunRanks, tmp_path: Path) -> None:
    for found in run_ranks(2, bitwise, tmp_path):
        assert found["resumed"] == found["losses"][2:]
        assert found["split"] > 0 and found["step"] == 4
    assert file_bytes(tmp_path / "four") == file_bytes(tmp_path / "four again")
    assert file_bytes(tmp_path / "two") != file_bytes(tmp_path / "four")
    check_shares(tmp_path / "four")


def check_shares(path: Path) -> None:
    """Every element of the checkpoint was written once."""
    index = Checkpoint(path).index
    for name, one in index.tensors.items():
        marks = torch.zeros(one.shape, dtype=torch.int64)
        for piece in one.entries[0].pieces:
            marks[tuple(slice(*ends) for ends in piece.box)] += 1
        assert (marks == 1).all(), name


def test_a_relay_over_layouts(run_ranks: RunRanks, tmp_path: Path) -> None:
    step, extra = build()
    expected = train(step, extra, iter(batches()), 5)
    step, extra = build()
    stream = batches()
    losses = train(step, extra, iter(stream), 1)
    flow.save(tmp_path / "0", step, stream=stream, extra=extra)
    legs = [((2,), "data", False), ((2, 2), "data x zero", False), ((2,), "tensor", True)]
    for number, (axes, plan, late) in enumerate(legs):
        num_ranks = torch.Size(axes).numel()
        found = run_ranks(num_ranks, relay, tmp_path, str(number), axes, plan, str(number + 1), late)
        assert all(one["losses"] == found[0]["losses"] and one["kept"] for one in found)
        assert (found[0]["split"] > 0) == (plan != "data")
        assert file_bytes(tmp_path / f"{number + 1} as loaded") == file_bytes(tmp_path / str(number))
        losses += found[0]["losses"]
    step, extra = build()
    stream = batches()
    flow.load(tmp_path / "3", step, stream=stream, extra=extra)
    assert step.num_steps == 4
    losses += train(step, extra, iter(stream), 1)
    assert losses == pytest.approx(expected, abs=1e-5)
