"""Streams: every sample once an epoch, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from monoflow.data import stream
from monoflow.errors import FlowError, LayoutError
from monoflow.sbp.layout import chunk_range
from monoflow.tensor import to_local
from tests.conftest import RunRanks


class Squares:
    """Sample i is (i, i * i); counts how often it is asked."""

    def __init__(self, size: int) -> None:
        self.size, self.loads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.loads += 1
        return {"x": torch.tensor([index, index]), "y": index * index}


def samples(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_every_sample_once_an_epoch() -> None:
    data = stream(torch.arange(10), batch_size=4)
    first, second = samples(data), samples(data)
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert len(data) == 3
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(10))
    assert first != second
    assert data.epoch == 2
    data.set_epoch(0)
    assert samples(data) == first
    assert samples(stream(torch.arange(10), batch_size=4)) == first
    assert samples(stream(torch.arange(10), batch_size=4, seed=1)) != first


def test_order_of_the_dataset_and_the_last_batch() -> None:
    data = stream(torch.arange(5), batch_size=2, shuffle=False, drop_last=True)
    assert samples(data) == samples(data) == [[0, 1], [2, 3]]
    assert len(data) == 2


def test_columns_stay_together() -> None:
    x = torch.arange(6)
    for batch in stream({"x": x, "y": x * 2}, batch_size=4):
        assert torch.equal(batch["x"] * 2, batch["y"])


def test_samples_are_collated() -> None:
    for batch in stream(Squares(7), batch_size=3, shuffle=False):
        assert batch["x"].shape == (len(batch["y"]), 2)
        assert torch.equal(batch["x"][:, 0] ** 2, batch["y"])
    ours = stream(Squares(4), 2, shuffle=False, collate=lambda rows: torch.tensor([row["y"] for row in rows]))
    assert samples(ours) == [[0, 1], [4, 9]]


@pytest.mark.parametrize(
    ("collate", "facts"),
    [
        (lambda rows: {"y": torch.tensor(0)}, r"batch\['y'\] has shape \(\) for 2 samples"),
        (lambda rows: {"y": torch.zeros(3)}, r"batch\['y'\] has shape \(3,\) for 2 samples"),
        (lambda rows: {"y": "text"}, r"batch\['y'\] is a str, not a tensor"),
    ],
)
def test_collate_is_checked(collate: Any, facts: str) -> None:
    with pytest.raises(LayoutError, match=facts):
        next(iter(stream(Squares(4), batch_size=2, collate=collate)))


def test_there_must_be_a_batch() -> None:
    with pytest.raises(FlowError, match="batch_size=0: a global batch holds at least one"):
        stream(torch.arange(3), batch_size=0)
    with pytest.raises(FlowError, match="batch_size=4 leaves no batch of 3 samples"):
        stream(torch.arange(3), batch_size=4, drop_last=True)
    with pytest.raises(FlowError, match=r"these have \{'x': 3, 'y': 2\}"):
        stream({"x": torch.zeros(3), "y": torch.zeros(2)}, batch_size=1)


def stream_on_a_rank(kind: str, batch_size: int) -> tuple[list[list[int]], list[list[int]], int]:
    squares = Squares(7)
    dataset = {"tensor": torch.arange(7) ** 2, "columns": {"y": torch.arange(7) ** 2}, "map": squares}[kind]
    whole, parts = [], []
    for batch in stream(dataset, batch_size):
        y = batch if kind == "tensor" else batch["y"]
        assert isinstance(y, DTensor)
        whole.append(y.full_tensor().tolist())
        parts.append(to_local(y).tolist())
    return whole, parts, squares.loads


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", ["tensor", "columns", "map"])
@pytest.mark.parametrize("batch_size", [3, 4])  # 7 = 4 + 3 = 3 + 3 + 1: uneven and empty parts
def test_ranks_see_the_same_batches(run_ranks: RunRanks, num_ranks: int, kind: str, batch_size: int) -> None:
    expected = samples(stream(torch.arange(7) ** 2, batch_size))
    for rank, (whole, parts, loads) in enumerate(run_ranks(num_ranks, stream_on_a_rank, kind, batch_size)):
        assert whole == expected
        ranges = [chunk_range(len(batch), num_ranks, rank) for batch in expected]
        assert parts == [batch[slice(*one)] for batch, one in zip(expected, ranges, strict=True)]
        if kind == "map":  # only its own rows, and one to see the structure of an empty part
            assert loads == sum(max(1, stop - start) for start, stop in ranges)


def ragged_on_a_rank() -> str:
    try:
        next(
            iter(stream(Squares(4), 4, shuffle=False, collate=lambda rows: torch.zeros(2, rows[0]["y"] + 1)))
        )
    except LayoutError as error:
        return str(error)
    return "no error"


def test_a_collate_that_pads_to_its_own_longest_is_refused(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, ragged_on_a_rank):
        assert "rank 0 brings float32[2, 1], rank 1 brings float32[2, 5]" in message
