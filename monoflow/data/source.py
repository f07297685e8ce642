"""What a stream reads: columns, samples by index, files of blocks, or an iterable that only runs forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..errors import FlowError
from .order import permutation
from .randomness import draws, seed_generators


@runtime_checkable
class MapDataset(Protocol):
    """Anything with a length and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Column = torch.Tensor | np.ndarray
Dataset = Column | Mapping[str, Column] | MapDataset | Iterable[Any]


class Columns(ABC):
    """Rows that are read many at a time; nothing is collated, and every rank knows the shapes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, indices: np.ndarray) -> Any:
        """The rows of these samples, a tensor or a mapping of tensors, samples along dim 0."""

    def __getitem__(self, index: int) -> Any:
        rows = self.rows(np.array([range(len(self))[index]]))
        return rows[0] if isinstance(rows, torch.Tensor) else {name: row[0] for name, row in rows.items()}


class MemoryColumns(Columns):
    """A tensor or array, or a mapping of them; arrays may be memory-mapped."""

    def __init__(self, data: Column | Mapping[str, Column]) -> None:
        self.data = data
        sizes = {name: len(one) for name, one in data.items()} if isinstance(data, Mapping) else {}
        if len(set(sizes.values())) > 1 or (isinstance(data, Mapping) and not sizes):
            raise FlowError(f"every column of a dataset has the same number of samples; these have {sizes}")
        self.size = next(iter(sizes.values())) if sizes else len(data)

    def __len__(self) -> int:
        return self.size

    def rows(self, indices: np.ndarray) -> Any:
        if isinstance(self.data, Mapping):
            return {name: _take(column, indices) for name, column in self.data.items()}
        return _take(self.data, indices)


def _take(column: Column, indices: np.ndarray) -> torch.Tensor:
    if isinstance(column, torch.Tensor):
        return column[torch.from_numpy(indices)]
    return torch.from_numpy(np.ascontiguousarray(column[indices]))


class Samples:
    """Samples by index. User code: `own_code` says that it may draw random numbers."""

    own_code = True

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset
        self._draws = False

    def __len__(self) -> int:
        return len(self.dataset)

    def sample(self, index: int) -> Any:
        return self.dataset[index]

    def at_once(self, indices: list[int], seed: tuple[int, ...]) -> dict[int, Any]:
        """The samples by torch's convention for several (Hugging Face has it), after seeding so.

        None if there is no such way, if one is corrupt, or if they draw random numbers: those are for each
        sample alone, whatever the others are.
        """
        many = getattr(self.dataset, "__getitems__", None)
        if many is None or self._draws:
            return {}
        seed_generators(*seed)
        try:
            samples = many(indices)
        except Exception:  # it is met again, for one sample
            return {}
        self._draws = draws(seed)
        return {} if self._draws else dict(zip(indices, samples, strict=True))

    def describe(self, index: int) -> str:
        """Where a sample comes from, for an error."""
        return f"sample {index} of the dataset"


class Sequence:
    """An iterable, read from its start in every epoch; its shards, if it has any, in a random order.

    Shards are what Hugging Face calls so: `num_shards` of them, `shard(num_shards=, index=)` each.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset

    def iterate(self, seed: int, epoch: int, shuffle: bool) -> Iterator[Any]:
        """The samples of an epoch, in an order that depends on the arguments alone."""
        dataset: Any = self.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if not shuffle or not _has_shards(dataset):
            yield from dataset
            return
        num_shards = dataset.num_shards
        for index in permutation(num_shards, seed, epoch).at(np.arange(num_shards)).tolist():
            yield from dataset.shard(num_shards=num_shards, index=index)


def _has_shards(dataset: Any) -> bool:
    return callable(getattr(dataset, "shard", None)) and getattr(dataset, "num_shards", 0) > 1


def as_source(dataset: Dataset) -> Columns | Samples | Sequence:
    """What kind of data this is.

    Raises:
        FlowError: it is none, its columns have different lengths, or it can be read only once.
    """
    if isinstance(dataset, Columns | Samples):
        return dataset
    if isinstance(dataset, torch.Tensor | np.ndarray | Mapping):
        return MemoryColumns(dataset)
    if isinstance(dataset, IterableDataset):  # torch gives them a __getitem__ that raises
        return Sequence(dataset)
    if isinstance(dataset, MapDataset):
        return Samples(dataset)
    if isinstance(dataset, Iterator):
        raise FlowError(
            f"a {type(dataset).__name__} can be read only once, and every epoch reads the data again: "
            f"pass an object whose __iter__ starts anew"
        )
    if isinstance(dataset, Iterable):
        return Sequence(dataset)
    raise FlowError(
        f"a {type(dataset).__name__} is no dataset: it has neither len() and [index], nor __iter__"
    )
