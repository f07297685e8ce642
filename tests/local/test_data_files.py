"""Files as sources: what a sample is, what is read, and what is said of a broken one."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from monoflow.data import Stream, arrow, parquet, stream, text, tokens, webdataset
from monoflow.data.blocks import BlockFiles
from monoflow.data.lines import TextLines
from monoflow.data.load import read
from monoflow.data.parts import Share
from monoflow.errors import FlowError


def write_text(folder: Path) -> list[str]:
    """Three files of lines, 30 in all, some empty, some long; what each line is."""
    lines = [f"line {i} " + "é" * (i % 4) * 5 for i in range(30)]
    lines[3] = lines[11] = ""
    lines[20] = "x" * 100
    (folder / "a.txt").write_text("".join(f"{line}\n" for line in lines[:9]), encoding="utf-8")
    (folder / "b.txt").write_bytes("\r\n".join(lines[9:25]).encode())  # no end of the last line
    (folder / "c.txt").write_text("")
    (folder / "d.txt").write_text("".join(f"{line}\n" for line in lines[25:]), encoding="utf-8")
    return lines


def write_parquet(folder: Path, num_rows: int = 30, rows_of_group: int = 4) -> Any:
    table = pa.table({"i": range(num_rows), "f": pa.array(np.arange(num_rows) / 2, pa.float32())})
    half = num_rows // 2
    for name, part in (("a", table[:half]), ("b", table[half:])):
        pq.write_table(part, folder / f"{name}.parquet", row_group_size=rows_of_group)
    return table


def write_tars(folder: Path, num_samples: int = 30, samples_of_shard: int = 7) -> None:
    """Sample i has a text of 100 to 400 bytes and a class of one byte."""
    for start in range(0, num_samples, samples_of_shard):
        with tarfile.open(folder / f"shard-{start // samples_of_shard}.tar", "w") as shard:
            for i in range(start, min(start + samples_of_shard, num_samples)):
                add(shard, f"set.v1/{i:04}.txt", b"%03d" % i * (40 + i))
                add(shard, f"set.v1/{i:04}.cls.bin", bytes([i]))


def add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    shard.addfile(info, io.BytesIO(content))


def first_byte(sample: dict[str, Any]) -> int:
    return sample["cls.bin"][0]


def number_of_line(line: str) -> int:
    return int(line.split()[1]) if line.startswith("line") else -1


def row_number(sample: dict[str, Any]) -> int:
    return int(sample["i"])


def make(kind: str, folder: Path) -> tuple[BlockFiles, Any]:
    """A source of numbers 0 to 29 and what makes the number of a sample."""
    if kind == "text":
        (folder / "n.txt").write_text("".join(f"line {i}\n" for i in range(30)))
        return text(folder / "n.txt"), number_of_line
    if kind == "webdataset":
        write_tars(folder)
        return webdataset(str(folder / "*.tar")), first_byte
    table = write_parquet(folder)
    if kind == "parquet":
        return parquet(str(folder / "*.parquet")), row_number
    opener = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
    for name, part in (("a", table[:10]), ("b", table[10:])):
        with opener(folder / f"{name}.arrow", table.schema) as writer:
            writer.write_table(part, max_chunksize=4)
    return arrow(str(folder / "*.arrow")), row_number


KINDS = ["text", "webdataset", "parquet", "arrow file", "arrow stream"]


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def over_ranks(data: Stream, num_ranks: int, first: int = 0) -> list[Any]:
    parts = [
        [part.rows for part in read(data.source, data.recipe, 0, first, Share(r, num_ranks))]
        for r in range(num_ranks)
    ]
    return values(torch.cat(same) for same in zip(*parts, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_files_give_the_same_batches_on_any_ranks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monoflow.data.lines.BLOCK_BYTES", 32)
    source, transform = make(kind, tmp_path)
    assert len(source) == 30 and len(source.block_sizes) > 4
    plain = stream(source, 4, shuffle=False, transform=transform)
    assert list(itertools.chain(*values(plain))) == list(range(30))
    assert over_ranks(plain, 3) == values(plain)
    data = stream(source, 4, transform=transform, window=12, seed=1)
    first, second = values(data), values(data)
    assert [len(batch) for batch in first] == [4] * 7 + [2]
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(30))
    assert first != second
    for num_ranks in (2, 3, 5):
        assert over_ranks(data, num_ranks) == first
        assert over_ranks(data, num_ranks, first=5) == first[5:]
    data.load_state_dict({**data.state_dict(), "epoch": 0, "batch": 3})
    assert values(data) == first[3:]


# --- what is read ------------------------------------------------------------------------------------


def test_a_rank_reads_only_its_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path, num_rows=128, rows_of_group=4)  # 32 groups
    reads: list[int] = []
    plain = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, i, **kw: reads.append(i) or plain(self, i, **kw)
    )
    data = stream(parquet(str(tmp_path / "*.parquet")), 16, window=64, transform=row_number)
    assert reads == []  # counting reads the footers
    values(data)
    whole = len(reads)
    assert whole <= 32 + 2  # a group at the edge of both windows twice, and the one that is turned apart
    for rank in range(4):
        reads.clear()
        for _ in read(data.source, data.recipe, 0, 0, Share(rank, 4)):
            pass
        assert len(reads) <= 2 * (16 // 4 + 1)  # two windows: a quarter of the groups each, and an edge
    reads.clear()
    for worker in range(2):  # workers of a rank read what it would read alone, but for an edge
        for _ in read(data.source, data.recipe, 0, 0, Share(0, 4, worker, 2, by_rows=True)):
            pass
    assert len(reads) <= 2 * (16 // 4 + 2)


def test_a_rank_reads_the_contents_of_its_own_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tars(tmp_path)
    data = stream(webdataset(str(tmp_path / "*.tar")), 4, transform=first_byte, window=12)
    reads: list[int] = []
    plain = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: reads.append(size) or plain(fd, size, at))
    values(data)
    assert sum(reads) == sum(3 * (40 + i) + 1 for i in range(30))
    total = 0
    for rank in range(2):
        reads.clear()
        mine = [int(x) for part in read(data.source, data.recipe, 0, 0, Share(rank, 2)) for x in part.rows]
        assert sum(reads) == sum(3 * (40 + i) + 1 for i in mine)
        total += len(mine)
    assert total == 30


def test_a_rank_reads_only_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monoflow.data.lines.BLOCK_BYTES", 64)
    (tmp_path / "n.txt").write_text("".join(f"line {i:07}\n" for i in range(400)))  # 13 bytes each, 4 a block
    data = stream(text(tmp_path / "n.txt"), 20, window=200, transform=number_of_line)
    sizes: list[int] = []
    plain = TextLines.open
    monkeypatch.setattr(TextLines, "open", lambda self, b: sizes.append(b.stop - b.start) or plain(self, b))
    for rank in range(4):
        sizes.clear()
        mine = sum(len(part.rows) for part in read(data.source, data.recipe, 0, 0, Share(rank, 4)))
        assert mine == 100
        assert 100 * 13 <= sum(sizes) <= 100 * 13 + 2 * 2 * 65  # and blocks at both edges of two windows


def test_a_reader_holds_no_more_blocks_than_its_stretch(tmp_path: Path) -> None:
    write_parquet(tmp_path, num_rows=128, rows_of_group=4)
    source = parquet(str(tmp_path / "*.parquet"))
    data = stream(source, 8, window=32, transform=row_number)
    for _ in data:
        assert len(source._opened) <= 32 // 4 + 2
    assert max(len(source._opened) for _ in read(source, data.recipe, 0, 0, Share(1, 4))) <= 8 // 4 + 2


# --- samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 18])
def test_lines_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr("monoflow.data.lines.BLOCK_BYTES", block_bytes)
    lines = write_text(tmp_path)
    source = text(str(tmp_path / "*.txt"))
    assert [source[i] for i in range(len(source))] == lines
    with pytest.raises(IndexError):
        source[30]


def test_rows_of_tables(tmp_path: Path) -> None:
    table = pa.table(
        {
            "int": pa.array([1, 2], pa.int16()),
            "float": pa.array([0.5, 1.5], pa.float32()),
            "flag": [True, False],
            "ids": [[1, 2], [3, 4]],
            "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
            "grid": pa.array([[[1.0], [2.0]], [[3.0], [4.0]]], pa.list_(pa.list_(pa.float32()))),
            "name": ["a", "b"],
            "raw": [b"x", b"y"],
            "missing": pa.array([None, 5], pa.int64()),
            "no list": pa.array([None, [1]], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    first, second = (parquet(tmp_path / "t.parquet")[i] for i in range(2))
    assert (first["int"], first["int"].dtype) == (1, np.int16)
    assert (second["float"], second["float"].dtype) == (1.5, np.float32)
    assert (first["name"], second["raw"]) == ("a", b"y")
    assert (first["missing"], second["missing"], first["no list"]) == (None, 5, None)
    for name, dtype, expected in (
        ("ids", torch.int64, [3, 4]),
        ("fixed", torch.int32, [3, 4]),
        ("grid", torch.float32, [[3], [4]]),
    ):
        assert second[name].dtype == dtype and second[name].tolist() == expected
    some = parquet(tmp_path / "t.parquet", columns=["int", "float", "flag", "fixed"])
    (batch,) = stream(some, 2, shuffle=False)
    assert list(batch) == ["int", "float", "flag", "fixed"]
    assert [x.dtype for x in batch.values()] == [torch.int16, torch.float32, torch.bool, torch.int32]
    assert batch["fixed"].tolist() == [[1, 2], [3, 4]]


def test_samples_of_shards(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        shard.addfile(tarfile.TarInfo("folder.x/"))
        for name in ("folder.x/a.png", "folder.x/a.seg.png", "README", "folder.x/b.png", "c.d/a.png"):
            add(shard, name, name.encode())
    source = webdataset(tmp_path / "s.tar")
    assert [source[i] for i in range(3)] == [
        {"__key__": "folder.x/a", "png": b"folder.x/a.png", "seg.png": b"folder.x/a.seg.png"},
        {"__key__": "folder.x/b", "png": b"folder.x/b.png"},
        {"__key__": "c.d/a", "png": b"c.d/a.png"},
    ]
    assert len(source) == 3


@pytest.mark.parametrize("form", ["raw", "npy"])
def test_windows_of_tokens(tmp_path: Path, form: str) -> None:
    parts = (
        np.arange(11, dtype=np.uint16),
        np.arange(100, 104, dtype=np.uint16),
        np.arange(200, 207, dtype=np.uint16),
    )
    for name, part in zip("abc", parts, strict=True):
        part.tofile(tmp_path / f"{name}.bin") if form == "raw" else np.save(tmp_path / f"{name}.npy", part)
    paths = str(tmp_path / ("*.bin" if form == "raw" else "*.npy"))
    (batch,) = stream(tokens(paths, length=4), 9, shuffle=False)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [200, 201, 202, 203]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [201, 202, 203, 204]]
    assert batch["labels"].dtype == torch.int64
    (batch,) = stream(tokens(paths, length=4, shift=False), 9, shuffle=False)
    assert batch["input_ids"].tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [100, 101, 102, 103],
        [200, 201, 202, 203],
    ]
    assert torch.equal(batch["labels"], batch["input_ids"])
    (batch,) = stream(tokens(paths, length=4, stride=3), 9, shuffle=False)
    assert batch["input_ids"][:, 0].tolist() == [0, 3, 6, 200]
    rows = tokens(paths, length=4)
    assert (len(rows), rows[-1]["input_ids"].tolist()) == (3, [200, 201, 202, 203])
    assert [
        x.rows["labels"].tolist() for x in read(rows, stream(rows, 3, False).recipe, 0, 0, Share(1, 2))
    ] == [[[201, 202, 203, 204]]]


def test_memory_mapped_columns(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    batches = list(stream({"x": x, "y": torch.arange(6)}, 4, shuffle=False))
    assert batches[1]["x"].tolist() == [[8, 9], [10, 11]] and batches[1]["x"].dtype == torch.float32
    assert batches[1]["y"].tolist() == [4, 5]


# --- what is broken ----------------------------------------------------------------------------------


def test_broken_tokens(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(FlowError, match=r"odd\.bin does not hold uint16 tokens"):
        tokens(tmp_path / "odd.bin", 1)
    np.save(tmp_path / "f.npy", np.zeros(3))
    with pytest.raises(FlowError, match=r"f\.npy holds float64\[3\], not integers in one dim"):
        tokens(tmp_path / "f.npy", 1)
    np.save(tmp_path / "n.npy", np.zeros(4, np.int64))
    with pytest.raises(FlowError, match=r"a window takes 5 tokens; the longest of .*n\.npy'\] has 4"):
        tokens(tmp_path / "n.npy", 4)
    with pytest.raises(FlowError, match="length=0, stride=1: a window has at least one token"):
        tokens(tmp_path / "n.npy", 0, stride=1)
    with pytest.raises(FlowError, match=r"none\*' names no file"):
        tokens(str(tmp_path / "none*"), 4)


def test_broken_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nb\xffd\ngood\n")
    with pytest.raises(
        FlowError, match=r"sample 1 \(.*a\.txt, line 2 after byte 0\) cannot be loaded: UnicodeDec"
    ):
        list(stream(text(tmp_path / "a.txt"), 3, transform=len))
    for encoding in ("utf-16", "no such"):
        with pytest.raises(
            FlowError, match=f"encoding='{encoding}' is unknown, or does not write a line end"
        ):
            text(tmp_path / "a.txt", encoding=encoding)
    assert text(tmp_path / "a.txt", encoding="latin-1")[1] == "bÿd"
    data = stream(text(tmp_path / "a.txt"), 3, shuffle=False, transform=len, on_error="skip")
    assert values(data) == [[4, 4, 4]] and data.stats.skipped == 1


def test_broken_shards(tmp_path: Path) -> None:
    write_tars(tmp_path, 7)
    path = tmp_path / "shard-0.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as shard:
        last = max(shard.getmembers(), key=lambda one: one.offset)
    path.write_bytes(whole[: last.offset_data])
    facts = r"ValueError: \.cls\.bin has 1 bytes, of which the shard holds 0"
    with pytest.raises(FlowError, match=rf"sample 6 \(.*shard-0\.tar, key 'set\.v1/0006'\) cannot .*{facts}"):
        list(stream(webdataset(path), 7, transform=first_byte))
    data = stream(webdataset(path), 7, shuffle=False, transform=first_byte, on_error="skip")
    assert values(data) == [[0, 1, 2, 3, 4, 5, 0]]
    path.write_bytes(whole[:1000] + b"\xff" * 600 + whole[1600:])
    with pytest.raises(FlowError, match=r"shard-0\.tar cannot be read .*the header at byte \d+ is damaged"):
        stream(webdataset(path), 7)
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as shard:
        add(shard, "a.txt", b"a")
    with pytest.raises(
        FlowError, match=r"x\.tar\.gz cannot be read as a tar shard .* has to be unpacked first"
    ):
        stream(webdataset(tmp_path / "x.tar.gz"), 1)


def test_a_broken_row_group(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"i": range(8)}),
        tmp_path / "t.parquet",
        row_group_size=4,
        compression="zstd",
        use_dictionary=False,
    )
    where = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(1).column(0).data_page_offset
    content = bytearray((tmp_path / "t.parquet").read_bytes())
    content[where : where + 30] = b"\xff" * 30
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(
        FlowError, match=r"sample 4 \(.*t\.parquet, row 0 of block 1\) cannot be loaded: OSError"
    ):
        list(stream(parquet(tmp_path / "t.parquet"), 8, shuffle=False))
    data = stream(parquet(tmp_path / "t.parquet"), 8, shuffle=False, transform=row_number, on_error="skip")
    assert values(data) == [[0, 1, 2, 3, 0, 0, 0, 0]] and data.stats.skipped == 4


def test_pyarrow_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monoflow.data.tables.find_spec", lambda name: None)
    with pytest.raises(FlowError, match=r"pip install 'monoflow\[data\]'"):
        parquet(tmp_path)
