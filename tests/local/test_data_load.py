"""Streams of every kind of source: the same batches on any ranks, resumed, and with corrupt samples."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from monoflow.data import Stream, stream
from monoflow.data.load import read
from monoflow.data.parts import Part, Share
from monoflow.errors import FlowError, LayoutError

SIZE = 23


class Indexed:
    """Sample i is i; those in `bad` cannot be loaded."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"byte {index} is gone")
        return index


class Forward(IterableDataset):
    """0, 1, ... as torch advises: in a worker it would yield that worker's share only."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.size) if info is None else range(info.id, self.size, info.num_workers))


class Sharded(IterableDataset):
    """Shard s has s + 3 samples, 100 s, 100 s + 1, ...; remembers which were opened, and the epoch."""

    num_shards = 5

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Iterator[int]:
        assert num_shards == 5
        self.opened.append(index)
        return iter(range(100 * index, 101 * index + 3))

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(*(self.shard(5, index) for index in range(5)))


class Drawing:
    """A sample that draws from every global generator."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), np.random.rand(), random.random()])


class DrawingForward(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(SIZE)
        return (torch.tensor([i, torch.rand(()), np.random.rand(), random.random()]) for i in order)


def add_noise(sample: torch.Tensor) -> torch.Tensor:
    return sample + torch.rand(())


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def over_ranks(data: Stream, num_ranks: int, epoch: int = 0, first: int = 0) -> tuple[list[Any], int]:
    """The batches that ranks would hold together, and how many samples they skipped."""
    parts: list[tuple[Part, ...]] = list(
        zip(
            *(
                list(read(data.source, data.recipe, epoch, first, Share(rank, num_ranks)))
                for rank in range(num_ranks)
            ),
            strict=True,
        )
    )
    batches = [torch.cat([part.rows for part in same]) for same in parts]
    for batch, same in zip(batches, parts, strict=True):
        assert {part.num_samples for part in same} == {len(batch)}
    assert [same[0].is_last for same in parts] == [False] * (len(parts) - 1) + [True]
    return values(batches), sum(part.num_skipped for same in parts for part in same)


SOURCES = {
    "columns": lambda: torch.arange(SIZE),
    "array": lambda: np.arange(SIZE),
    "map": Indexed,
    "iterable": Forward,
    "shards": Sharded,
    "random map": Drawing,
    "random iterable": DrawingForward,
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_same_batches_on_any_number_of_ranks(name: str, shuffle: bool, drop_last: bool) -> None:
    data = stream(SOURCES[name](), 4, shuffle, seed=3, drop_last=drop_last, window=9)
    expected = values(data)
    whole, rest = divmod(25 if name == "shards" else SIZE, 4)
    assert [len(batch) for batch in expected] == [4] * whole + [rest] * (not drop_last)
    for num_ranks in (1, 2, 3, 5):
        assert over_ranks(data, num_ranks) == (expected, 0)
    second = values(data)
    assert (second == expected) == (not shuffle and "random" not in name)
    assert over_ranks(data, 3, epoch=1) == (second, 0)


@pytest.mark.parametrize("name", ["map", "iterable", "shards"])
def test_every_sample_once_an_epoch(name: str) -> None:
    data = stream(SOURCES[name](), 4, window=9)
    found = sorted(itertools.chain(*values(data)))
    assert found == (sorted(SOURCES[name]()) if name == "shards" else list(range(SIZE)))


def seed_all() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


def test_what_a_dataset_draws_leaves_the_model_alone() -> None:
    for dataset, transform in ((Drawing(), add_noise), (DrawingForward(), None)):
        seed_all()
        expected = (torch.rand(()).item(), np.random.rand(), random.random())
        seed_all()
        first = values(stream(dataset, 4, transform=transform))
        assert (torch.rand(()).item(), np.random.rand(), random.random()) == expected
        assert values(stream(dataset, 4, transform=transform)) == first
        assert values(stream(dataset, 4, transform=transform, seed=1)) != first


def mask_some(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows) * (torch.rand(len(rows)) > 0.5)


def test_a_collate_that_draws_is_refused_where_it_matters() -> None:
    data = stream(Indexed(), 4, collate=mask_some)
    assert values(data) == over_ranks(data, 1)[0]
    with pytest.raises(LayoutError, match=r"collate draws random numbers, .* draw them for each sample"):
        over_ranks(data, 2)
    assert over_ranks(stream(Indexed(), 4), 2)[1] == 0  # the plain one draws none


class Many:
    """torch's convention for several samples at once; from 10 on they draw, and 5 is corrupt."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __len__(self) -> int:
        return SIZE

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.asked.append("many")
        return [self.sample(index) for index in indices]

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append("one")
        return self.sample(index)

    def sample(self, index: int) -> torch.Tensor:
        if index == 5:
            raise OSError("gone")
        return torch.tensor([float(index)]) if index < 10 else torch.rand(1) + index


def test_several_samples_at_once_if_none_draws_or_fails() -> None:
    dataset = Many()
    data = stream(dataset, 4, shuffle=False, on_error="skip")
    found = values(data)
    assert dataset.asked[:8] == ["many", "many", *["one"] * 5, "many"]  # 4, 5 and 6 for it, 6 and 7
    assert set(dataset.asked[8:]) == {"one"}  # 10 drew: from there each sample is seeded for itself
    assert found[:2] == [[[0], [1], [2], [3]], [[4], [6], [6], [7]]]
    assert data.stats.skipped == 1
    for num_ranks in (2, 3):
        fresh = stream(Many(), 4, shuffle=False, on_error="skip")
        assert over_ranks(fresh, num_ranks) == (found, 1)


def test_shuffling_of_an_iterable_stays_in_its_window() -> None:
    found = values(stream(Forward(40), 4, window=8, seed=2))
    for number, pair in enumerate(zip(found[::2], found[1::2], strict=True)):
        assert sorted(itertools.chain(*pair)) == list(range(8 * number, 8 * number + 8))
        lines = [[8 * number + (turn + i) % 8 for i in range(8)] for turn in range(8)]
        runs = [[set(line[start : start + 2]) for start in range(0, 8, 2)] for line in lines]
        assert any([set(both) for both in zip(*pair, strict=True)] == one for one in runs)


def test_other_samples_of_an_iterable_are_left_over_in_each_epoch() -> None:
    data = stream(Forward(10), 4, drop_last=True, window=100)
    left = [frozenset(range(10)) - set(itertools.chain(*values(data))) for _ in range(6)]
    assert {len(one) for one in left} == {2}
    assert len(set(left)) > 2


def test_shards_come_in_a_random_order_and_in_theirs_when_asked() -> None:
    dataset = Sharded()
    data = stream(dataset, 4, window=4)
    for epoch in range(2):
        list(data)
        assert dataset.epoch == epoch
    first, second = dataset.opened[:5], dataset.opened[5:]
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second
    dataset.opened.clear()
    assert list(itertools.chain(*values(stream(dataset, 4, shuffle=False)))) == list(dataset)


def test_an_iterable_has_no_length_and_must_start_anew() -> None:
    data = stream(Forward(), 4)
    with pytest.raises(TypeError, match="a stream of an iterable has no length"):
        len(data)
    assert len(list(data)) == 6  # list() asks for a length
    with pytest.raises(FlowError, match="a generator can be read only once"):
        stream((i for i in range(3)), 2)
    with pytest.raises(FlowError, match="a int is no dataset"):
        stream(5, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FlowError, match="batch_size=4 leaves no batch of 3 samples"):
        list(stream(Forward(3), 4, drop_last=True))


# --- a place to go on from ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["columns", "map", "iterable", "shards", "random iterable"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_resumed_stream_goes_on(name: str, drop_last: bool) -> None:
    data = stream(SOURCES[name](), 4, drop_last=drop_last, window=9)
    expected = values(data) + values(data)
    per_epoch = len(expected) // 2
    for seen in range(len(expected)):
        before = stream(SOURCES[name](), 4, drop_last=drop_last, window=9)
        batches = (batch for _ in range(2) for batch in before)
        assert values(itertools.islice(batches, seen)) == expected[:seen]
        text = json.dumps(before.state_dict())
        assert len(text) < 200
        place = json.loads(text)
        assert (place["epoch"], place["batch"]) == divmod(seen, per_epoch)  # never at an end
        after = stream(SOURCES[name](), 4, drop_last=drop_last, window=9)
        after.load_state_dict(place)
        assert after.state_dict() == before.state_dict()
        num_left = 2 - place["epoch"]
        assert values(batch for _ in range(num_left) for batch in after) == expected[seen:]
        for num_ranks in (2, 3):
            found, _ = over_ranks(after, num_ranks, place["epoch"], place["batch"])
            assert found == expected[seen : per_epoch * (place["epoch"] + 1)]


def test_set_epoch_and_a_restored_place() -> None:
    data = stream(torch.arange(10), 4)
    first, second = values(data), values(data)
    state = {**data.state_dict(), "epoch": 1, "batch": 2}
    data.load_state_dict(state)
    data.set_epoch(1)  # as loops over epochs do
    assert values(data) == second[2:]
    data.load_state_dict(state)
    data.set_epoch(0)
    assert values(data) == first
    data.set_epoch(1)
    assert values(data) == second
    assert data.state_dict()["epoch"] == 2


def test_a_state_of_other_batches_is_refused() -> None:
    state = stream(torch.arange(10), 4).state_dict()
    for other, facts in (
        (stream(torch.arange(10), 5), "batch_size=4, this one has batch_size=5"),
        (stream(torch.arange(11), 4), "num_samples=10, this one has num_samples=11"),
        (stream(torch.arange(10), 4, seed=1), "seed=0, this one has seed=1"),
        (stream(torch.arange(10), 4, shuffle=False), "shuffle=True, this one has shuffle=False"),
    ):
        with pytest.raises(FlowError, match=facts):
            other.load_state_dict(state)
    data = stream(torch.arange(10), 4)
    with pytest.raises(FlowError, match="at batch 3 of an epoch of 3"):
        data.load_state_dict({**state, "batch": 3})
    with pytest.raises(FlowError, match=r"this one has \['epoch'\]"):
        data.load_state_dict({"epoch": 1})
    short = stream(Forward(), 4)
    short.load_state_dict({**short.state_dict(), "batch": 9})
    with pytest.raises(FlowError, match="the saved place is after 9 batches of epoch 0, which has 6"):
        list(short)


def test_an_abandoned_iteration_counts_what_it_delivered() -> None:
    data = stream(torch.arange(10), 4)
    iterator = iter(data)
    assert (data.state_dict()["epoch"], data.state_dict()["batch"]) == (0, 0)
    for _ in range(2):
        next(iterator)
    del iterator
    assert (data.state_dict()["epoch"], data.state_dict()["batch"]) == (0, 2)


def test_stats_count_what_was_delivered() -> None:
    data = stream(Indexed(), 4)
    assert data.stats == (0, 0, 0.0, 0)
    iterator = iter(data)
    for _ in range(6):
        next(iterator)
    assert data.stats[:2] == (6, 23)
    before = data.stats.wait_seconds
    assert before > 0
    list(data)
    assert data.stats[:2] == (12, 46) and data.stats.wait_seconds > before


# --- corrupt samples ---------------------------------------------------------------------------------


def test_a_corrupt_sample_is_named() -> None:
    facts = "sample 6 of the dataset cannot be loaded: OSError: byte 6 is gone; .* on_error='skip'"
    with pytest.raises(FlowError, match=facts) as caught:
        list(stream(Indexed(bad=(6,)), 4, shuffle=False))
    assert isinstance(caught.value.__cause__, OSError)


def fail_at_five(sample: int) -> int:
    if sample == 5:
        raise ValueError("five")
    return sample * 10


@pytest.mark.parametrize("name", ["map", "iterable"])
def test_a_transform_that_fails_is_named(name: str) -> None:
    what = {"map": "of the dataset", "iterable": "of the iterable"}[name]
    with pytest.raises(FlowError, match=f"sample 5 {what} cannot be loaded: ValueError: five"):
        list(stream(SOURCES[name](), 4, transform=fail_at_five))
    found = values(stream(SOURCES[name](), 4, transform=fail_at_five, shuffle=False, on_error="skip"))
    assert found[1] == [40, 60, 60, 70]


def test_a_skipped_sample_is_replaced_by_the_next_of_its_batch() -> None:
    data = stream(Indexed(bad=(1, 5, 6, 7, 22)), 4, shuffle=False, on_error="skip")
    expected = values(data)
    assert expected[0] == [0, 2, 2, 3]
    assert expected[1] == [4, 4, 4, 4]  # around the end of the batch
    assert expected[5] == [20, 21, 20]
    assert data.stats.skipped == 5
    for num_ranks in (1, 2, 3, 4):
        assert over_ranks(data, num_ranks) == (expected, 5)


def test_skipping_in_a_shuffled_stream_is_the_same_on_ranks() -> None:
    bad = (0, 3, 8, 9, 10, 21)
    data = stream(Indexed(bad), 4, seed=4, on_error="skip")
    expected = values(data)
    plain = values(stream(Indexed(), 4, seed=4))
    for found, batch in zip(expected, plain, strict=True):
        good = [x if x not in bad else None for x in batch]
        assert [x for x, y in zip(found, good, strict=True) if y is not None] == [
            x for x in good if x is not None
        ]
        assert set(found) <= set(good)
    for num_ranks in (2, 3):
        assert over_ranks(data, num_ranks) == (expected, len(bad))


def change_in_place(sample: list[int]) -> int:
    sample[0] += 1
    if sample[0] == 3:
        raise ValueError("two")
    return sample[0]


def test_what_stands_in_is_transformed_from_its_own_start() -> None:
    class Lists(IterableDataset):
        def __iter__(self) -> Iterator[list[int]]:
            return ([i] for i in range(4))

    data = stream(Lists(), 4, shuffle=False, transform=change_in_place, on_error="skip")
    assert values(data) == [[1, 2, 4, 4]]


def test_a_batch_of_corrupt_samples_cannot_be_skipped() -> None:
    with pytest.raises(
        FlowError, match="none of the 4 samples of a batch can be loaded, such as sample 0 of"
    ):
        list(stream(Indexed(bad=(0, 1, 2, 3)), 4, shuffle=False, on_error="skip"))


def test_an_iterable_that_fails_says_after_how_many() -> None:
    class Broken(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            raise OSError("no more")

    with pytest.raises(FlowError, match="failed after 5 samples of epoch 0: OSError: no more"):
        list(stream(Broken(), 2, on_error="skip", shuffle=False))


def test_arguments_have_a_meaning() -> None:
    wrong: dict[str, Any]
    for wrong, facts in (
        ({"workers": -1}, "workers=-1: at least 0"),
        ({"prefetch": 0}, "prefetch=0: at least 1"),
        ({"window": 0}, "window=0: at least 1"),
        ({"on_error": "ignore"}, "on_error='ignore' is none of raise, skip"),
    ):
        with pytest.raises(FlowError, match=facts):
            stream(torch.arange(4), 2, **wrong)


def test_columns_with_a_transform_are_samples() -> None:
    data = stream({"x": torch.arange(6)}, 4, shuffle=False, transform=lambda row: row["x"] * 2)
    assert values(data) == [[0, 2, 4, 6], [8, 10]]
