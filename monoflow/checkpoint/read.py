"""Reading a checkpoint: its index, any box of any tensor, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..errors import CheckpointError
from .arrange import PIECE
from .boxes import Box, describe, extents, meet, num_elements, runs, within
from .files import LocalBytes, RemoteBytes, bytes_at
from .index import INDEX, Entry, Index, Stored, checksum
from .local import bytes_of


class Wanted(NamedTuple):
    """A tensor that is asked for by name."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """Tensors by name, of which any box can be read."""

    @property
    def path(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, Wanted]: ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """Everything that is no tensor."""
        ...

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote it: it may hold the model alone, in another floating dtype."""
        ...

    def text(self, name: str) -> str | None:
        """A small file that belongs to it; None if it has none of that name."""
        ...

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, on the CPU. At most a piece is asked for at once."""
        ...

    def faults(self, names: Iterable[str], share: int, num_shares: int) -> list[str]:
        """What is wrong with the stored bytes of some tensors; looks at one share of them."""
        ...


class Arrays:
    """Tensors whose boxes lie in files as row-major arrays.

    Args:
        path: what errors call it.
    """

    def __init__(self, path: str, files: LocalBytes | RemoteBytes, stored: Mapping[str, Stored]) -> None:
        self.path, self.files, self.stored = path, files, stored
        self.tensors = {name: Wanted(one.shape, one.dtype) for name, one in stored.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        one = self.stored[name]
        if len(one.entries) == 1 and num_elements(box):
            return self._read_entry(one.dtype, one.entries[0], box)
        made = torch.empty(extents(box), dtype=one.dtype)
        for entry in one.entries:
            if (shared := meet(box, entry.box)) is not None:
                made[within(shared, box)] = self._read_entry(one.dtype, entry, shared)
        return made

    def _read_entry(self, dtype: torch.dtype, entry: Entry, box: Box) -> torch.Tensor:
        """A box of an entry, run by run, or a stretch at a time where little lies between runs."""
        starts, length = runs(box, entry.box)
        num_bytes = length * dtype.itemsize
        made = np.empty((len(starts), num_bytes), dtype=np.uint8)
        begins = starts * dtype.itemsize + entry.offset
        step = self._runs_at_once(begins, num_bytes)
        for first in range(0, len(starts), step):
            some = begins[first : first + step]
            begin, end = int(some[0]), int(some[-1]) + num_bytes
            if len(some) == 1:
                self.files.read_into(entry.file, begin, made[first].data)
                continue
            stretch = np.empty(end - begin, dtype=np.uint8)
            self.files.read_into(entry.file, begin, stretch.data)
            for number, start in enumerate((some - begin).tolist(), first):
                made[number] = stretch[start : start + num_bytes]
        return torch.from_numpy(made.reshape(-1)).view(dtype).view(extents(box))

    def _runs_at_once(self, begins: np.ndarray, num_bytes: int) -> int:
        """How many runs to read as one stretch of the file."""
        if len(begins) < 2:
            return 1
        gap = int(np.max(np.diff(begins)))
        return 1 if gap - num_bytes > self.files.detour else max(1, (PIECE - num_bytes) // gap + 1)


def some_of(names: list[str], most: int = 5) -> str:
    """The first few of some names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Checkpoint(Arrays):
    """A checkpoint that monoflow wrote.

    Args:
        path: a directory or an fsspec URL.

    Raises:
        CheckpointError: there is none, or its index is damaged or of another version.
    """

    is_foreign = False

    def __init__(self, path: str | Path) -> None:
        files = bytes_at(path)
        size = files.size(INDEX)
        if size is None:
            raise CheckpointError(f"{path} is no checkpoint: it has no {INDEX}")
        self.index = Index.parse(bytes(files.read(INDEX, 0, size)), f"{path}/{INDEX}")
        self.meta = self.index.meta
        super().__init__(str(path), files, self.index.tensors)

    def text(self, name: str) -> str | None:
        """A small file; None if the checkpoint has none of that name."""
        if name not in self.index.files:
            return None
        return bytes(self.files.read(name, 0, self.index.files[name].size)).decode()

    # --- verifying ---------------------------------------------------------------------------------

    def faults(self, names: Iterable[str], share: int = 0, num_shares: int = 1) -> list[str]:
        """What is wrong with files and stored bytes; empty if nothing is.

        Args:
            names: the tensors to look at.
            share, num_shares: which part of the bytes is read; sizes and heads are looked at in share 0.
        """
        stored = {name: self.stored[name] for name in names}
        found = list(self._file_faults(stored)) if share == 0 else []
        every = [
            (name, entry, piece)
            for name, one in stored.items()
            for entry in one.entries
            for piece in entry.pieces
        ]
        for number, (name, entry, piece) in enumerate(every):
            if number % num_shares == share and self._is_there(name, entry):
                data = bytes_of(self._read_entry(stored[name].dtype, entry, piece.box))
                if (got := checksum(data)) != piece.checksum:
                    where = describe(piece.box, stored[name].shape)
                    found.append(
                        f"{self.path}/{entry.file}: {name}{where} is damaged: its checksum is {got}, "
                        f"{piece.checksum} was written"
                    )
        return found

    def _is_there(self, name: str, entry: Entry) -> bool:
        size = self.files.size(entry.file)
        return size is not None and size >= entry.offset + self._entry_bytes(name, entry)

    def _entry_bytes(self, name: str, entry: Entry) -> int:
        return num_elements(entry.box) * self.stored[name].dtype.itemsize

    def _file_faults(self, stored: Mapping[str, Stored]) -> Iterator[str]:
        """Files that are missing, short or begin wrongly, and what is lost with them."""
        for file, info in self.index.files.items():
            inside = [(name, e) for name, one in stored.items() for e in one.entries if e.file == file]
            if not inside and info.head < info.size:
                continue
            size = self.files.size(file)
            if size is None:
                lost = [name for name, _ in inside]
                yield f"{self.path}/{file} is missing" + f"; it holds {some_of(lost)}" * bool(lost)
            elif size != info.size:
                lost = [name for name, e in inside if e.offset + self._entry_bytes(name, e) > size]
                yield (
                    f"{self.path}/{file} has {size:,} bytes, {info.size:,} were written"
                    + f"; {some_of(lost)} lost" * bool(lost)
                )
            elif checksum(self.files.read(file, 0, info.head)) != info.checksum:
                yield f"{self.path}/{file} is damaged in its first {info.head:,} bytes"
        for name, one in stored.items():
            covered = sum(num_elements(piece.box) for entry in one.entries for piece in entry.pieces)
            if covered != math.prod(one.shape):
                yield f"{self.path}/{INDEX} has {covered} of the {math.prod(one.shape)} elements of {name}"
