"""What a run goes on from and what it removes: series of checkpoints, and snapshots between them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monoflow as flow
from monoflow.checkpoint import (
    Alone,
    Contents,
    Every,
    Saver,
    Shadow,
    candidates,
    checkpoints,
    folder_of,
    open_whole,
)
from monoflow.checkpoint.index import INDEX, VERSION, checksum
from monoflow.checkpoint.local import LocalTarget
from monoflow.checkpoint.series import path_of, prune
from monoflow.errors import CheckpointError, DamagedError
from monoflow.step import Step


def build(**options: Any) -> Step:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer, **options)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def taken(step: Step, count: int) -> Step:
    for _ in range(count):
        step.eager(torch.ones(2, 3))
    return step


def saved(folder: Path | str, *numbers: int) -> None:
    """Checkpoints whose only tensor is the number of their step."""
    for number in numbers:
        saver = Saver(Alone())
        saver.save(path_of(str(folder), number), Contents({"x": torch.tensor(float(number))}))


def steps(folder: Path | str) -> list[int]:
    return [number for number, _ in checkpoints(folder)]


def flip(path: Path) -> None:
    """Damages the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# --- what stays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "number", "keep_last", "left"),
    [
        ([1, 2, 3, 4], 4, 2, [3, 4]),
        ([1, 2, 3, 4], 4, None, [1, 2, 3, 4]),
        ([1, 100, 200], 1, 3, [1]),
        ([10, 20, 100, 200], 20, 1, [20]),
        ([10, 20, 100, 200], 20, None, [10, 20]),
        ([100, 200], 1, 1, [100, 200]),
    ],
    ids=[
        "oldest go", "all stay", "begun anew", "gone back", "gone back, all stay", "not before it is in place"
    ],
)  # fmt: skip
@pytest.mark.parametrize("remote", [False, True])
def test_what_prune_removes(
    there: list[int], number: int, keep_last: int | None, left: list[int], remote: bool, tmp_path: Path
) -> None:
    folder = f"memory:/{tmp_path}" if remote else str(tmp_path)
    saved(folder, *there)
    prune(folder, number, keep_last)
    assert steps(folder) == left


def test_a_run_begun_anew_replaces_what_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 100, 200)
    step = build()
    with flow.checkpointer(tmp_path, step, every=1, keep_last=2, resume=False, asynchronous=False) as series:
        assert steps(tmp_path) == [100, 200]
        series.wait()
        for number in (1, 2, 3):
            taken(step, 1)
            series.after_step()
            assert steps(tmp_path) == [1, 2, 3][max(0, number - 2) : number]
    again = build()
    flow.checkpointer(tmp_path, again, on_signal=False)
    assert again.num_steps == 3


@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_a_run_begun_anew_goes_back_to_its_own_steps(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with flow.checkpointer(tmp_path / "disk", taken(build(), 2)) as series:
        series.save()
    monkeypatch.setenv("MONOFLOW_SNAPSHOTS", str(tmp_path / "memory"))
    step = build(on_nan="rollback")
    with flow.checkpointer(tmp_path / "disk", step, resume=False, snapshot_every=1) as series:
        assert step.refusals.roll_back is not None and not step.refusals.roll_back()
        taken(step, 1)
        _ = series.save() if folder == "disk" else series.after_step()
        taken(step, 2)
        assert step.refusals.roll_back() and step.num_steps == 1
    assert steps(tmp_path / "disk") == ([1] if folder == "disk" else [2])


def test_a_run_begun_anew_goes_on_from_its_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "disk", 100)
    monkeypatch.setenv("MONOFLOW_SNAPSHOTS", str(tmp_path / "memory"))
    for life in range(3):  # of one job that re-forms
        step = build()
        with flow.checkpointer(tmp_path / "disk", step, resume=False, snapshot_every=1) as series:
            assert step.num_steps == life
            taken(step, 1)
            series.after_step()
    assert steps(tmp_path / "disk") == [100]


def test_a_damaged_checkpoint_is_passed_over_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with flow.checkpointer(tmp_path, step := build(), every=1, asynchronous=False) as series:
        for _ in range(3):
            taken(step, 1)
            series.after_step()
    flip(Path(path_of(str(tmp_path), 3)) / "model.safetensors")
    flip(Path(path_of(str(tmp_path), 2)) / INDEX)
    with flow.checkpointer(tmp_path, step := build(), keep_last=None) as series:
        assert step.num_steps == 1
        assert caplog.text.count("is passed over: ") == 2
        assert "step-0000000003/model.safetensors: " in caplog.text and "is damaged: its" in caplog.text
        taken(step, 1)
        assert steps(tmp_path) == [1, 2, 3]
        series.save(wait=True)
    assert steps(tmp_path) == [1, 2]
    assert flow.load(tmp_path, build()).step == 2


def test_a_checkpoint_of_another_version_is_not_passed_over(tmp_path: Path) -> None:
    """It may be whole: what is passed over is replaced."""
    saved(tmp_path, 1)
    index = Path(path_of(str(tmp_path), 1)) / INDEX
    body = json.loads(index.read_text())["body"].replace(f'"version": {VERSION}', f'"version": {VERSION + 1}')
    index.write_text(json.dumps({"checksum": checksum(body.encode()), "body": body}))
    with pytest.raises(CheckpointError, match="has format version") as raised:
        flow.checkpointer(tmp_path, build())
    assert not isinstance(raised.value, DamagedError)
    index.write_text(index.read_text()[:-10])
    with pytest.raises(DamagedError, match="is no index of a checkpoint, or damaged: it does not parse"):
        open_whole(path_of(str(tmp_path), 1), Alone())


# --- what to go on from --------------------------------------------------------------------------------


def test_candidates_are_the_newest_first_and_those_in_memory(tmp_path: Path) -> None:
    memory, disk = str(tmp_path / "memory"), str(tmp_path / "disk")
    saved(memory, 3, 4)
    saved(disk, 2, 3, 5)
    Path(path_of(disk, 5)).rename(f"{path_of(disk, 5)}.old-label")  # the job died between two renames
    shutil.copytree(path_of(disk, 2), f"{path_of(disk, 6)}.tmp-label")
    found = [path_of(disk, 5), path_of(memory, 4), path_of(memory, 3), path_of(disk, 3), path_of(disk, 2)]
    assert candidates([memory, disk]) == found
    assert candidates([str(tmp_path / "none"), "memory://none"]) == []


def test_every_folder_has_snapshots_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_of("/shm", "runs/a") == folder_of("/shm", str(tmp_path / "runs/a"))
    assert folder_of("/shm", "runs/a") != folder_of("/shm", "runs/b")
    assert Path(folder_of("/shm", "runs/a")).parent == Path("/shm")


# --- snapshots -----------------------------------------------------------------------------------------


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves begin when this is set."""
    begin, go = LocalTarget.begin, threading.Event()
    monkeypatch.setattr(LocalTarget, "begin", lambda *args: (go.wait(20), begin(*args)))
    yield go
    go.set()


def contents(number: int) -> Contents:
    return Contents({"x": torch.full((1000,), float(number))})


def test_one_snapshot_at_a_time_of_which_the_newest_stays(go: threading.Event, tmp_path: Path) -> None:
    shadow = Shadow(str(tmp_path), Alone(), Every(2))
    assert [number for number in range(1, 5) if shadow.is_due(number)] == [2, 4] and not shadow.is_late()
    shadow.save(2, lambda: contents(2))
    shadow.save(4, lambda: contents(4))  # the first is being written: it is left out
    go.set()
    shadow.wait()
    assert steps(tmp_path) == [2]
    for number in (6, 8):
        shadow.save(number, lambda number=number: contents(number))
        shadow.wait()
        assert steps(tmp_path) == [number]


def test_snapshots_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("monoflow.checkpoint.shadow.time.monotonic", lambda: now)
    shadow = Shadow(str(tmp_path), Alone(), Every("30s"))
    now = 129.0
    assert not shadow.is_late()
    now = 130.0
    assert shadow.is_late() and not shadow.is_due(30)
    shadow.save(7, lambda: contents(7))
    assert not shadow.is_late()
    shadow.wait()


def test_snapshots_end_where_memory_is_short_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shadow = Shadow(str(tmp_path), Alone(), Every(1))
    shadow.save(1, lambda: contents(1))
    shadow.wait()
    with monkeypatch.context() as patch:
        patch.setattr(LocalTarget, "begin", lambda *args: (_ for _ in ()).throw(OSError(28, "no space")))
        shadow.save(2, lambda: contents(2))
        shadow.wait()
    assert caplog.text.count("no more snapshots in memory: ") == 1 and "no space" in caplog.text
    shadow.save(3, lambda: contents(3))
    shadow.wait()
    assert not shadow.is_due(4) and not shadow.is_late()
    assert steps(tmp_path) == [1]  # what there is to go on from stays


def test_going_back_waits_for_the_snapshot_that_is_being_written(
    go: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOFLOW_SNAPSHOTS", str(tmp_path / "memory"))
    step = build(on_nan="rollback")
    with flow.checkpointer(tmp_path / "disk", step, snapshot_every=1) as series:
        taken(step, 1)
        series.after_step()
        taken(step, 1)
        threading.Timer(0.2, go.set).start()
        assert step.refusals.roll_back is not None and step.refusals.roll_back()
        assert step.num_steps == 1
    assert steps(folder_of(str(tmp_path / "memory"), str(tmp_path / "disk"))) == [1]
