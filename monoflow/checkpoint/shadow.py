"""Snapshots in the memory of a host, between the checkpoints on disk: what a job goes on from when ranks die.

They are checkpoints like any other, checksums and all, in a folder that the launcher owns: it outlives the
ranks. At most two are there, one of them being written. Where memory is short there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from ..log import stage_logger
from .every import Every
from .group import Group, group_of
from .index import checksum
from .saver import Saver
from .series import path_of, prune
from .write import Contents


def folder_of(root: str, folder: str) -> str:
    """Where the snapshots are that belong to the checkpoints of a folder."""
    return f"{root}/{checksum(str(Path(folder).absolute()).encode())}"


class Shadow:
    """Saves snapshots; like a checkpointer, but what goes wrong ends it and not the job.

    Args:
        folder: in memory.
        group: ranks that save together, which nobody else talks through. Collective if there are several.
        every: how often.
    """

    def __init__(self, folder: str, group: Group, every: Every) -> None:
        self.folder, self.every = folder, every
        self._saver = Saver(group, rest=0.0)  # what is not there yet is lost
        self._asking = group_of(group.ranks)  # a writer talks through the other, at a time of its own
        self._last = time.monotonic()
        self._is_on = True

    def is_late(self) -> bool:
        """Whether it is time for one, by this rank's clock."""
        seconds = self.every.seconds
        return self._is_on and seconds is not None and time.monotonic() - self._last >= seconds

    def is_due(self, number: int) -> bool:
        """Whether it is time for one, by the number of steps."""
        return self._is_on and self.every.steps is not None and number % self.every.steps == 0

    def save(self, number: int, contents: Callable[[], Contents]) -> None:
        """Takes a snapshot between two steps, unless one is still being written. Every rank calls it."""
        if not self._is_on:
            return
        try:
            if any(self._asking.gather(self._saver.is_writing)):
                return
            self._saver.start(
                path_of(self.folder, number), contents(), lambda: prune(self.folder, number, keep_last=1)
            )
        except CheckpointError as error:
            self._end(error)
        self._last = time.monotonic()

    def wait(self) -> None:
        """Waits for one that is being written."""
        try:
            self._saver.wait()
        except CheckpointError as error:
            self._end(error)

    def _end(self, error: CheckpointError) -> None:
        self._is_on = False
        stage_logger("runtime").warning("no more snapshots in memory: %s", error)
