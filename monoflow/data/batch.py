"""The samples of one global batch, of which a reader loads its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import FlowError, LayoutError
from .parts import Recipe, Share
from .randomness import draws, generators_kept, seed_generators


@dataclass(frozen=True)
class Batch:
    """One global batch.

    Attributes:
        ids: the numbers of its samples, in the order of its rows.
        fetch, describe: a sample by its number, and where it comes from.
        fetch_many: several at once by number, as far as that can be done, after seeding so.
        own_code: whether that is the user's code, which may draw random numbers.
    """

    ids: list[int]
    fetch: Callable[[int], Any]
    describe: Callable[[int], str]
    recipe: Recipe
    epoch: int
    own_code: bool = False
    fetch_many: Callable[[list[int], tuple[int, ...]], dict[int, Any]] | None = None
    _fetched: dict[int, Any] = field(default_factory=dict)

    def part(self, start: int, stop: int, share: Share) -> tuple[Any, int]:
        """Rows start:stop, collated, and how many were skipped. No rows have the structure of some."""
        if start < stop:
            return self._rows(range(start, stop), share)
        if not share.is_first_of_batch:
            return None, 0
        one, _ = self._rows(range(1), share)  # the structure of an empty part is that of any sample
        return pytree.tree_map_only(torch.Tensor, lambda x: x[:0], one), 0

    def _rows(self, rows: range, share: Share) -> tuple[Any, int]:
        with generators_kept():
            if self.fetch_many is not None:
                numbers = [self.ids[row] for row in rows]
                self._fetched.update(self.fetch_many(numbers, self._seed(numbers[0], 3)))
            found = [self._row(row) for row in rows]
            batch = self._collate([sample for sample, _ in found], share)
        check_collated(batch, len(found))
        return batch, sum(skipped for _, skipped in found)

    def _collate(self, samples: list[Any], share: Share) -> Any:
        seed = self._seed(self.ids[0], 2)
        seed_generators(*seed)
        batch = self.recipe.collate(samples)
        if not share.has_whole_batches and draws(seed):
            raise LayoutError(
                "collate draws random numbers, which would depend on the number of ranks and workers: draw "
                "them for each sample, in the dataset or in transform="
            )
        return batch

    def _seed(self, number: int, purpose: int) -> tuple[int, ...]:
        return self.recipe.seed, self.epoch, number, purpose

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
            seed_generators(*self._seed(number, 1))
        # Given away: a sample that stands in for another is fetched anew, as a transform may change it.
        sample = self._fetched.pop(number) if number in self._fetched else self.fetch(number)
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
