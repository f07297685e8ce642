"""Hugging Face datasets as sources."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from monoflow.data import stream
from tests.local.test_data_load import over_ranks, values

datasets = pytest.importorskip("datasets")

SIZE = 30


def table() -> Any:
    return datasets.Dataset.from_dict({"i": list(range(SIZE)), "ids": [[i, -i] for i in range(SIZE)]})


def number(sample: dict[str, Any]) -> torch.Tensor:
    return torch.as_tensor(sample["i"])


def test_a_map_dataset_in_torch_format() -> None:
    data = stream(table().with_format("torch"), 4, seed=1)
    seen = []
    for batch in data:
        assert torch.equal(batch["ids"], torch.stack([batch["i"], -batch["i"]], 1))
        seen += batch["i"].tolist()
    assert sorted(seen) == list(range(SIZE)) and seen != sorted(seen)
    numbers = stream(table(), 4, seed=1, transform=number)
    assert list(itertools.chain(*values(numbers))) == seen
    assert over_ranks(numbers, 3, epoch=0)[0] == values(stream(table(), 4, seed=1, transform=number))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset(workers: int) -> None:
    dataset = table().to_iterable_dataset(num_shards=5)
    plain = stream(dataset, 4, shuffle=False, transform=number, workers=workers)
    assert list(itertools.chain(*values(plain))) == list(range(SIZE))
    data = stream(dataset, 4, window=8, transform=number, workers=workers)
    first, second = values(data), values(data)
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(SIZE))
    assert first != second
    assert over_ranks(data, 3)[0] == first
    data.load_state_dict({**data.state_dict(), "epoch": 0, "batch": 5})
    assert values(data) == first[5:]


def test_an_iterable_that_shuffles_itself_is_told_the_epoch() -> None:
    shuffled = table().to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=10)
    data = stream(shuffled, 4, shuffle=False, transform=number)
    first, second = values(data), values(data)
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(SIZE))
    assert first != second
    data.set_epoch(0)
    assert values(data) == first
