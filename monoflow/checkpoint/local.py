"""A checkpoint's directory on a file system that all ranks see.

It is written beside its place, `NAME.tmp-LABEL`, made durable, and renamed. One that it replaces is first
renamed to `NAME.old-LABEL`; whoever opens the checkpoint after a crash in between takes that back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..errors import CheckpointError
from .arrange import PIECE, Arrangement, Write, in_whole_files
from .boxes import runs
from .held import Held
from .index import INDEX, Piece, checksum

_TMP, _OLD = ".tmp-", ".old-"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's bytes in row-major order; its very memory where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


class LocalTarget:
    """Writes one checkpoint to a directory.

    Args:
        label: what tells the temporary directory of this save from others.
    """

    def __init__(self, path: str, label: str) -> None:
        self.path = Path(path)
        self.label = label
        self.aside = self.path.with_name(f"{self.path.name}{_TMP}{label}")

    def arrange(self, files: Mapping[str, Mapping[str, Held]], ranks: Sequence[int]) -> Arrangement:
        return in_whole_files(files, ranks, PIECE)

    # --- the first rank ----------------------------------------------------------------------------

    def begin(self, arrangement: Arrangement) -> None:
        """Makes the files at their full sizes: a disk that is full says so here."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        recover(self.path)
        if self.path.exists() and not (self.path / INDEX).exists() and not _is_empty(self.path):
            raise CheckpointError(f"{self.path} exists and is no checkpoint; it is not replaced")
        clean(self.path)
        self.aside.mkdir()
        for file, size in arrangement.sizes.items():
            with _named(self.aside / file), open(self.aside / file, "wb") as out:
                out.write(arrangement.heads[file])
                out.flush()
                _reserve(out.fileno(), size)
                os.fsync(out.fileno())

    def finish(self, texts: Mapping[str, bytes]) -> None:
        """Writes what is left, the index last, makes all durable and puts it in its place."""
        for name, text in texts.items():
            with _named(self.aside / name), open(self.aside / name, "wb") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
        _sync_directory(self.aside)
        old = self.path.with_name(f"{self.path.name}{_OLD}{self.label}")
        if self.path.exists():
            os.rename(self.path, old)
        os.rename(self.aside, self.path)
        _sync_directory(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Removes what was written aside."""
        shutil.rmtree(self.aside, ignore_errors=True)

    # --- every rank --------------------------------------------------------------------------------

    def write(
        self, arrangement: Arrangement, pieces: Iterable[tuple[Write, torch.Tensor]]
    ) -> list[tuple[Write, Piece]]:
        """Writes a rank's boxes into their byte ranges and makes them durable; returns their checksums."""
        written = []
        with contextlib.ExitStack() as stack:
            opened: dict[str, int] = {}
            for write, tensor in pieces:
                entry = arrangement.entries[write.name][write.entry]
                with _named(self.aside / entry.file, write.name):
                    if entry.file not in opened:
                        opened[entry.file] = os.open(self.aside / entry.file, os.O_WRONLY)
                        stack.callback(os.close, opened[entry.file])
                    data = bytes_of(tensor)
                    starts, length = runs(write.box, entry.box)
                    _write_runs(opened[entry.file], data, starts, length, entry.offset, tensor.itemsize)
                    written.append((write, Piece(write.box, checksum(data))))
            for file, descriptor in opened.items():
                with _named(self.aside / file):
                    os.fsync(descriptor)
        return written


def _write_runs(
    descriptor: int, data: memoryview, starts: np.ndarray, length: int, offset: int, itemsize: int
) -> None:
    num_bytes = length * itemsize
    for number, at in enumerate((starts * itemsize + offset).tolist()):
        left = data[number * num_bytes : (number + 1) * num_bytes]
        while left:
            count = os.pwrite(descriptor, left, at)
            left, at = left[count:], at + count


def _reserve(descriptor: int, size: int) -> None:
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.ftruncate(descriptor, size)  # a file system that cannot reserve


@contextlib.contextmanager
def _named(path: Path, tensor: str = ""):
    """Within: an error of the file system says which file and tensor it is about."""
    try:
        yield
    except OSError as error:
        about = f" ({tensor})" if tensor else ""
        hint = "; every rank must see this directory" if isinstance(error, FileNotFoundError) else ""
        raise CheckpointError(f"{path}{about} cannot be written: {error.strerror or error}{hint}") from error


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover(path: Path) -> None:
    """Takes back a checkpoint that was being replaced when its job died."""
    if path.exists():
        return
    for old in sorted(path.parent.glob(f"{path.name}{_OLD}*")):
        if (old / INDEX).exists():
            os.rename(old, path)
            return


def clean(path: Path) -> None:
    """Removes what interrupted saves of `path` left."""
    for mark in (_TMP, _OLD):
        for left in path.parent.glob(f"{path.name}{mark}*"):
            shutil.rmtree(left, ignore_errors=True)
