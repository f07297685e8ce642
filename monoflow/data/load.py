"""What one reader does: its rows of its batches, in order. A reader is a rank, or a worker of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from ..errors import FlowError
from .batch import Batch
from .blocks import BlockFiles
from .order import FullShuffle, InOrder, Order, WindowShuffle, one_of_each_run
from .parts import Part, Recipe, Share
from .permute import make_key
from .randomness import generators_kept, seed_generators
from .source import Columns, Samples, Sequence


def read(
    source: Columns | Samples | Sequence, recipe: Recipe, epoch: int, first: int, share: Share
) -> Iterator[Part]:
    """The parts of a reader from batch `first` of an epoch on.

    Raises:
        FlowError: a sample is corrupt and on_error is "raise", or a batch has no sample that is not.
        LayoutError: collate breaks its promise.
    """
    if isinstance(source, Sequence):
        return _read_forward(source, recipe, epoch, first, share)
    return _read_by_index(source, recipe, epoch, first, share)


def make_order(source: Columns | Samples, recipe: Recipe, epoch: int) -> Order:
    """The order of an epoch. Blocks are shuffled as such: reading one for a single sample would be waste."""
    blocks = isinstance(source, BlockFiles)
    if not recipe.shuffle:
        sizes = source.block_sizes if blocks else np.zeros(0, dtype=np.int64)
        return InOrder(len(source), recipe.batch_size, sizes)
    if blocks:
        return WindowShuffle(source.block_sizes, recipe.batch_size, recipe.window_batches, recipe.seed, epoch)
    return FullShuffle(len(source), recipe.batch_size, recipe.seed, epoch)


def _read_by_index(
    source: Columns | Samples, recipe: Recipe, epoch: int, first: int, share: Share
) -> Iterator[Part]:
    order, num_batches = make_order(source, recipe, epoch), recipe.num_batches(len(source))
    for index in filter(share.has_batch, range(first, num_batches)):
        ids = order.batch(index)
        start, stop = share.rows(len(ids))
        if isinstance(source, Columns):
            rows, num_skipped = source.rows(ids[start:stop]), 0
        else:
            if isinstance(source, BlockFiles):
                source.keep(order.num_blocks(index, start, stop))
            batch = Batch(
                ids.tolist(), source.sample, source.describe, recipe, epoch, source.own_code, source.at_once
            )
            rows, num_skipped = batch.part(start, stop, share)
        yield Part(rows, len(ids), num_skipped, index == num_batches - 1)


def _read_forward(source: Sequence, recipe: Recipe, epoch: int, first: int, share: Share) -> Iterator[Part]:
    """Every reader runs over all samples, holds a window of them, and makes its own rows of each batch."""
    per_window = recipe.window_batches if recipe.shuffle else 1
    num_needed = recipe.batch_size if recipe.drop_last else 1  # for there to be another batch
    samples = _numbered(source, recipe, epoch)
    window = _take(samples, per_window * recipe.batch_size)
    done = 0
    while num_batches := recipe.num_batches(len(window)):
        ahead = _take(samples, num_needed)
        is_last_window = len(ahead) < num_needed
        fetch = partial(_from_window, dict(window), recipe.on_error == "skip")
        for index in range(num_batches):
            if done + index < first or not share.has_batch(done + index):
                continue
            places = _places(recipe, len(window), index, make_key(recipe.seed, epoch, done))
            ids = [window[place][0] for place in places.tolist()]
            batch = Batch(ids, fetch, _describe, recipe, epoch)
            rows, num_skipped = batch.part(*share.rows(len(ids)), share)
            yield Part(rows, len(ids), num_skipped, is_last_window and index == num_batches - 1)
        done += num_batches
        window = ahead + _take(samples, per_window * recipe.batch_size - len(ahead))
    if done <= first:
        raise FlowError(
            f"batch_size={recipe.batch_size} leaves no batch of {len(window)} samples"
            if not first
            else f"the saved place is after {first} batches of epoch {epoch}, which has {done}: other data?"
        )


def _places(recipe: Recipe, num_samples: int, index: int, key: int) -> np.ndarray:
    """The places within a window of which batch `index` of it is made."""
    num_full = num_samples // recipe.batch_size
    if index < num_full and recipe.shuffle:
        places = one_of_each_run(index, num_full, recipe.batch_size, key)
    else:
        places = np.arange(index * recipe.batch_size, min((index + 1) * recipe.batch_size, num_samples))
    turn = key % num_samples if recipe.shuffle else 0  # else the last batch always had the last samples
    return (places + turn) % num_samples


def _take(samples: Iterator[tuple[int, Any]], count: int) -> list[tuple[int, Any]]:
    with generators_kept():
        return list(itertools.islice(samples, count))


def _numbered(source: Sequence, recipe: Recipe, epoch: int) -> Iterator[tuple[int, Any]]:
    """The samples of an epoch with their numbers; what the iterable draws depends on these alone."""
    samples = source.iterate(recipe.seed, epoch, recipe.shuffle)
    for number in itertools.count():
        seed_generators(recipe.seed, epoch, number, 0)
        try:
            sample = next(samples)
        except StopIteration:
            return
        except Exception as error:
            raise FlowError(
                f"the iterable failed after {number} samples of epoch {epoch}: {type(error).__name__}: "
                f"{error}; it ends there, so nothing after can be skipped to. Put what may fail in transform="
            ) from error
        yield number, sample


def _from_window(held: dict[int, Any], copies: bool, number: int) -> Any:
    """A sample; a copy if it may stand in for another one too: a transform may change it in place."""
    return deepcopy(held[number]) if copies else held[number]


def _describe(number: int) -> str:
    return f"sample {number} of the iterable"
