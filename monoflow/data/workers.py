"""Readers in worker processes, under torch's loader.

The only file of this part that touches torch's private names.
"""

from __future__ import annotations

import contextlib
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..errors import FlowError, LayoutError, RunError
from .parts import Part

_DIED = re.compile(r"DataLoader worker \(pid")


def read_in_workers(
    read: Callable[[int], Iterator[Part]], num_workers: int, prefetch: int, pin_memory: bool
) -> Iterator[Part]:
    """What the workers read, one part of each in turn. They end when this iterator is closed or dropped.

    Args:
        read: the parts of a worker, by its number.
        prefetch: parts that each worker may make ahead.
        pin_memory: whether tensors come in page-locked memory.

    Raises:
        FlowError, LayoutError: what `read` raises, with the worker's traceback as a note.
        RuntimeError: a worker died; `deaths_named` makes a RunError of it.
    """
    loader = DataLoader(
        _InWorker(read),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        prefetch_factor=prefetch,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else the loader draws from the model's generator
    )
    for part in loader:
        if isinstance(part, _Failure):
            raise part.error()
        yield part


@contextlib.contextmanager
def deaths_named() -> Iterator[None]:
    """Within: torch's word that a worker died, which a signal may bring at any line, becomes a RunError."""
    try:
        yield
    except RuntimeError as error:
        if not _DIED.search(str(error)):
            raise
        raise RunError(
            f"a worker of the stream died: {error} (out of memory: fewer workers=, a smaller prefetch=; or a "
            f"crash in what the dataset calls: try workers=0)"
        ) from error


def join_rows(parts: list[Part]) -> Part:
    """One part of those that workers read of the same batch.

    Raises:
        LayoutError: their collate gave different structures, dtypes or sizes.
    """
    rows = [part.rows for part in parts if part.rows is not None]
    if len(rows) > 1:
        rows = [_cat(rows)]
    return parts[0]._replace(rows=rows[0], num_skipped=sum(part.num_skipped for part in parts))


def pin(rows: Any) -> Any:
    """The same with CPU tensors in page-locked memory, from which an accelerator copies while it computes."""
    on_cpu = lambda x: isinstance(x, torch.Tensor) and x.device.type == "cpu"  # noqa: E731
    return pytree.tree_map(lambda x: x.pin_memory() if on_cpu(x) else x, rows)


def _cat(rows: list[Any]) -> Any:
    leaves, specs = zip(*(pytree.tree_flatten(one) for one in rows), strict=True)
    made = [_describe(one) for one in leaves]
    for spec, one in zip(specs, made, strict=True):
        if spec != specs[0] or one != made[0]:
            raise LayoutError(
                f"collate made {made[0]} in {specs[0]} of some rows of a batch, {one} in {spec} of others; "
                f"only the number of samples along dim 0 may differ (pad to a fixed length)"
            )
    joined = [None if same[0] is None else torch.cat(same) for same in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(joined, specs[0])


def _describe(leaves: list[torch.Tensor | None]) -> list[str]:
    return [
        "None" if one is None else f"{str(one.dtype).removeprefix('torch.')}{['n', *one.shape[1:]]}"
        for one in leaves
    ]


class _Failure(NamedTuple):
    """An error on its way out of a worker. torch's own way would bury its message in a traceback."""

    kind: type[FlowError]
    text: str
    trace: str

    def error(self) -> FlowError:
        error = self.kind(self.text)
        error.add_note(f"in a worker of the stream:\n{self.trace}")
        return error


class _InWorker(IterableDataset):
    def __init__(self, read: Callable[[int], Iterator[Part]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Part | _Failure]:
        info = get_worker_info()
        assert info is not None, "read in a worker only"
        # Datasets that see a worker take their own share, which would depend on how many there are.
        torch_worker._worker_info = None
        # Ctrl-C reaches the whole group: it is for the main process, which ends this one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield from self.read(info.id)
        except FlowError as error:
            yield _Failure(type(error), str(error), traceback.format_exc())


def _as_it_is(part: Any) -> Any:
    return part
