"""Orders: bijections proven by hand, windows with the guarantees that docs/data.md states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monoflow.data import order
from monoflow.data.order import FullShuffle, InOrder, WindowShuffle, permutation
from monoflow.data.permute import bijection, make_key, mix, mix_one


def test_a_bijection_of_every_small_size() -> None:
    for size in range(1, 130):
        for key in (0, 1, make_key(size, 7)):
            assert sorted(bijection(np.arange(size), size, key).tolist()) == list(range(size))


@settings(max_examples=10, deadline=None)
@given(size=st.integers(1, 200_000), key=st.integers(0, 2**64 - 1))
def test_a_bijection_of_any_size(size: int, key: int) -> None:
    assert np.array_equal(np.sort(bijection(np.arange(size), size, key)), np.arange(size))


def test_a_bijection_too_large_to_hold() -> None:
    size = 3 * 10**11 + 7
    values = np.concatenate([np.arange(20_000), size - 1 - np.arange(20_000)])
    found = bijection(values, size, 5)
    assert len(set(found.tolist())) == len(values)
    assert found.min() >= 0 and found.max() < size
    assert np.array_equal(found[7:9], bijection(values[7:9], size, 5))  # element by element


def test_its_places_are_even_and_unrelated() -> None:
    """Chi-squared of where values land and of steps between neighbours; keys are fixed."""
    size, keys = 12, np.array([make_key(k) for k in range(6000)], dtype=np.uint64)
    first, second = (bijection(np.full(6000, value), size, keys) for value in (3, 4))
    for counts in (np.bincount(first, minlength=12), np.bincount((second - first) % size, minlength=12)[1:]):
        expected = 6000 / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < 31.3  # the 0.1 % point of 11 degrees of freedom
    pairs = np.unique(np.stack([first, second]), axis=1)
    assert pairs.shape[1] == 12 * 11


def test_mix_is_splitmix64() -> None:
    """The first outputs of the reference generator (Vigna, splitmix64.c) from seed 1234567."""
    states = np.array([1234567, 1234567 + 0x9E3779B97F4A7C15], dtype=np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973]
    assert [mix_one(int(state)) for state in states] == mix(states).tolist()


def test_small_data_keep_the_order_of_recorded_curves() -> None:
    generator = torch.Generator().manual_seed((3 * 0x9E3779B97F4A7C15 + 2) % 2**63)
    expected = torch.randperm(10, generator=generator)
    found = np.concatenate([FullShuffle(10, 4, seed=3, epoch=2).batch(i) for i in range(3)])
    assert found.tolist() == expected.tolist()


def test_large_data_hold_no_permutation() -> None:
    full = FullShuffle(10**9, 1000, seed=1, epoch=0)
    assert permutation(10**9, 1, 0).held is None
    batches = [full.batch(i) for i in (0, 1, 999_999)]
    assert len(set(np.concatenate(batches).tolist())) == 3000
    other = FullShuffle(10**9, 1000, seed=1, epoch=1).batch(0)
    assert not np.array_equal(batches[0], other)


def test_computed_and_held_orders_both_have_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MAX_HELD", 5)
    found = np.concatenate([FullShuffle(11, 4, seed=0, epoch=0).batch(i) for i in range(3)])
    assert permutation(11, 0, 0).held is None
    assert sorted(found.tolist()) == list(range(11))


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(blocks=sizes, batch_size=st.integers(1, 7), num_batches=st.integers(1, 5), epoch=st.integers(0, 3))
def test_windows_have_every_sample_once(
    blocks: list[int], batch_size: int, num_batches: int, epoch: int
) -> None:
    shuffle = WindowShuffle(np.array(blocks), batch_size, num_batches, seed=0, epoch=epoch)
    found = [shuffle.batch(i) for i in range(-(-sum(blocks) // batch_size))]
    assert [len(one) for one in found[:-1]] == [batch_size] * (len(found) - 1)
    assert sorted(np.concatenate(found).tolist()) == list(range(sum(blocks)))


def line_of(shuffle: WindowShuffle) -> list[int]:
    """The samples in the order of the blocks, turned: what the windows are cut from."""
    starts = np.cumsum(shuffle.block_sizes) - shuffle.block_sizes
    line = [starts[b] + row for b in shuffle.blocks for row in range(shuffle.block_sizes[b])]
    return [int(x) for x in line[shuffle.turn :] + line[: shuffle.turn]]


def test_a_batch_has_one_sample_of_each_run_of_its_window() -> None:
    shuffle = WindowShuffle(np.array([5, 7, 6, 9, 8]), batch_size=4, num_batches=3, seed=1, epoch=0)
    line = line_of(shuffle)
    assert sorted(line) == list(range(35))
    for index in range(8):  # windows of 3, 3 and 2 batches, then 3 samples
        first, count = index - index % 3, 3 if index < 6 else 2
        window = line[first * 4 : (first + count) * 4]
        for row, sample in enumerate(shuffle.batch(index).tolist()):
            assert sample in window[row * count : (row + 1) * count]
    assert shuffle.batch(8).tolist() == line[32:]


@settings(max_examples=60, deadline=None)
@given(blocks=sizes, batch_size=st.integers(1, 6), num_batches=st.integers(1, 4), num_ranks=st.integers(1, 3))
def test_a_reader_keeps_the_blocks_of_its_stretch(
    blocks: list[int], batch_size: int, num_batches: int, num_ranks: int
) -> None:
    """Counted by hand: the blocks of all samples that its rows of a window take."""
    shuffle = WindowShuffle(np.array(blocks), batch_size, num_batches, seed=0, epoch=0)
    owner = np.repeat(np.arange(len(blocks)), blocks)
    num_full = sum(blocks) // batch_size
    rows = batch_size // num_ranks
    for first in range(0, num_full, num_batches):
        for start in range(0, batch_size - rows + 1, max(1, rows)):
            batches = range(first, min(first + num_batches, num_full))
            taken = np.concatenate([shuffle.batch(i)[start : start + rows] for i in batches])
            used = len(np.unique(owner[taken]))
            assert used <= shuffle.num_blocks(first, start, start + rows) <= used + 1  # a block turned apart


def test_orders_differ_by_seed_and_epoch() -> None:
    def samples(seed: int, epoch: int) -> list[int]:
        shuffle = WindowShuffle(np.full(6, 4), 3, 2, seed, epoch)
        return np.concatenate([shuffle.batch(i) for i in range(8)]).tolist()

    assert samples(0, 0) == samples(0, 0)
    assert len({tuple(samples(s, e)) for s in range(3) for e in range(3)}) == 9


def test_the_last_small_batch_has_other_samples_each_epoch() -> None:
    last = [tuple(WindowShuffle(np.array([10]), 4, 2, 0, epoch).batch(2)) for epoch in range(6)]
    assert len(set(last)) > 2


def test_the_order_of_the_dataset() -> None:
    plain = InOrder(10, 4, np.array([3, 3, 4]))
    assert [plain.batch(i).tolist() for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [plain.num_blocks(i, 0, 2) for i in range(3)] == [1, 1, 1]
    assert plain.num_blocks(1, 1, 4) == 2
