"""When to save: every so many steps or minutes, and when the job is asked to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..log import stage_logger
from .every import Every
from .group import Group, Joined, first_does, gloo_group
from .saver import Saver
from .series import opened, path_of, prune
from .shadow import Shadow
from .write import Contents

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Seconds in which two SIGTERM are one: a scheduler may tell ranks and the launcher, which tells them too.
_ONE_REQUEST = 5.0


class _Ballot:
    """What the ranks want, counted while the next step runs: all get the answer one call later."""

    def __init__(self, group: Group) -> None:
        self._group = gloo_group(group.ranks) if isinstance(group, Joined) else None
        self._cast: tuple[torch.Tensor, Any] | None = None

    def cast(self, signum: int, is_due: bool, is_snapshot_due: bool) -> None:
        votes = torch.tensor([signum, int(is_due), int(is_snapshot_due)])
        work = None
        if self._group is not None:
            work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._cast = votes, work

    def result(self) -> tuple[int, bool, bool]:
        """The largest signal, and whether a save and a snapshot are due, of the votes cast last."""
        if self._cast is None:
            return 0, False, False
        votes, work = self._cast
        self._cast = None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise CheckpointError(f"this rank lost touch with the others: {error}") from error
        signum, is_due, is_snapshot_due = votes.tolist()
        return signum, bool(is_due), bool(is_snapshot_due)


class Checkpointer:
    """Saves a series of checkpoints in a directory; see `flow.checkpointer`.

    Args:
        contents: what to save, asked for between two steps.
        number: the number of steps that were taken.
        shadow: takes snapshots in between, if there is one.
    """

    def __init__(
        self,
        folder: str | Path,
        contents: Callable[[], Contents],
        number: Callable[[], int],
        group: Group,
        *,
        every: int | str | None,
        keep_last: int | None,
        on_signal: bool,
        asynchronous: bool,
        shadow: Shadow | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(f"keep_last={keep_last}: at least the newest checkpoint is kept")
        self.folder = str(folder)
        self.every, self.keep_last, self.asynchronous = Every(every), keep_last, asynchronous
        self._contents, self._number = contents, number
        self._group, self._saver, self._shadow = group, Saver(group), shadow
        self._saved_at = -1
        self._last = time.monotonic()
        self._signum, self._signalled = 0, 0.0
        self._previous: dict[int, Any] = {}
        votes = on_signal or self.every.seconds is not None or shadow is not None
        self._ballot = _Ballot(group) if votes else None
        self._newest = first_does(group, lambda: opened(self.folder))
        if on_signal and threading.current_thread() is threading.main_thread():
            self._previous = {one: signal.signal(one, self._on_signal) for one in _SIGNALS}

    @property
    def latest(self) -> str | None:
        """The path of the newest complete checkpoint, the same on every rank."""
        return self._saver.newest or self._newest

    @property
    def saver(self) -> Saver:
        """What writes."""
        return self._saver

    def after_step(self) -> bool:
        """To be called by every rank after each step; saves if it is time to. Returns whether it did.

        Raises:
            CheckpointError: a save failed.
            SystemExit, KeyboardInterrupt: after saving, when a rank got SIGTERM or SIGINT.
        """
        signum, is_due, is_snapshot_due = (
            self._ballot.result() if self._ballot is not None else (0, False, False)
        )
        if signum:
            self._save_and_stop(signum)
        number = self._number()
        is_due |= self.every.steps is not None and number % self.every.steps == 0
        is_due &= number != self._saved_at  # the step was refused, and sent back to where it was saved
        if is_due:
            self.save()
        elif self._shadow is not None and (is_snapshot_due or self._shadow.is_due(number)):
            self._shadow.save(number, self._contents)
        if self._ballot is not None:
            seconds = self.every.seconds
            late = seconds is not None and time.monotonic() - self._last >= seconds
            is_first = self._group.rank == self._group.ranks[0]
            snapshot_late = self._shadow is not None and self._shadow.is_late()
            self._ballot.cast(self._signum, late and is_first, snapshot_late and is_first)
        return is_due

    def save(self, wait: bool = False) -> str:
        """Saves now, between two steps; every rank calls it. Returns the path.

        Args:
            wait: return only when the checkpoint is in its place.
        """
        number = self._saved_at = self._number()
        path = path_of(self.folder, number)
        act = self._saver.start if self.asynchronous and not wait else self._saver.save
        act(path, self._contents(), lambda: prune(self.folder, number, self.keep_last))
        self._last = time.monotonic()
        return path

    def wait(self) -> None:
        """Waits for a save and a snapshot under way. Raises CheckpointError if the save failed."""
        if self._shadow is not None:
            self._shadow.wait()
        self._saver.wait()

    def close(self) -> None:
        """Waits for a save under way, and gives SIGTERM and SIGINT back. Every rank calls it.

        If a signal came after the last step, that is saved too, and the signal raised.
        """
        self._restore()
        self.wait()
        if self._ballot is None:
            return
        self._ballot.result()
        if signum := max(self._group.gather(self._signum)):
            self._save_and_stop(signum)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self._restore()
        try:
            self.wait()
        except CheckpointError as other:
            if error is not None:
                error.add_note(f"besides, a checkpoint was not saved: {other}")

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self._signum:
            self._signum, self._signalled = signum, time.monotonic()
        elif signum != signal.SIGTERM or time.monotonic() - self._signalled > _ONE_REQUEST:
            self._restore()  # it does what it did before
            signal.raise_signal(signum)

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _save_and_stop(self, signum: int) -> NoReturn:
        try:
            self._saver.wait()
        except CheckpointError as error:  # this is the last chance: it must not keep from saving now
            stage_logger("runtime").warning("a checkpoint was not saved: %s", error)
        self.save(wait=True)
        self._restore()
        self._signum = 0
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)
