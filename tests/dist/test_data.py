"""Streams on real ranks: each reads its part, and they go on where another number of ranks stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from monoflow.data import Stream, parquet, stream, text, tokens
from monoflow.errors import FlowError
from tests.conftest import RunCli, RunRanks

SIZE = 46

KINDS = ("map", "iterable", "columns", "text")


class Noisy:
    """Sample i is i and a random number; some are corrupt."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 11 == 3:
            raise OSError("gone")
        return torch.tensor([index, torch.rand(())])


class Forward(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def number(line: str) -> int:
    return int(line.split()[1])


def make(kind: str, folder: str, workers: int) -> Stream:
    if kind == "text":
        return stream(text(f"{folder}/*.txt"), 6, window=24, transform=number, workers=workers)
    data = {"map": Noisy, "iterable": Forward, "columns": lambda: torch.arange(SIZE)}[kind]()
    return stream(data, 6, window=24, workers=workers, on_error="skip")


def values(batches: Any) -> list[Any]:
    return [
        batch.full_tensor().tolist() if isinstance(batch, DTensor) else batch.tolist() for batch in batches
    ]


def go_on(folder: str, workers: int) -> dict[str, Any]:
    """Takes each stream up where the test left it, and leaves one for the test to go on with."""
    found = {}
    for kind, state in json.loads(Path(folder, "state.json").read_text()).items():
        data = make(kind, folder, workers)
        data.load_state_dict(state)
        rest, next_ones = values(data), values(islice(data, 3))
        skipped = torch.tensor(data.stats.skipped)
        dist.all_reduce(skipped)
        found[kind] = [rest, next_ones, data.state_dict(), data.stats.samples, skipped.item()]
    return found


SCRIPT = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from tests.dist.test_data import go_on

folder = sys.argv[1]
found = go_on(folder, workers=2)
Path(folder, f"found{dist.get_rank()}.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(("num_ranks", "workers"), [(2, 2), (3, 0)])
def test_other_ranks_see_exactly_what_is_left(
    num_ranks: int, workers: int, tmp_path: Path, run_cli: RunCli, run_ranks: RunRanks
) -> None:
    for name, rows in (("a", range(20)), ("b", range(20, SIZE))):
        (tmp_path / f"{name}.txt").write_text("".join(f"line {i}\n" for i in rows))
    states, expected = {}, {}
    for kind in KINDS:
        whole = make(kind, str(tmp_path), workers=0)
        expected[kind] = values(whole), values(whole)
        begun = make(kind, str(tmp_path), workers=1)
        assert values(islice(begun, 3)) == expected[kind][0][:3]
        states[kind] = begun.state_dict()
    (tmp_path / "state.json").write_text(json.dumps(states))
    if workers:  # ranks of the fixture may not have children
        (tmp_path / "script.py").write_text(SCRIPT)
        done = run_cli("run", "-n", str(num_ranks), tmp_path / "script.py", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        ranks = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(num_ranks)]
    else:
        ranks = run_ranks(num_ranks, go_on, str(tmp_path), 0)
    assert all(rank == ranks[0] for rank in ranks)
    order = [batch for epoch in expected["columns"] for batch in epoch]  # that of the map-style one too
    for kind, (rest, next_ones, state, samples, skipped) in ranks[0].items():
        first, second = expected[kind]
        assert (rest, next_ones) == (first[3:], second[:3])
        assert samples == SIZE  # 28 and 18
        corrupt = [i for batch in order[3 : len(first) + 3] for i in batch if i % 11 == 3]
        assert skipped == (len(corrupt) if kind == "map" else 0)
        after = make(kind, str(tmp_path), workers=1)
        after.load_state_dict(state)
        assert values(after) == second[3:]


def on_a_rank(folder: str) -> dict[str, Any]:
    """What a rank reads of Parquet, text and tokens, and what it holds."""
    reads: list[int] = []
    plain = pq.ParquetFile.read_row_group
    counting = lambda self, i, **options: reads.append(i) or plain(self, i, **options)  # noqa: E731
    pq.ParquetFile.read_row_group = counting  # pyright: ignore[reportAttributeAccessIssue]
    counted: list[str] = []
    source = text(f"{folder}/*.txt")
    count = source.count
    source.count = lambda path: counted.append(os.path.basename(path)) or count(path)
    found = {"text": whole(stream(source, 4, transform=len)), "counted": counted}
    data = stream(parquet(f"{folder}/*.parquet"), 16, window=64)
    found["parquet"] = whole(data)
    found["groups"] = len(reads)
    found["tokens"] = whole(stream(tokens(f"{folder}/*.bin", length=3), 4))
    return found


def whole(data: Stream) -> list[Any]:
    made = []
    for batch in data:
        x = batch if isinstance(batch, torch.Tensor) else next(iter(batch.values()))
        assert isinstance(x, DTensor)
        made.append(x.full_tensor().tolist())
    return made


def test_ranks_share_the_reading(tmp_path: Path, run_ranks: RunRanks) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text("".join("x" * i + "\n" for i in range(5)))
    pq.write_table(pa.table({"i": range(128)}), tmp_path / "t.parquet", row_group_size=4)
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "t.bin")
    expected = {
        "text": values(stream(text(str(tmp_path / "*.txt")), 4, transform=len)),
        "parquet": [b["i"].tolist() for b in stream(parquet(tmp_path / "t.parquet"), 16, window=64)],
        "tokens": [b["input_ids"].tolist() for b in stream(tokens(tmp_path / "t.bin", length=3), 4)],
    }
    ranks = run_ranks(2, on_a_rank, str(tmp_path))
    assert [rank["counted"] for rank in ranks] == [["a.txt", "b.txt"], ["c.txt", "d.txt"]]
    for rank in ranks:
        assert {name: rank[name] for name in expected} == expected
        assert rank["groups"] <= 2 * (32 // 4 + 1)  # of 32 groups, in two windows: half, and an edge


def test_a_file_that_one_rank_cannot_count_stops_all(tmp_path: Path, run_ranks: RunRanks) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("x\n")
    found = run_ranks(2, break_then_count, str(tmp_path))
    assert [one[:2] for one in found] == ["0:", "1:"]
    assert all("b.txt" in one for one in found)


def break_then_count(folder: str) -> str:
    text_files = text([f"{folder}/a.txt", f"{folder}/b.txt"])
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(f"{folder}/b.txt")
    dist.barrier()
    try:
        stream(text_files, 1)
    except FlowError as error:
        return f"{dist.get_rank()}: {error}"
    return "no error"
