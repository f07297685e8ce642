"""The global order of an epoch: which samples each global batch holds. No rank or worker appears here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from .permute import bijection, make_key, mix

#: Up to here a permutation is held (torch.randperm, 32 MB at most), which keeps the order of recorded loss
#: curves; above it is computed.
MAX_HELD = 1 << 22


def permutation(size: int, seed: int, epoch: int) -> Permutation:
    """The order of `size` things in an epoch."""
    held = None
    if size <= MAX_HELD:
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
        held = torch.randperm(size, generator=generator).numpy()
    return Permutation(size, make_key(seed, epoch), held)


@dataclass(frozen=True)
class Permutation:
    """A permutation of range(size), held or computed."""

    size: int
    key: int
    held: np.ndarray | None

    def at(self, places: np.ndarray) -> np.ndarray:
        """The things at some places, int64."""
        return bijection(places, self.size, self.key) if self.held is None else self.held[places]


class Order(Protocol):
    """Global batches of an epoch."""

    def batch(self, index: int) -> np.ndarray:
        """The samples of a global batch, int64, in the order of its rows."""
        ...

    def num_blocks(self, index: int, start: int, stop: int) -> int:
        """How many blocks are in use while rows start:stop of batch `index` and of its neighbours load."""
        ...


@dataclass(frozen=True)
class InOrder:
    """The samples as the dataset has them. `block_sizes` matters for what is kept in memory alone."""

    num_samples: int
    batch_size: int
    block_sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def batch(self, index: int) -> np.ndarray:
        start = index * self.batch_size
        return np.arange(start, min(start + self.batch_size, self.num_samples))

    @cached_property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.block_sizes)

    def num_blocks(self, index: int, start: int, stop: int) -> int:
        first = index * self.batch_size
        return _blocks_between(self.ends, first + start, first + stop)


@dataclass(frozen=True)
class FullShuffle:
    """Every order of all samples: for data of which any sample is as near as any other."""

    num_samples: int
    batch_size: int
    seed: int
    epoch: int

    @cached_property
    def samples(self) -> Permutation:
        return permutation(self.num_samples, self.seed, self.epoch)

    def batch(self, index: int) -> np.ndarray:
        start = index * self.batch_size
        return self.samples.at(np.arange(start, min(start + self.batch_size, self.num_samples)))

    def num_blocks(self, index: int, start: int, stop: int) -> int:
        return 0


@dataclass(frozen=True)
class WindowShuffle:
    """Blocks in a random order, and samples shuffled within windows of that.

    The blocks are put one after the other in a random order, and that line is turned by a random number of
    samples. Each window of `num_batches` batches is cut into batch_size runs of num_batches samples; each
    batch takes one sample, at random, of each run, in the order of the runs. So whoever loads a part of the
    rows reads one stretch of the window. The samples that fill no batch make the last one.
    """

    block_sizes: np.ndarray
    batch_size: int
    num_batches: int
    seed: int
    epoch: int

    @cached_property
    def blocks(self) -> np.ndarray:
        return permutation(len(self.block_sizes), self.seed, self.epoch).at(np.arange(len(self.block_sizes)))

    @cached_property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.block_sizes[self.blocks])

    @cached_property
    def starts_of_blocks(self) -> np.ndarray:
        return np.cumsum(self.block_sizes) - self.block_sizes

    @cached_property
    def num_samples(self) -> int:
        return int(self.block_sizes.sum())

    @cached_property
    def turn(self) -> int:
        return make_key(self.seed, self.epoch, -1) % self.num_samples

    def batch(self, index: int) -> np.ndarray:
        first, count = self._window(index)
        if count:
            key = make_key(self.seed, self.epoch, first)
            places = first * self.batch_size + one_of_each_run(index - first, count, self.batch_size, key)
        else:
            places = np.arange(index * self.batch_size, self.num_samples)
        places = (places + self.turn) % self.num_samples
        turn = np.searchsorted(self.ends, places, side="right")
        blocks = self.blocks[turn]
        return self.starts_of_blocks[blocks] + places - (self.ends[turn] - self.block_sizes[blocks])

    def num_blocks(self, index: int, start: int, stop: int) -> int:
        first, count = self._window(index)
        run = count or 1  # places that lie between a row of a batch and the next one
        begin = (first * self.batch_size + start * run + self.turn) % self.num_samples
        end = begin + (stop - start) * run
        around = max(0, end - self.num_samples)
        return _blocks_between(self.ends, begin, end - around) + _blocks_between(self.ends, 0, around)

    def _window(self, index: int) -> tuple[int, int]:
        """The first batch of the window of a batch, and how many that has; 0 for the last, small batch."""
        num_full = self.num_samples // self.batch_size
        if index >= num_full:
            return index, 0
        first = index - index % self.num_batches
        return first, min(self.num_batches, num_full - first)


def one_of_each_run(batch: int, num_batches: int, batch_size: int, key: int) -> np.ndarray:
    """The places within a window that one of its batches takes: one of each of batch_size equal runs.

    Args:
        batch: which of the window's `num_batches` batches.
        key: that of the window.

    Returns:
        int64[batch_size], ascending; over all batches each place of the window once.
    """
    runs = np.arange(batch_size)
    keys = mix(runs.astype(np.uint64) + np.uint64(key))
    return runs * num_batches + bijection(np.full(batch_size, batch), num_batches, keys)


def _blocks_between(ends: np.ndarray, start: int, stop: int) -> int:
    """How many blocks samples start:stop lie in, `ends` being where each block ends."""
    if stop <= start or not len(ends):
        return 0
    first, last = np.searchsorted(ends, [start, stop - 1], side="right")
    return int(last - first) + 1
