"""Files whose samples are read in blocks: a row group, a stretch of lines, a tar shard."""

from __future__ import annotations

import glob
import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed as dist

from ..errors import FlowError
from ..sbp.layout import chunk_range
from ..tensor import default_placement, device_mesh
from ..tensor.convert import world_size
from .source import Samples

Paths = str | os.PathLike | Sequence[str | os.PathLike]


class Block(NamedTuple):
    """A block: its file, where it starts and stops there (as the format counts), and how many samples."""

    path: str
    start: int
    stop: int
    num_samples: int


class Opened(Protocol):
    """A block that is at hand."""

    def sample(self, row: int) -> Any: ...


class BlockFiles(Samples):
    """Samples of several files, in the order of the files, read by the block.

    A reader keeps the blocks in memory that its part of a window lies in, and no more.
    """

    own_code = False

    def __init__(self, paths: Paths) -> None:
        self.paths = find_files(paths)
        self._counted: list[Block] | None = None
        self._opened: OrderedDict[int, Opened] = OrderedDict()
        self._most = 1

    @abstractmethod
    def count(self, path: str) -> list[Block]:
        """The blocks of a file; reads as little of it as the format allows."""

    @abstractmethod
    def open(self, block: Block) -> Opened:
        """Read or map one block."""

    @property
    def blocks(self) -> list[Block]:
        if self._counted is None:
            self._counted = self._count(self.paths)
        return self._counted

    def _count(self, paths: Sequence[str]) -> list[Block]:
        return [block for path in paths for block in self.count(path) if block.num_samples]

    def count_together(self) -> None:
        """Count the samples, each rank those of a part of the files. Collective if there are several."""
        if self._counted is not None or world_size() == 1:
            return
        device_mesh(default_placement("cpu"))  # joins the ranks
        start, stop = chunk_range(len(self.paths), world_size(), dist.get_rank())
        parts: list[Any] = [None] * world_size()
        dist.all_gather_object(parts, self._try_to_count(self.paths[start:stop]))
        if errors := [part for part in parts if isinstance(part, str)]:
            raise FlowError(errors[0])
        self._counted = [block for part in parts for block in part]

    def _try_to_count(self, paths: Sequence[str]) -> list[Block] | str:
        """The blocks, or the error's text: a rank that raised would leave the others waiting."""
        try:
            return self._count(paths)
        except (OSError, ValueError) as error:
            return str(error)

    @cached_property
    def block_sizes(self) -> np.ndarray:
        """int64, samples of each block."""
        return np.array([block.num_samples for block in self.blocks], dtype=np.int64)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.block_sizes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        return self.sample(range(len(self))[index])

    def keep(self, num_blocks: int) -> None:
        """Have at most so many blocks at hand from now on; the one longest unused goes first."""
        self._most = max(1, num_blocks)

    def sample(self, index: int) -> Any:
        number, row = self._find(index)
        if number not in self._opened:
            while len(self._opened) >= self._most:
                self._opened.popitem(last=False)
            self._opened[number] = self.open(self.blocks[number])
        self._opened.move_to_end(number)
        return self._opened[number].sample(row)

    def at_once(self, indices: list[int], seed: tuple[int, ...]) -> dict[int, Any]:
        return {}  # a block is at hand after its first sample

    def describe(self, index: int) -> str:
        number, row = self._find(index)
        block = self.blocks[number]
        return f"sample {index} ({block.path}, {self.describe_row(block, self._opened.get(number), row)})"

    @abstractmethod
    def describe_row(self, block: Block, opened: Opened | None, row: int) -> str:
        """A sample within its file; `opened` is the block if it could be opened."""

    def _find(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, int(index - (self._ends[number] - self.block_sizes[number]))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_opened": OrderedDict()
        }  # what is open stays with the process that opened it


def find_files(paths: Paths) -> list[str]:
    """The files that paths or patterns name, those of a pattern sorted.

    Raises:
        FlowError: a path or pattern names no file.
    """
    found: list[str] = []
    for one in [paths] if isinstance(paths, str | os.PathLike) else paths:
        text = os.fspath(one)
        matches = filter(os.path.isfile, glob.glob(text, recursive=True))
        here = [text] if Path(text).is_file() else sorted(matches)
        if not here:
            raise FlowError(f"{text!r} names no file")
        found += here
    if not found:
        raise FlowError("no files were given")
    return found
