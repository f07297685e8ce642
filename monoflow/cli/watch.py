"""Whether ranks are alive, and where they stand: each has a file that it touches every second.

A rank whose file is left alone for as long as the watchdog waits is taken for hung: it was stopped, or holds
the interpreter's lock for good. One that sleeps still touches its file, but others wait for it, and no step
ends: then those that do not wait are the ones. One whose main thread computes meanwhile is not. Where a rank
stands is what its `faulthandler` writes when it gets a signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..runtime.signs import ASK, PULSE, STACKS

_ANSWER = 2.0  # seconds that a rank has to say where it stands
_BUSY = 0.01  # of a core: a main thread that uses as much computes
_TICKS = os.sysconf("SC_CLK_TCK")
_PACKAGE = str(Path(__file__).parents[1])
#: Files in whose functions a rank waits for others.
_WAITING = ("distributed/distributed_c10d.py", "runtime/lanes.py")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Stand(NamedTuple):
    """Where a rank stands.

    Attributes:
        waits: whether it waits for other ranks.
    """

    text: str
    waits: bool


class Process(NamedTuple):
    """What the system says of a rank.

    Attributes:
        state: the letter of its state; "" for none that is there, "?" where the system does not say.
        seconds: of a processor that its main thread has used.
    """

    state: str
    seconds: float = 0.0

    @property
    def is_there(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ("", "Z", "X")


def process(pid: int) -> Process:
    """A rank that this process started; its number may be another's when it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(") ")[2].split()
        if int(fields[1]) != os.getpid():
            return Process("")
        return Process(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS)
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return Process("?")
    return Process("")


def steps(pid: int, folder: Path) -> int:
    """How many steps of a rank of this host are over since it was started."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"{pid}{PULSE}").read_text() or 0)
    return 0


class _Since(NamedTuple):
    """A moment, and what a rank's main thread had used of a processor then."""

    moment: float
    seconds: float

    def idle(self, now: float, used: float) -> float:
        """Seconds since then; 0 if it computed."""
        passed = now - self.moment
        return passed if used - self.seconds < _BUSY * passed else 0.0


class Hung(NamedTuple):
    """Ranks that are to be killed.

    Attributes:
        why: what they did.
        stands: where the ranks stand, also others.
    """

    ranks: frozenset[int]
    why: str
    stands: dict[int, Stand]


class Watch:
    """Looks again and again whether the ranks of this host live.

    What is measured is when this process saw something change, by a clock that nobody sets.

    Args:
        folder: in which ranks give signs of life.
        patience: seconds without one after which a rank is taken for hung; 0 for no end.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        self.begin()

    def begin(self) -> None:
        """The ranks are started, for the first time or again."""
        self._signs: dict[int, tuple[int, _Since]] = {}
        self._taken: dict[int, int] = {}
        self._since: dict[int, _Since] = {}  # so many steps were over, or their ranks were busy
        self._told: frozenset[int] = frozenset()

    def look(self, pids: Mapping[int, int], now: float) -> Hung | None:
        """Which ranks hang, if some do that were not named before.

        Args:
            pids: by rank.
            now: seconds, as `time.monotonic`.
        """
        found = {rank: process(pid) for rank, pid in pids.items()}
        there = {rank: one.seconds for rank, one in found.items() if one.is_there}
        self._note(pids, there, now)
        hung = self._silent(there, now) or self._waited_for(pids, there, now) if self.patience else None
        if hung is None or not hung.ranks - self._told:
            return None
        self._told |= hung.ranks
        return hung._replace(stands=hung.stands or stands(pids, self.folder))

    def _note(self, pids: Mapping[int, int], there: Mapping[int, float], now: float) -> None:
        for rank, used in there.items():
            with contextlib.suppress(OSError):  # it has not begun to
                beat = (self.folder / f"{pids[rank]}{PULSE}").stat().st_mtime_ns
                if rank not in self._signs or self._signs[rank][0] != beat:
                    self._signs[rank] = beat, _Since(now, used)
        taken = {rank: steps(pid, self.folder) for rank, pid in pids.items()}
        if self._taken != taken:
            self._taken, self._since = taken, {rank: _Since(now, used) for rank, used in there.items()}

    def _silent(self, there: Mapping[int, float], now: float) -> Hung | None:
        """Those that gave no sign of life."""
        silent = {}
        for rank, (beat, since) in self._signs.items():
            if rank in there and now - since.moment >= self.patience:
                if idle := since.idle(now, there[rank]):
                    silent[rank] = idle
                else:
                    self._signs[rank] = beat, _Since(now, there[rank])
        if not silent:
            return None
        return Hung(frozenset(silent), f"gave no sign of life for {max(silent.values()):.0f} s", {})

    def _waited_for(self, pids: Mapping[int, int], there: Mapping[int, float], now: float) -> Hung | None:
        """Those for which others wait while no step ends."""
        first = min((since.moment for since in self._since.values()), default=now)
        if not any(self._taken.values()) or now - first < self.patience:
            return None
        found = stands(pids, self.folder)
        since, self._since = self._since, {rank: _Since(now, used) for rank, used in there.items()}
        if not any(one.waits for one in found.values()):
            return None
        own = {rank for rank, one in found.items() if not one.waits}
        idle = {rank for rank in own if rank in since and since[rank].idle(now, there[rank])}
        ranks = frozenset(idle if own else found)
        return Hung(ranks, f"kept the others waiting for {self.patience:.0f} s", found) if ranks else None


def stands(pids: Mapping[int, int], folder: Path) -> dict[int, Stand]:
    """Where ranks stand that are still there.

    Args:
        pids: by rank. Those that are stopped are made to go on, for which they have no time left.
    """
    found = {rank: process(pid) for rank, pid in pids.items()}
    asked: dict[int, int] = {}
    for rank, pid in pids.items():
        if found[rank].is_there and (folder / f"{pid}{STACKS}").exists():
            with contextlib.suppress(OSError):
                os.truncate(folder / f"{pid}{STACKS}", 0)
                os.kill(pid, ASK)
                os.kill(pid, signal.SIGCONT)
                asked[rank] = pid
    deadline = time.monotonic() + _ANSWER
    while asked and time.monotonic() < deadline:
        if all((folder / f"{pid}{STACKS}").stat().st_size for pid in asked.values()):
            time.sleep(0.05)  # the rest of the last one
            break
        time.sleep(0.02)
    answers = {}
    for rank, pid in pids.items():
        if not found[rank].is_there:
            continue
        is_stopped = found[rank].state in ("T", "t")
        place, waits = _place(pid, folder)
        answers[rank] = Stand("was stopped by a signal, " * is_stopped + place, waits and not is_stopped)
    return answers


def _place(pid: int, folder: Path) -> tuple[str, bool]:
    """The user's line that a rank's main thread is at, and the innermost one; whether it waits for others."""
    with contextlib.suppress(OSError):
        for thread in (folder / f"{pid}{STACKS}").read_text(errors="replace").split("\n\n"):
            frames = [found.groups() for line in thread.splitlines() if (found := _FRAME.match(line))]
            if any("runpy" in file for file, _, _ in frames):
                theirs = [frame for frame in frames if _is_users(frame[0])]
                inner, own = frames[0], (theirs or frames)[0]
                text = f"at {own[0]}:{own[1]} in {own[2]}"
                waits = any(file.endswith(_WAITING) for file, _, _ in frames)
                inside = f", inside {Path(inner[0]).name}:{inner[1]} {inner[2]}" * (own != inner)
                return text + inside, waits
    return "did not say where it stands", False


def _is_users(file: str) -> bool:
    library = sysconfig.get_paths()["stdlib"]
    inside = file.startswith((_PACKAGE, library, sys.base_prefix, "<")) or "site-packages" in file
    return not inside
