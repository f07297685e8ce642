"""Global batches of a map-style dataset: the same samples in the same order on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from ..errors import FlowError, LayoutError
from ..sbp.layout import chunk_range
from ..tensor import default_placement, device_mesh, from_local
from ..tensor.convert import world_size


class MapDataset(Sized, Protocol):
    """Anything with a length and samples by index."""

    def __getitem__(self, index: int, /) -> Any: ...


Dataset = torch.Tensor | Mapping[str, torch.Tensor] | MapDataset


class Stream:
    """See `stream`. Each iteration is one epoch; `epoch` is the number of the next one."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.shuffle, self.seed, self.drop_last, self.collate = shuffle, seed, drop_last, collate
        self.num_samples = _num_samples(dataset)
        self.epoch = 0
        if batch_size < 1:
            raise FlowError(f"batch_size={batch_size}: a global batch holds at least one sample")
        if not len(self):
            raise FlowError(f"batch_size={batch_size} leaves no batch of {self.num_samples} samples")

    def __len__(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (0 if self.drop_last or not rest else 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch: its order depends on (seed, epoch) alone."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = self._order(self.epoch)
        self.epoch += 1
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield self._batch(order[start : start + self.batch_size])

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator)

    def _batch(self, indices: torch.Tensor) -> Any:
        """The global batch of these samples, of which this rank loads its chunk."""
        if world_size() == 1:
            return self._load(indices)
        device_mesh(default_placement("cpu"))  # joins the ranks
        start, stop = chunk_range(len(indices), world_size(), dist.get_rank())
        if isinstance(self.dataset, torch.Tensor | Mapping):
            part = self._load(indices[start:stop])
            return pytree.tree_map_only(torch.Tensor, lambda x: _global(x, len(indices)), part)
        if start == stop:  # the structure of an empty part is that of any sample
            part = pytree.tree_map_only(torch.Tensor, lambda x: x[:0], self._load(indices[:1]))
        else:
            part = self._load(indices[start:stop])
        return from_local(part, "S(0)")  # compares what the ranks' collate made

    def _load(self, indices: torch.Tensor) -> Any:
        dataset = self.dataset
        if isinstance(dataset, torch.Tensor):
            return dataset[indices]
        if isinstance(dataset, Mapping):
            return {name: column[indices] for name, column in dataset.items()}
        batch = self.collate([dataset[index] for index in indices.tolist()])
        _check_collated(batch, len(indices))
        return batch


def _num_samples(dataset: Dataset) -> int:
    if not isinstance(dataset, Mapping):
        return len(dataset)
    sizes = {name: len(column) for name, column in dataset.items()}
    if len(set(sizes.values())) != 1:
        raise FlowError(f"every column of a dataset has the same number of samples; these have {sizes}")
    return next(iter(sizes.values()))


def _check_collated(batch: Any, num_samples: int) -> None:
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


def _global(part: torch.Tensor, num_samples: int) -> DTensor:
    shape = torch.Size((num_samples, *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh = device_mesh(default_placement(part.device.type))
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def stream(
    dataset: Dataset,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Stream:
    """Iterate a dataset in global batches; iterating again is the next epoch, in another order.

    In a job of several ranks each loads only its rows and the batch holds global tensors, split along
    dim 0; in one process it holds plain tensors. The samples and their order are the same.

    Args:
        dataset: a tensor, a mapping of tensors (samples along dim 0), or anything with len() and [index].
        batch_size: samples of a global batch, over all ranks together.
        shuffle: whether the order is drawn from (seed, epoch), or that of the dataset.
        drop_last: whether a last, smaller batch is left out (it has another shape, so a step captures twice).
        collate: makes a batch from a list of samples; every tensor has the samples along dim 0, and
            its other sizes do not depend on which samples they are.

    Raises:
        FlowError: there is no batch to make, or columns have different lengths.
        LayoutError: while iterating, if collate breaks its promise.
    """
    return Stream(dataset, batch_size, shuffle, seed, drop_last, collate)
