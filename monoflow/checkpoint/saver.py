"""Saving while training goes on: a copy is taken between two steps, and a thread writes it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from .group import Group, first_does
from .write import Contents, Snapshot, prepare, write

T = TypeVar("T")

_NICENESS = 10  # of the writer: the step's own threads go first where there are few cores
#: Of a writer that has time: cores, caches and memory are the step's.
REST = 10.0


class Saver:
    """Writes checkpoints, at most one at a time. All ranks of `group` make the same calls.

    An error of the writer surfaces at the next call, on all ranks.

    Args:
        rest: how many times as long as it worked on a piece the writer rests, while nobody waits.
    """

    def __init__(self, group: Group, rest: float = REST) -> None:
        self.group, self._rest = group, rest
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._memory: torch.Tensor | None = None
        self._hurry = threading.Event()  # somebody waits for the writer
        #: The checkpoint that was put in its place last.
        self.newest: str | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way here."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_bytes(self) -> int:
        """Host memory that this rank's copies take; the same memory for one after the other."""
        return 0 if self._memory is None else self._memory.numel()

    def save(self, path: str | Path, contents: Contents, then: Callable[[], None] = lambda: None) -> None:
        """Writes while the caller reads on; the live state may be changed only after it returned.

        Raises:
            CheckpointError: this save failed, or one before; the checkpoint that was there is as it was.
        """
        self.wait()
        self._write(prepare(path, contents, self.group), then)

    def start(self, path: str | Path, contents: Contents, then: Callable[[], None] = lambda: None) -> None:
        """Copies this rank's share and returns; a thread writes it. Waits first for a save under way.

        Args:
            then: called by the first rank's thread when the checkpoint is in its place.

        Raises:
            CheckpointError: a save before failed.
        """
        self.wait()
        snapshot = prepare(path, contents, self.group)
        try:
            self._memory = snapshot.copy_to_host(self._memory)
        except Exception as error:  # no memory: the others' writers are waiting to be told
            snapshot.pieces = _failed(error)
        self._hurry.clear()
        snapshot.pieces = self._at_ease(snapshot.pieces)
        self._thread = threading.Thread(
            target=self._write_aside, args=(snapshot, then), name="checkpoint writer"
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits for a save under way. Raises what it raised."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _at_ease(self, pieces: Iterable[T]) -> Iterator[T]:
        """Pieces to write, with a rest after each until somebody waits."""
        for piece in pieces:
            start = time.thread_time()
            yield piece
            self._hurry.wait(self._rest * (time.thread_time() - start))

    def _write_aside(self, snapshot: Snapshot, then: Callable[[], None]) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not every system has it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._write(snapshot, then)
        except BaseException as error:
            self._error = error

    def _write(self, snapshot: Snapshot, then: Callable[[], None]) -> None:
        write(snapshot)
        self.newest = str(snapshot.target.path)
        first_does(self.group, then)


def _failed(error: Exception) -> Iterator[Any]:
    """Pieces that cannot be had."""
    raise error
    yield
