"""Checkpoints on real ranks: any layout into any other, each rank its parts, one end for all of them."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import SimpleQueue, get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

import monoflow as flow
from monoflow.checkpoint import (
    Checkpoint,
    Checkpointer,
    Contents,
    Every,
    Saver,
    Shadow,
    checkpoints,
    fill,
    group_of,
    open_source,
    whole,
)
from monoflow.checkpoint.files import LocalBytes
from monoflow.checkpoint.local import LocalTarget
from monoflow.errors import CheckpointError
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
        self.mix = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        x = self.norm(self.embedding(ids).flatten(0, 1))
        x = x + self.dropout(self.mix(x))
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
    expected = train(step, extra, iter(batches()), 4)
    step, extra = build()
    stream = batches()
    losses = train(step, extra, iter(stream), 1)
    flow.save(tmp_path / "0", step, stream=stream, extra=extra)
    legs = [((2, 2), "data x zero", False), ((2,), "tensor", True)]
    for number, (axes, plan, late) in enumerate(legs):
        num_ranks = torch.Size(axes).numel()
        found = run_ranks(num_ranks, relay, tmp_path, str(number), axes, plan, str(number + 1), late)
        assert all(one["losses"] == found[0]["losses"] and one["kept"] for one in found)
        assert found[0]["split"] > 0
        assert file_bytes(tmp_path / f"{number + 1} as loaded") == file_bytes(tmp_path / str(number))
        losses += found[0]["losses"]
    step, extra = build()
    stream = batches()
    flow.load(tmp_path / "2", step, stream=stream, extra=extra)
    assert step.num_steps == 3
    losses += train(step, extra, iter(stream), 1)
    assert losses == pytest.approx(expected, abs=1e-5)


# --- without steps: tensors alone ------------------------------------------------------------------

ROWS, COLUMNS = 301, 203


def values() -> Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def laid_out(layout: str, whole: Tensor) -> Tensor:
    return flow.to_global(whole, flow.placement("cpu", list(range(dist.get_world_size()))), layout)


def at_one_rank(whole: Tensor, rank: int) -> Tensor:
    """As a stage of a pipeline stores it: the other ranks hold nothing."""
    mesh = DeviceMesh("cpu", [rank])
    local = whole if dist.get_rank() == rank else whole.new_empty(0)
    return DTensor.from_local(
        local, mesh, [Replicate()], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def contents(factor: float = 1) -> Contents:
    x = values() * factor
    model = {
        "rows": laid_out("S(0)", x),
        "columns": laid_out("S(1)", x),
        "everywhere": x,
        "few": x[:1].clone(),
    }
    return Contents(
        model | {"empty": x[:0].clone()}, {"one:rank": at_one_rank(x, 1), "one:row": laid_out("S(0)", x[:1])}
    )


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"read": 0, "written": 0}
    pwrite, read_into = os.pwrite, LocalBytes.read_into

    def pwrite_counted(descriptor: int, data: Any, at: int) -> int:
        counts["written"] += len(data)
        return pwrite(descriptor, data, at)

    def read_counted(self: LocalBytes, file: str, offset: int, out: memoryview) -> None:
        counts["read"] += len(out)
        read_into(self, file, offset, out)

    monkeypatch.setattr(os, "pwrite", pwrite_counted)
    monkeypatch.setattr(LocalBytes, "read_into", read_counted)
    return counts


def share_and_refuse(path: Path) -> dict[str, Any]:
    """One rank: what it reads and writes, and what happens to all ranks if one fails."""
    rank = dist.get_rank()
    group = group_of(range(dist.get_world_size()))
    saver = Saver(group)
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        counts = counted(patch)
        saver.save(path / "a", contents())
        source = Checkpoint(path / "a")
        counts["read"] = 0
        into = {"rows": laid_out("S(0)", values() * 0), "columns": laid_out("S(0)", values() * 0)}
        fill(source, into, group)
        found |= counts
        for one in into.values():
            assert torch.equal(flow.to_local(one), flow.to_local(laid_out("S(0)", values())))
    saver.save(f"local://{path}/remote", contents())

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    errors = []
    for start in (saver.save, saver.start):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(os, "pwrite", full)
            try:
                start(path / "a", contents(2))
                saver.wait()
            except CheckpointError as error:
                errors.append(str(error))
    other = {**contents().model, "few": torch.ones(3)} if rank == 1 else contents().model
    try:
        saver.save(path / "a", Contents(other))
    except CheckpointError as error:
        errors.append(str(error))
    saver.save(path / "b", contents(3))  # all of them go on
    return found | {"errors": errors}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_share_the_work_and_the_errors(run_ranks: RunRanks, tmp_path: Path, num_ranks: int) -> None:
    found = run_ranks(num_ranks, share_and_refuse, tmp_path)
    for name, factor in (("a", 1), ("b", 3), ("remote", 1)):
        source = open_source(tmp_path / name)
        assert source.faults(source.tensors, 0, 1) == []
        assert all(
            torch.equal(whole(source, one), values() * factor)
            for one in ("rows", "columns", "everywhere", "one:rank")
        )
        assert torch.equal(whole(source, "one:row"), values()[:1] * factor)
        assert torch.equal(whole(source, "few"), values()[:1] * factor)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "remote"]
    size = ROWS * COLUMNS * 4
    total = sum(one["written"] for one in found)
    assert total == 4 * size + 2 * COLUMNS * 4  # every byte once
    assert max(one["read"] for one in found) <= 2 * size / num_ranks * 1.1
    full, late, different = found[0]["errors"]
    assert all(one["errors"] == found[0]["errors"] for one in found)
    assert full == late.replace(late.split(".tmp-")[1][:12], full.split(".tmp-")[1][:12])
    assert "rank 1: " in full and "No space left on device" in full and "model.safetensors" in full
    assert (
        "few is torch.float32 (1, 203)" in different and "on rank 0" in different and "on rank 1" in different
    )


def snapshots(path: Path) -> list[int]:
    """One rank that is asked for the next snapshot while the first rank is still writing the last."""
    shadow = Shadow(str(path), group_of((0, 1)), Every(1))
    begin, go = LocalTarget.begin, threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTarget, "begin", lambda *args: (go.wait(20), begin(*args)))
        for number in (1, 2, 3):
            shadow.save(number, lambda: contents(1))
        go.set()
        shadow.wait()
    found = [number for number, _ in checkpoints(path)]
    shadow.save(4, lambda: contents(4))
    shadow.wait()
    return found + [number for number, _ in checkpoints(path)]


def test_ranks_ask_for_a_snapshot_while_one_is_written(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(2, snapshots, tmp_path) == [[1, 4]] * 2


def asked_to_end(path: Path, signum: int) -> tuple[int, list[int], str]:
    """One rank of a loop in which rank 1 alone gets a signal at its third step."""
    group = group_of((0, 1))
    number = 0
    seen = []
    ended = ""
    signals: Callable[[], int] = lambda: number  # noqa: E731
    options: dict[str, Any] = {"every": None, "keep_last": 2, "on_signal": True, "asynchronous": True}
    try:
        with Checkpointer(path, lambda: contents(number), signals, group, **options) as series:
            for number in range(1, 9):
                if number == 3 and dist.get_rank() == 1:
                    signal.raise_signal(signum)
                series.after_step()
                seen.append(number)
    except (SystemExit, KeyboardInterrupt) as stop:
        ended = repr(stop)
    return number, seen, ended


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_save_after_the_same_step(run_ranks: RunRanks, tmp_path: Path, signum: int) -> None:
    found = run_ranks(2, asked_to_end, tmp_path, signum)
    ended = "SystemExit(143)" if signum == signal.SIGTERM else "KeyboardInterrupt()"
    assert found == [(4, [1, 2, 3], ended)] * 2
    ((number, path),) = checkpoints(tmp_path)
    assert number == 4 and torch.equal(whole(open_source(path), "columns"), values() * 4)


def killed(rank: int, path: Path, found: SimpleQueue) -> None:
    """One rank of two, of which the second dies while it writes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    saver = Saver(group_of((0, 1)))
    saver.save(path / "a", contents())
    if rank == 1:
        os.pwrite = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    try:
        saver.start(path / "a", contents(2))
        saver.wait()
    except CheckpointError as error:
        found.put(str(error))
    os._exit(0)  # the group is broken


def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "monoflow.face"])
    found = context.SimpleQueue()
    processes = [context.Process(target=killed, args=(rank, tmp_path, found), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    assert found.get().startswith("rank 0 lost touch with the others of ranks [0, 1]")
    source = open_source(tmp_path / "a")
    assert source.faults(source.tensors, 0, 1) == []
    assert torch.equal(whole(source, "columns"), values())


def distributed(path: Path) -> None:
    """One rank: as torch's own programs save what is split over ranks."""
    model = {"x": laid_out("S(0)", values()), "y": laid_out("S(1)", values())}
    dcp_save({"model": model}, checkpoint_id=path)


def test_what_several_ranks_of_torch_wrote(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, distributed, tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    source = open_source(tmp_path)
    assert all(torch.equal(whole(source, name), values()) for name in ("x", "y"))
