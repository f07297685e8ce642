"""Streams with worker processes: the same batches, bounded, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from monoflow.data import Stream, parquet, stream, text
from monoflow.data.workers import torch_worker
from monoflow.errors import FlowError, LayoutError, RunError
from tests.conftest import cli_environment

SIZE = 23


class Drawing:
    """Sample i is i and what three global generators draw; counts loads over all processes."""

    def __init__(self) -> None:
        self.loads = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.loads.get_lock():
            self.loads.value += 1
        return torch.tensor([index, torch.rand(()), np.random.rand(), random.random()])


class Forward(IterableDataset):
    """0, 1, ... as torch advises: in a worker it would yield that worker's share only."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(SIZE) if info is None else range(info.id, SIZE, info.num_workers))


class Fails:
    """Sample 5 does what it is told."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.how == "raise":
            raise OSError("byte 5 is gone")
        if index == 5 and self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def number_of(line: str) -> torch.Tensor:
    return torch.tensor([float(line.split()[1]), torch.rand(())])


def row_number(row: dict[str, Any]) -> int:
    return int(row["i"])


def make(kind: str, folder: Path, workers: int, **options: Any) -> Stream:
    if kind == "text":
        path = folder / "n.txt"
        path.write_text("".join(f"line {i}\n" for i in range(SIZE)))
        return stream(text(path), 5, transform=number_of, window=10, workers=workers, **options)
    if kind == "parquet":
        pq.write_table(pa.table({"i": range(SIZE)}), folder / "t.parquet", row_group_size=3)
        data = parquet(folder / "t.parquet")
        return stream(data, 5, transform=row_number, window=10, workers=workers, **options)
    dataset = {"map": Drawing, "iterable": Forward, "columns": lambda: torch.arange(SIZE)}[kind]()
    return stream(dataset, 5, window=10, workers=workers, **options)


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than a small machine has cores
@pytest.mark.parametrize("kind", ["map", "iterable", "columns", "text", "parquet"])
def test_the_same_batches_from_any_number_of_workers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monoflow.data.lines.BLOCK_BYTES", 30)
    plain = make(kind, tmp_path, workers=0)
    first, second = values(plain), values(plain)
    assert [len(batch) for batch in first] == [5, 5, 5, 5, 3] and first != second
    torch.manual_seed(1)
    expected = torch.rand(2)
    for workers in (1, 3):
        torch.manual_seed(1)
        data = make(kind, tmp_path, workers)
        iterator = iter(data)
        assert values(islice(iterator, 2)) == first[:2]
        state = data.state_dict()
        assert state["batch"] == 2  # though more are made
        del iterator
        data.load_state_dict(state)
        assert values(data) == first[2:]
        assert values(data) == second
        assert data.stats[:2] == (10, 46) and data.stats.wait_seconds > 0
        assert torch.equal(torch.rand(2), expected)  # nothing was drawn from the model's generator
    assert multiprocessing.active_children() == []


def loads_at_rest(dataset: Drawing) -> int:
    """How many samples were loaded, once nothing has been for half a second."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 0.5:
        if dataset.loads.value != seen:
            seen, since = dataset.loads.value, time.monotonic()
        time.sleep(0.02)
    return seen


@pytest.mark.parametrize(("workers", "prefetch", "ahead"), [(1, 1, 1), (1, 3, 3), (2, 3, 4)])
def test_workers_make_no_more_than_they_may(workers: int, prefetch: int, ahead: int) -> None:
    dataset = Drawing()
    iterator = iter(stream(dataset, 2, workers=workers, prefetch=prefetch))
    next(iterator)
    assert loads_at_rest(dataset) == 2 * (1 + ahead)
    del iterator
    assert multiprocessing.active_children() == []


def test_the_workers_end_with_the_iterator() -> None:
    iterator = iter(stream(Drawing(), 2, workers=2))
    next(iterator)
    workers = [child.pid for child in multiprocessing.active_children()]
    assert len(workers) == 2
    iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert multiprocessing.active_children() == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


@pytest.mark.parametrize("kind", ["map", "text"])
def test_an_error_in_a_worker_is_that_of_one_process(kind: str, tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_bytes(b"a\n" * 5 + b"\xff\n" + b"a\n" * 6)
    for workers in (1, 2):
        dataset = Fails("raise") if kind == "map" else text(tmp_path / "n.txt")
        facts = "OSError: byte 5 is gone" if kind == "map" else "UnicodeDecodeError"
        with pytest.raises(FlowError, match=rf"^sample 5 .*cannot be loaded: {facts}") as caught:
            list(stream(dataset, 4, shuffle=False, workers=workers, transform=hash))
        assert "in a worker of the stream:\nTraceback" in caught.value.__notes__[0]
        data = stream(dataset, 4, shuffle=False, workers=workers, on_error="skip", transform=hash)
        batches = values(data)
        assert batches[1] == [hash(4), hash(6), hash(6), hash(7)] if kind == "map" else [hash("a")] * 4
        assert data.stats.skipped == 1
    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(
        RunError, match=r"a worker of the stream died: .*DataLoader worker \(pid.*fewer workers="
    ):
        list(stream(Fails("die"), 4, shuffle=False, workers=2))
    assert multiprocessing.active_children() == []


def to_longest(lines: list[str]) -> torch.Tensor:
    return torch.zeros(len(lines), max(len(line) for line in lines))


def test_workers_that_share_rows_must_pad_alike(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("a\nbb\n")
    assert next(iter(stream(text(tmp_path / "n.txt"), 2, collate=to_longest, workers=1))).shape == (2, 2)
    with pytest.raises(
        LayoutError, match=r"float32\['n', [12]\].*float32\['n', [12]\].*pad to a fixed length"
    ):
        next(iter(stream(text(tmp_path / "n.txt"), 2, collate=to_longest, workers=2)))


def test_torch_keeps_what_a_worker_is_where_we_hide_it() -> None:
    """If this fails, torch has moved it: see monoflow/data/workers.py."""
    assert get_worker_info() is None and torch_worker._worker_info is None
    torch_worker._worker_info = found = torch_worker.WorkerInfo(
        id=3, num_workers=4, seed=0, dataset=Forward()
    )
    try:
        assert get_worker_info() is found
    finally:
        torch_worker._worker_info = None


# --- as programs -------------------------------------------------------------------------------------

HEAD = """
import os, signal, sys, time
import monoflow as flow

class Slow:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.01)
        return index

data = flow.stream(Slow(), 4, workers=2)
batches = iter(data)
next(batches)
"""


def start(body: str) -> subprocess.Popen[str]:
    script = textwrap.dedent(HEAD) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=cli_environment(),
        start_new_session=True,  # a group of its own, as a terminal's job is
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_group_gone(pid: int) -> bool:
    """Whether no process of the group is left, within 5 s."""
    for _ in range(50):
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_ctrl_c_ends_a_program_and_its_workers() -> None:
    process = start("print('ready', flush=True)\nfor batch in batches: time.sleep(0.1)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert error.strip().endswith("KeyboardInterrupt")
    assert error.count("Traceback") == 1  # the workers say nothing
    assert is_group_gone(process.pid)


def test_workers_go_on_when_ctrl_c_is_an_answer() -> None:
    """The program leaves its iterator open, and ends all the same."""
    process = start(
        """
        with flow.stop_on_interrupt() as stop:
            print('ready', flush=True)
            while not stop():
                next(batches)
            for _ in range(10):
                next(batches)
        print('went on', flush=True)
        """
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error) == (0, "went on\n", "")
    assert is_group_gone(process.pid)
