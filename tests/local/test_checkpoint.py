"""Saving and loading in one process: atomic, verified, bounded, local and remote."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from torch import Tensor, nn

import monoflow as flow
from monoflow.checkpoint import Alone, Checkpoint, Contents, Saver, checkpoints, fill, open_source, whole
from monoflow.checkpoint.index import INDEX
from monoflow.checkpoint.remote import open_url
from monoflow.checkpoint.write import Snapshot
from monoflow.errors import CheckpointError
from monoflow.step import Step


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


def build(width: int = 4, make: Callable[..., torch.optim.Optimizer] | None = None) -> Step:
    torch.manual_seed(width)
    model = Model(width)
    groups = [
        {"params": [p for n, p in model.named_parameters() if ("bias" in n) is bias]}
        for bias in (False, True)
    ]
    optimizer = make(groups) if make else torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))

    @flow.graph(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def batch(number: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(number))


def train(step: Step, first: int, count: int) -> list[float]:
    return [step(batch(number)).item() for number in range(first, first + count)]


def run(step: Step, first: int, count: int) -> list[float]:
    """The same without compiling."""
    return [step.eager(batch(number)).item() for number in range(first, first + count)]


def state_of(step: Step) -> dict[str, Tensor]:
    model, (optimizer,) = step.subject.models[0], step.subject.optimizers
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        found |= {f"{name}:{key}": value.clone() for key, value in optimizer.state.get(param, {}).items()}
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "dampened": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "tensor rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_curve_goes_on_in_a_new_process_state(kind: str, tmp_path: Path) -> None:
    step = build(make=OPTIMIZERS[kind])
    train(step, 0, 2)
    step.subject.optimizers[0].param_groups[1]["lr"] = 0.03
    flow.save(tmp_path / "a", step)
    expected = train(step, 2, 2)
    again = build(make=OPTIMIZERS[kind])
    torch.manual_seed(77)
    with torch.no_grad():
        for param in again.subject.params.values():
            param.zero_()
    flow.load(tmp_path / "a", again)
    rates = [group["lr"] for group in again.subject.optimizers[0].param_groups]
    assert [float(rate) for rate in rates] == pytest.approx([0.1, 0.03], abs=1e-8)
    assert type(rates[0]) is (Tensor if kind == "tensor rate" else float)
    assert train(again, 2, 2) == expected
    assert again.num_steps == 4
    assert same(state_of(again), state_of(step))


def test_loading_into_a_step_that_ran_keeps_its_objects(tmp_path: Path) -> None:
    step = build()
    train(step, 0, 1)
    flow.save(tmp_path / "a", step)
    saved = state_of(step)
    objects = [id(x) for x in (*step.subject.params.values(), *step.subject.optimizers[0].state.values())]
    expected = train(step, 1, 2)
    flow.load(tmp_path / "a", step)
    assert same(state_of(step), saved)
    assert objects == [
        id(x) for x in (*step.subject.params.values(), *step.subject.optimizers[0].state.values())
    ]
    assert train(step, 1, 2) == expected


def test_what_had_not_begun_has_not_begun_after_loading(tmp_path: Path) -> None:
    step = build()
    flow.save(tmp_path / "a", step)
    expected = train(step, 0, 2)
    flow.load(tmp_path / "a", step)
    assert train(step, 0, 2) == expected


def test_a_checkpoint_that_waits_for_its_first_step_is_saved_too(tmp_path: Path) -> None:
    step = build()
    train(step, 0, 2)
    flow.save(tmp_path / "a", step)
    again = build()
    flow.load(tmp_path / "a", again)
    flow.save(tmp_path / "b", again)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    third = build()
    flow.load(tmp_path / "a", third)
    losses = []
    for one in (again, third):
        torch.manual_seed(1)
        losses.append(run(one, 5, 2))
    assert losses[0] == losses[1]


def files_of(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.glob("*.safetensors")}


def test_it_opens_as_safetensors(tmp_path: Path) -> None:
    step = build()
    train(step, 0, 1)
    flow.save(
        tmp_path / "a", step, extra={"rate": 0.5, "mask": torch.tensor([True, False]), "pair": (1, "x")}
    )
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert same(found, dict(step.subject.models[0].state_dict()))
    restored = flow.load(tmp_path / "a", build())
    assert restored.step == 1 and restored.plan is not None and json.loads(restored.plan)
    assert restored.extra["rate"] == 0.5 and restored.extra["pair"] == (1, "x")
    assert restored.extra["mask"].tolist() == [True, False]


# --- atomic ----------------------------------------------------------------------------------------


class Died(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("when", ["fsync", "rename 1", "rename 2"])
def test_an_interrupted_save_leaves_the_one_before(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = build()
    run(step, 0, 1)
    path = tmp_path / "a"
    flow.save(path, step)
    before, state = files_of(path), state_of(step)
    run(step, 1, 1)
    name, count = (when.split(), 1) if when == "fsync" else (when.split(), int(when[-1]))
    calls = 0
    real = getattr(os, name[0])

    def dies(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise Died
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(os, name[0], dies)
        flow.save(path, step)
    assert len(list(tmp_path.iterdir())) > 1 or when == "rename 2"  # a rest of the interrupted one
    flow.load(path, step)
    assert same(state_of(step), state) and files_of(path) == before
    run(step, 1, 1)
    flow.save(path, step)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
    flow.load(path, build())


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is no checkpoint; it is not replaced"):
        flow.save(tmp_path, build())
    assert (tmp_path / "thesis.tex").read_text() == "x"


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 64 KiB, if this user may mount one."""
    folder = Path(tempfile.mkdtemp())
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {folder} 2>/dev/null"):
        shutil.rmtree(folder)
        pytest.skip("no file system can be mounted here")
    yield folder
    os.system(f"umount {folder}")
    folder.rmdir()


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "a"
    contents = Contents({"x": torch.ones(5000)})
    saver = Saver(Alone())
    saver.save(path, contents)
    with pytest.raises(
        CheckpointError, match=r"a\.tmp-\w+/model\.safetensors cannot be written: No space left"
    ):
        saver.save(path, Contents({"x": torch.ones(50000)}))
    assert [one.name for one in small_disk.iterdir()] == ["a"]
    assert torch.equal(whole(open_source(path), "x"), contents.model["x"])


# --- damage ----------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def damage(path: Path, kind: str) -> None:
    model, state = path / "model.safetensors", path / "state.safetensors"
    offset = next(e.offset for e in Checkpoint(path).stored["first.weight"].entries)
    if kind == "flipped":
        flip(model, offset + 5)
    elif kind == "head":
        flip(state, 20)
    elif kind == "truncated":
        os.truncate(model, offset + 8)
    elif kind == "missing":
        state.unlink()
    elif kind == "plan":
        flip(path / "plan.json", 3)
    else:
        flip(path / INDEX, 300)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "flipped",
            r"a/model\.safetensors: first\.weight is damaged: its checksum is \w{16}, \w{16} was written",
        ),
        ("head", r"a/state\.safetensors is damaged in its first [\d,]+ bytes"),
        ("truncated", r"a/model\.safetensors has \d+ bytes, [\d,]+ were written; .*first\.weight.* lost"),
        ("missing", r"a/state\.safetensors is missing; it holds optimizer:first\.bias:exp_avg, "),
        ("plan", r"a/plan\.json is damaged"),
        ("index", rf"a/{INDEX} is (damaged|no index)"),
    ],
)
def test_damage_is_named_and_nothing_is_loaded(kind: str, message: str, tmp_path: Path) -> None:
    step = build()
    if kind == "plan":
        step.compile(batch(0))
    run(step, 0, 1)
    flow.save(tmp_path / "a", step)
    run(step, 1, 1)
    damage(tmp_path / "a", kind)
    state, generator = state_of(step), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message):
        flow.load(tmp_path / "a", step)
    assert same(state_of(step), state) and torch.equal(torch.get_rng_state(), generator)
    assert step.num_steps == 2


def test_a_model_that_differs_is_told_how(tmp_path: Path) -> None:
    step = build()
    run(step, 0, 1)
    flow.save(tmp_path / "a", step)
    other = build(width=5)
    other.subject.models[0].register_parameter("scale", nn.Parameter(torch.ones(2)))
    state = state_of(other)
    with pytest.raises(CheckpointError) as raised:
        flow.load(tmp_path / "a", other)
    text = str(raised.value)
    assert "does not fit step; nothing was loaded" in text
    assert "- first.weight is float32[4, 3] in it, float32[5, 3] here" in text
    assert "- scale float32[2] is not in it" in text
    assert same(state_of(other), state)
    half = build()
    half.subject.models[0].half()
    with pytest.raises(CheckpointError, match=r"first\.bias is float32\[4\] in it, float16\[4\] here"):
        flow.load(tmp_path / "a", half)


def test_an_optimizer_that_differs_is_told_how(tmp_path: Path) -> None:
    step = build()
    run(step, 0, 1)
    flow.save(tmp_path / "a", step)
    other = build(make=OPTIMIZERS["amsgrad"])
    run(other, 0, 1)
    with pytest.raises(
        CheckpointError, match=r"optimizer:first\.weight:max_exp_avg_sq float32\[4, 3\] is not in it"
    ):
        flow.load(tmp_path / "a", other)
    regrouped = build()
    first, second = regrouped.subject.optimizers[0].param_groups
    first["params"].append(second["params"].pop())
    with pytest.raises(CheckpointError, match=r"group 0 of optimizer 0 holds other parameters: last\.bias"):
        flow.load(tmp_path / "a", regrouped)
    with pytest.raises(CheckpointError, match=r"optimizer 0 is AdamW in it, SGD here"):
        flow.load(tmp_path / "a", build(make=OPTIMIZERS["momentum"]))


def test_a_stream_that_differs_leaves_all_as_it_was(tmp_path: Path) -> None:
    step = build()
    data = torch.randn(12, 3)
    stream = flow.stream(data, batch_size=6)
    for x in stream:
        step.eager(x)
    flow.save(tmp_path / "a", step, stream=stream)
    run(step, 5, 1)
    state = state_of(step)
    with pytest.raises(CheckpointError, match=r"batch_size=6, this one has batch_size=\s*4"):
        flow.load(tmp_path / "a", step, stream=flow.stream(data, batch_size=4))
    assert same(state_of(step), state)
    flow.save(tmp_path / "b", step)
    with pytest.raises(CheckpointError, match="saved without stream="):
        flow.load(tmp_path / "b", step, stream=stream)


# --- remote ----------------------------------------------------------------------------------------


def test_a_url_holds_the_same(tmp_path: Path) -> None:
    step = build()
    run(step, 0, 1)
    flow.save("memory://bucket/run", step)
    run(step, 1, 1)
    flow.save("memory://bucket/run", step)
    names = sorted(
        name.rsplit("/", 1)[-1] for name in fsspec.filesystem("memory").ls("/bucket/run", detail=False)
    )
    assert (
        len([name for name in names if name.endswith(".safetensors")]) == 2
    )  # those of the first save are gone
    index = json.loads(fsspec.filesystem("memory").cat("/bucket/run/model.safetensors.index.json"))
    assert set(index["weight_map"]) == set(step.subject.models[0].state_dict())
    assert set(index["weight_map"].values()) <= set(names)
    expected = run(step, 2, 2)
    again = build()
    flow.load("memory://bucket/run", again)
    assert run(again, 2, 2) == expected


class FullStore(MemoryFileSystem):
    """Has no room for the n-th file."""

    protocol = "fullstore"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    room = 10**9

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super().open(path, mode, **kwargs)
        if mode == "wb":
            write = file.write

            def limited(data: Any) -> int:
                FullStore.room -= len(data)
                if FullStore.room < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(data)

            file.write = limited
        return file


def test_a_store_that_fails_keeps_what_it_had() -> None:
    fsspec.register_implementation("fullstore", FullStore, clobber=True)
    url = "fullstore://a/b"
    Saver(Alone()).save(url, Contents({"x": torch.ones(8), "y": torch.ones(2)}))
    FullStore.room = 300
    with pytest.raises(
        CheckpointError, match=r"fullstore://a/b/model-.*\(x\) cannot be written: No space left"
    ):
        Saver(Alone()).save(url, Contents({"x": torch.zeros(4000)}))
    FullStore.room = 10**9
    system, root = open_url(url)
    assert len([name for name in system.ls(root, detail=False) if name.endswith(".safetensors")]) == 1
    assert whole(open_source(url), "x").tolist() == [1.0] * 8


# --- bounded ---------------------------------------------------------------------------------------


@contextmanager
def peak() -> Iterator[list[int]]:
    """Within: the most bytes that this process holds beyond those at the start, as Linux counts them."""
    status, found = Path("/proc/self/status"), []

    def read(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    start = read("VmRSS")
    yield found
    found.append(read("VmHWM") - start)


def test_memory_stays_within_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither saving nor loading takes more than a few pieces beyond the live state."""
    piece = 2**20
    for module in ("local", "read", "loading"):
        monkeypatch.setattr(f"monoflow.checkpoint.{module}.PIECE", piece)
    tensors = {"rows": torch.randn(4096, 2048), "columns": torch.randn(2048, 4096).T}  # 32 MiB each
    into = {name: torch.zeros(4096, 2048) for name in tensors}
    Saver(Alone()).save(tmp_path / "warm", Contents({"x": torch.ones(3)}))
    with peak() as saving:
        Saver(Alone()).save(tmp_path / "a", Contents(tensors))
    source = Checkpoint(tmp_path / "a")
    with peak() as loading:
        assert source.faults(tensors) == []
        fill(source, into, Alone())
    assert max(saving[0], loading[0]) < 4 * piece, (saving, loading)
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)


# --- asynchronous ----------------------------------------------------------------------------------


def test_a_save_under_way_sees_the_state_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), threading.Event()
    real = os.pwrite
    threads = set()

    def waits(*args: Any) -> int:
        threads.add(threading.current_thread().name)
        begun.set()
        assert go.wait(20)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", waits)
    saver, live = Saver(Alone()), torch.ones(1000)
    saver.start(tmp_path / "a", Contents({"x": live}))
    assert begun.wait(20) and saver.is_writing
    live.fill_(2)
    second = threading.Thread(target=lambda: saver.start(tmp_path / "b", Contents({"x": live})))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # one copy at most: the second waits for the first
    go.set()
    second.join(20)
    saver.wait()
    assert threads == {"checkpoint writer"}
    assert saver.num_bytes < 2 * live.nbytes
    assert whole(open_source(tmp_path / "a"), "x").tolist() == [1.0] * 1000
    assert whole(open_source(tmp_path / "b"), "x").tolist() == [2.0] * 1000


def test_a_writer_rests_until_somebody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    resting = threading.Event()
    wait = threading.Event.wait

    def noted(self: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "checkpoint writer":
            rests.append(timeout or 0.0)
            resting.set()
        return wait(self, None if timeout is None else 20.0)

    saver, clock = Saver(Alone()), itertools.count(0.0, 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", noted)
        patch.setattr(time, "thread_time", lambda: next(clock))
        saver.start(tmp_path / "a", Contents({name: torch.ones(3) for name in "xyz"}))
        assert wait(resting, 20) and saver.is_writing and not (tmp_path / "a").exists()
        saver.wait()
    assert rests == [5.0] * 3  # ten times half a second, after each piece
    assert whole(open_source(tmp_path / "a"), "z").tolist() == [1.0] * 3


def test_an_error_of_the_writer_surfaces_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(Alone())

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        saver.start(tmp_path / "a", Contents({"x": torch.ones(3)}))
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors \(x\) cannot be written: Input/output error"
        ):
            saver.wait()
    saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_has_no_memory_is_an_error_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks have made theirs, and their writers wait for this one's answer."""
    saver = Saver(Alone())

    def fails(self: Snapshot, memory: Tensor | None) -> Tensor:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(Snapshot, "copy_to_host", fails)
    saver.start(tmp_path / "a", Contents({"x": torch.ones(3)}))
    with pytest.raises(CheckpointError, match="MemoryError: no room for the copy"):
        saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_signal_saves_though_the_save_before_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = build()
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(SystemExit) as stopped, flow.checkpointer(tmp_path, step) as series:
        run(step, 0, 1)
        signal.raise_signal(signal.SIGTERM)
        assert not series.after_step()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fails)
            series.save()
            while series.saver.is_writing:
                pass
        run(step, 1, 1)
        series.after_step()
    assert "a checkpoint was not saved: " in caplog.text and "Input/output error" in caplog.text
    assert stopped.value.code == 143
    assert [number for number, _ in checkpoints(tmp_path)] == [2]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers


@pytest.mark.parametrize(("apart", "ends"), [(0.0, False), (6.0, True)])
def test_a_scheduler_may_tell_ranks_and_launcher(
    apart: float, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second SIGTERM at the same time does not keep a rank from saving; a later one is what it was."""
    step, told = build(), []
    previous = signal.signal(signal.SIGTERM, lambda *_: told.append("before"))
    try:
        with pytest.raises(SystemExit), flow.checkpointer(tmp_path, step) as series:
            signal.raise_signal(signal.SIGTERM)
            now = time.monotonic()
            monkeypatch.setattr(time, "monotonic", lambda: now + apart)
            signal.raise_signal(signal.SIGTERM)
            monkeypatch.undo()
            assert told == ["before"] * ends
            run(step, 0, 1)
            series.after_step()
            run(step, 1, 1)
            series.after_step()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert [number for number, _ in checkpoints(tmp_path)] == [2]


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "saves"
    told = rf"checkpoints cannot be written to '{folder}': Not a directory; give flow.checkpointer a folder"
    with pytest.raises(CheckpointError, match=told):
        flow.checkpointer(folder, build(), every="10min", resume=resume)


# --- a series --------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("remote", [False, True])
def test_every_other_step_of_which_two_stay(asynchronous: bool, remote: bool, tmp_path: Path) -> None:
    folder = f"memory://series{asynchronous}" if remote else str(tmp_path / "run")
    step = build()
    with flow.checkpointer(folder, step, every=2, keep_last=2, asynchronous=asynchronous) as series:
        assert series.latest is None
        saved = []
        for number in range(7):
            step.eager(batch(number))
            saved.append(series.after_step())
        assert saved == [False, True] * 3 + [False]
    assert [number for number, _ in checkpoints(folder)] == [4, 6]
    again = build()
    assert flow.load(folder, again).step == 6
    assert series.latest == f"{folder}/step-0000000006"


def test_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("monoflow.checkpoint.checkpointer.time.monotonic", lambda: now)
    step = build()
    with flow.checkpointer(tmp_path, step, every="1.5min", keep_last=None) as series:
        found = []
        for number in range(6):
            now += 30
            step.eager(batch(number))
            found.append(series.after_step())
    assert found == [False, False, False, True, False, False]  # seen at 90 s, done one step later


@pytest.mark.parametrize("every", [0, -1, True, "10", "0min", "1 week"])
def test_other_intervals_are_refused(every: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a number of steps nor a time"):
        flow.checkpointer(tmp_path, build(), every=every)
    with pytest.raises(CheckpointError, match=f"snapshot_every={every!r} is neither a number of steps"):
        flow.checkpointer(tmp_path, build(), snapshot_every=every)


def test_rests_of_a_job_that_died_are_removed(tmp_path: Path) -> None:
    step = build()
    run(step, 0, 2)
    flow.save(tmp_path / "step-0000000002", step)
    shutil.copytree(tmp_path / "step-0000000002", tmp_path / "step-0000000003.tmp-0123456789ab")
    shutil.copytree(tmp_path / "step-0000000002", tmp_path / "step-0000000001.old-0123456789ab")
    with flow.checkpointer(tmp_path, step) as series:
        series.save()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-0000000001", "step-0000000002"]
