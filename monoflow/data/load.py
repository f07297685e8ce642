"""What one reader does: its rows of its batches, in order. A reader is a rank, or a worker of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..errors import FlowError, LayoutError
from ..sbp.layout import chunk_range
from .blocks import BlockFiles
from .order import FullShuffle, InOrder, Order, WindowShuffle, one_of_each_run
from .permute import make_key
from .randomness import generators_kept, seed_generators
from .source import Columns, Samples, Sequence

OnError = Literal["raise", "skip"]


@dataclass(frozen=True)
class Recipe:
    """How samples become global batches: the same on every rank and worker. See `stream`."""

    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    window: int
    collate: Callable[[list[Any]], Any]
    transform: Callable[[Any], Any] | None
    on_error: OnError

    @property
    def window_batches(self) -> int:
        """Batches of a window; a window holds whole batches."""
        return max(1, self.window // self.batch_size)

    def num_batches(self, num_samples: int) -> int:
        whole, rest = divmod(num_samples, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)


@dataclass(frozen=True)
class Share:
    """Which part of the work is one reader's.

    Attributes:
        rank, num_ranks: a rank has a chunk of the rows of every batch.
        worker, num_workers: of the rank.
        by_rows: whether its workers share the rows of every batch (then each reads its own blocks only), or
            take whole batches in turn.
    """

    rank: int = 0
    num_ranks: int = 1
    worker: int = 0
    num_workers: int = 1
    by_rows: bool = False

    def of_worker(self, worker: int) -> Share:
        return replace(self, worker=worker)

    def has_batch(self, index: int) -> bool:
        return self.by_rows or index % self.num_workers == self.worker

    def rows(self, batch_size: int) -> tuple[int, int]:
        """The rows of a global batch of so many, start and stop."""
        start, stop = chunk_range(batch_size, self.num_ranks, self.rank)
        if not self.by_rows:
            return start, stop
        first, last = chunk_range(stop - start, self.num_workers, self.worker)
        return start + first, start + last

    @property
    def is_first_of_batch(self) -> bool:
        """Whether this worker shows what an empty part of its rank looks like."""
        return not self.by_rows or self.worker == 0


class Part(NamedTuple):
    """A reader's rows of a global batch.

    Attributes:
        rows: tensors in a nested container; None if other workers of the rank have all of its rows.
        num_samples: of the global batch.
        num_skipped: rows here whose own sample was corrupt.
        is_last: whether it is the last batch of the epoch.
    """

    rows: Any
    num_samples: int
    num_skipped: int
    is_last: bool


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
            batch = _Batch(ids.tolist(), source.sample, source.describe, source.own_code, recipe, epoch)
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
            batch = _Batch(ids, fetch, _describe, False, recipe, epoch)
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


@dataclass(frozen=True)
class _Batch:
    """The samples of one global batch, of which some rows are loaded."""

    ids: list[int]
    fetch: Callable[[int], Any]
    describe: Callable[[int], str]
    own_code: bool
    recipe: Recipe
    epoch: int

    def part(self, start: int, stop: int, share: Share) -> tuple[Any, int]:
        """Rows start:stop, collated, and how many were skipped. No rows have the structure of some."""
        if start < stop:
            return self._rows(range(start, stop))
        if not share.is_first_of_batch:
            return None, 0
        one, _ = self._rows(range(1))  # the structure of an empty part is that of any sample
        return pytree.tree_map_only(torch.Tensor, lambda x: x[:0], one), 0

    def _rows(self, rows: range) -> tuple[Any, int]:
        with generators_kept():
            found = [self._row(row) for row in rows]
            seed_generators(self.recipe.seed, self.epoch, self.ids[0], 2)
            batch = self.recipe.collate([sample for sample, _ in found])
        check_collated(batch, len(found))
        return batch, sum(skipped for _, skipped in found)

    def _row(self, row: int) -> tuple[Any, bool]:
        """The sample of a row; for a corrupt one, that of the next row of the global batch that is not."""
        last: Exception | None = None
        for step in range(len(self.ids)):
            number = self.ids[(row + step) % len(self.ids)]
            try:
                return self._sample(number), step > 0
            except Exception as error:
                if self.recipe.on_error == "raise":
                    raise FlowError(
                        f"{self.describe(number)} cannot be loaded: {type(error).__name__}: {error}; mend or "
                        f"remove it, or leave it out with on_error='skip'"
                    ) from error
                last = error
        raise FlowError(
            f"none of the {len(self.ids)} samples of a batch can be loaded, such as "
            f"{self.describe(self.ids[row])}; the last one failed with {type(last).__name__}: {last}"
        ) from last

    def _sample(self, number: int) -> Any:
        transform = self.recipe.transform
        if self.own_code or transform is not None:
            seed_generators(self.recipe.seed, self.epoch, number, 1)
        sample = self.fetch(number)
        return sample if transform is None else transform(sample)


def check_collated(batch: Any, num_samples: int) -> None:
    """Raises LayoutError unless every leaf is a tensor with `num_samples` along dim 0 (or None)."""
    for path, leaf in pytree.tree_leaves_with_path(batch):
        name = f"batch{pytree.keystr(path)}"
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() == 0 or leaf.shape[0] != num_samples:
                raise LayoutError(
                    f"{name} has shape {tuple(leaf.shape)} for {num_samples} samples: collate must put "
                    f"samples along dim 0, so that ranks can hold them apart"
                )
        elif leaf is not None:
            raise LayoutError(
                f"{name} is a {type(leaf).__name__}, not a tensor; leave it out in the dataset or collate"
            )
