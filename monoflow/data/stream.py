"""Global batches: the same samples in the same order on any number of ranks and workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from ..errors import FlowError
from ..log import SOURCE, Wait, tell
from ..tensor import default_placement, device_mesh, from_local
from ..tensor.convert import world_size
from .blocks import BlockFiles
from .load import read
from .parts import OnError, Part, Recipe, Share
from .source import Columns, Dataset, Samples, Sequence, as_source
from .workers import deaths_named, join_rows, pin, read_in_workers


class StreamStats(NamedTuple):
    """What a stream has delivered since it was made.

    Attributes:
        batches: how many.
        samples: of all ranks together.
        wait_seconds: for how long whoever iterates waited for them.
        skipped: corrupt samples among the rows of this rank.
    """

    batches: int = 0
    samples: int = 0
    wait_seconds: float = 0.0
    skipped: int = 0


class Stream:
    """See `stream`. Each iteration is one epoch; `epoch` is the number of the next one.

    Attributes:
        stats: what was delivered so far, and how long that took.
        num_samples: of an epoch; None for an iterable.
    """

    def __init__(
        self,
        source: Columns | Samples | Sequence,
        recipe: Recipe,
        num_workers: int,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        self.source, self.recipe = source, recipe
        self.num_workers, self.prefetch, self.pin_memory = num_workers, prefetch, pin_memory
        self.num_samples = None if isinstance(source, Sequence) else len(source)
        self.epoch, self.stats = 0, StreamStats()
        self._first = 0  # batch of the next epoch to begin with
        self._place = (0, 0)  # epoch and batch that come next

    def __len__(self) -> int:
        if self.num_samples is None:
            raise TypeError("a stream of an iterable has no length: it ends where the iterable does")
        return self.recipe.num_batches(self.num_samples)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the given epoch: its order depends on (seed, epoch) alone.

        The epoch that `load_state_dict` has just set is begun where it says; any other at its start.
        """
        if epoch != self.epoch:
            self.epoch, self._first = epoch, 0
        self._place = (self.epoch, self._first)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, for JSON: after the batches that were delivered (not those made ahead)."""
        epoch, batch = self._place
        return {"epoch": epoch, "batch": batch, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where `state` was taken, on any number of ranks and workers.

        Raises:
            FlowError: it is of a stream with other batches; the message names both values.
        """
        if set(state) != {"epoch", "batch", "order"}:
            raise FlowError(f"a stream's state has epoch, batch and order; this one has {sorted(state)}")
        ours, theirs = self._order(), state["order"]
        if differing := [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
            name = differing[0]
            raise FlowError(
                f"the state is of a stream with {name}={theirs.get(name)}, this one has {name}="
                f"{ours.get(name)}: its batches hold other samples, so none can be said to be seen"
            )
        if self.num_samples is not None and not 0 <= state["batch"] < len(self):
            raise FlowError(f"the state is at batch {state['batch']} of an epoch of {len(self)}")
        self.epoch, self._first = state["epoch"], state["batch"]
        self._place = (self.epoch, self._first)

    def _order(self) -> dict[str, Any]:
        """What the global batches depend on, besides the data."""
        recipe = self.recipe
        in_windows = recipe.shuffle and isinstance(self.source, BlockFiles | Sequence)
        return {
            "num_samples": self.num_samples,
            "batch_size": recipe.batch_size,
            "shuffle": recipe.shuffle,
            "seed": recipe.seed,
            "drop_last": recipe.drop_last,
            "window_batches": recipe.window_batches if in_windows else None,
        }

    def __iter__(self) -> Iterator[Any]:
        epoch, index = self.epoch, self._first
        self.epoch, self._first = epoch + 1, 0
        asked = time.perf_counter_ns()
        with deaths_named(), closing(self._parts(epoch, index)) as parts:
            for part in parts:
                batch = self._globalize(part)
                index += 1
                self._place = (epoch + 1, 0) if part.is_last else (epoch, index)
                self._count(part, asked, time.perf_counter_ns())
                yield batch
                asked = time.perf_counter_ns()

    def _count(self, part: Part, asked: int, came: int) -> None:
        stats = self.stats
        tell(Wait(SOURCE, "flow.stream", stats.batches, asked, came))
        self.stats = StreamStats(
            stats.batches + 1,
            stats.samples + part.num_samples,
            stats.wait_seconds + (came - asked) / 1e9,
            stats.skipped + part.num_skipped,
        )

    def _parts(self, epoch: int, first: int) -> Generator[Part, None, None]:
        """This rank's parts of the batches."""
        workers = self.num_workers
        by_rows = isinstance(self.source, BlockFiles) and workers > 1
        share = Share(_join(), world_size(), 0, max(1, workers), by_rows)
        one_reader = partial(_read_share, self.source, self.recipe, epoch, first, share)
        if not workers:
            parts = one_reader(0)
        elif by_rows:
            pieces = read_in_workers(one_reader, workers, self.prefetch, False)
            parts = map(join_rows, map(list, zip(*[pieces] * workers, strict=True)))
        else:
            ahead = -(-self.prefetch // workers)
            in_turn = partial(_read_in_turn, one_reader, first, workers)
            yield from read_in_workers(in_turn, workers, ahead, self.pin_memory)
            return
        for part in parts:
            yield part._replace(rows=pin(part.rows)) if self.pin_memory else part

    def _globalize(self, part: Part) -> Any:
        if world_size() == 1:
            return part.rows
        if isinstance(self.source, Columns):  # every rank knows the shapes
            return pytree.tree_map_only(torch.Tensor, lambda x: _global(x, part.num_samples), part.rows)
        return from_local(part.rows, "S(0)")  # compares what the ranks' collate made


def _join() -> int:
    """This process's rank, joined to the others if there are any."""
    if world_size() == 1:
        return 0
    device_mesh(default_placement("cpu"))
    return dist.get_rank()


def _read_share(
    source: Columns | Samples | Sequence, recipe: Recipe, epoch: int, first: int, share: Share, worker: int
) -> Iterator[Part]:
    return read(source, recipe, epoch, first, share.of_worker(worker))


def _read_in_turn(
    one_reader: Callable[[int], Iterator[Part]], first: int, num_workers: int, worker: int
) -> Iterator[Part]:
    """The loader asks worker 0 first, whoever has the first batch."""
    return one_reader((first + worker) % num_workers)


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
    *,
    transform: Callable[[Any], Any] | None = None,
    workers: int = 0,
    prefetch: int = 2,
    window: int = 2048,
    on_error: OnError = "raise",
    pin_memory: bool | None = None,
) -> Stream:
    """Iterate a dataset in global batches; iterating again is the next epoch, in another order.

    In a job of several ranks each loads only its rows and the batch holds global tensors, split along
    dim 0; in one process it holds plain tensors. The samples and their order are the same, and so is what a
    dataset or `transform` draws from torch's, NumPy's or Python's global generators. Every rank makes the
    stream with the same arguments; files are counted together then. See docs/data.md.

    Args:
        dataset: a tensor or array, a mapping of them (samples along dim 0), anything with len() and [index],
            files (`flow.data.tokens`, `parquet`, `arrow`, `text`, `webdataset`), or an iterable that starts
            anew each time, such as a torch or Hugging Face IterableDataset.
        batch_size: samples of a global batch, over all ranks together.
        shuffle: whether the order is drawn from (seed, epoch), or that of the dataset.
        drop_last: whether a last, smaller batch is left out (it has another shape, so a step captures twice).
        collate: makes a batch from a list of samples; every tensor has the samples along dim 0, and
            its other sizes do not depend on which samples they are. It draws no random numbers, unless there
            is one rank. Not called for columns and tokens.
        transform: makes a sample from a sample, before collate; called for a reader's own rows alone.
        workers: processes of this rank that load; 0 loads when the batch is asked for. They start and end
            with each iteration.
        prefetch: batches that workers make ahead (a multiple of their number, where each makes whole ones).
        window: samples among which files other than tokens, and iterables, are shuffled; they are shuffled
            by block and shard besides. Rounded down to whole batches.
        on_error: "raise" names the sample that cannot be loaded; "skip" loads the next one of the same global
            batch in its place and counts it in `stats`.
        pin_memory: whether batches come in page-locked memory; if there is an accelerator, when left out.

    Raises:
        FlowError: there is no batch to make, columns have different lengths, or an argument has no meaning;
            while iterating, if a sample cannot be loaded.
        LayoutError: while iterating, if collate breaks its promise.
        RunError: while iterating, if a worker died.
    """
    if batch_size < 1:
        raise FlowError(f"batch_size={batch_size}: a global batch holds at least one sample")
    for name, value, least in (("workers", workers, 0), ("prefetch", prefetch, 1), ("window", window, 1)):
        if value < least:
            raise FlowError(f"{name}={value}: at least {least}")
    if on_error not in get_args(OnError):
        raise FlowError(f"on_error={on_error!r} is none of {', '.join(get_args(OnError))}")
    source = as_source(dataset)
    if isinstance(source, Columns) and transform is not None:
        source = Samples(source)
    if isinstance(source, BlockFiles):
        source.count_together()
    recipe = Recipe(batch_size, shuffle, seed, drop_last, window, collate, transform, on_error)
    if not isinstance(source, Sequence) and not recipe.num_batches(len(source)):
        raise FlowError(f"batch_size={batch_size} leaves no batch of {len(source)} samples")
    pin_memory = torch.accelerator.is_available() if pin_memory is None else pin_memory
    return Stream(source, recipe, workers, prefetch, pin_memory)
