"""How the samples of an epoch become batches, and which part of them is one reader's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..sbp.layout import chunk_range

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
    def has_whole_batches(self) -> bool:
        return self.num_ranks == 1 and not (self.by_rows and self.num_workers > 1)

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
