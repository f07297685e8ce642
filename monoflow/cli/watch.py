"""Whether ranks are alive, and where they stand: each has a file that it touches every second.

A rank whose file is left alone for as long as the watchdog waits is taken for hung: it was stopped, or holds
the interpreter's lock for good. One that sleeps still touches its file, but others wait for it, and no step
ends: then those that do not wait are the ones. Where a rank stands is what its `faulthandler` writes when it
gets a signal.
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
_PACKAGE = str(Path(__file__).parents[1])
#: Files in whose functions a rank waits for others.
_WAITING = ("distributed/distributed_c10d.py", "runtime/lanes.py")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def silence(pid: int, folder: Path) -> float:
    """Seconds since a rank gave a sign of life; 0 where it has not begun to."""
    with contextlib.suppress(OSError):
        return max(0.0, time.time() - (folder / f"{pid}{PULSE}").stat().st_mtime)
    return 0.0


def steps(pid: int, folder: Path) -> int:
    """How many steps a rank of this host has taken since it was started."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"{pid}{PULSE}").read_text() or 0)
    return 0


class Stand(NamedTuple):
    """Where a rank stands.

    Attributes:
        waits: whether it waits for other ranks.
    """

    text: str
    waits: bool


def stands(pids: Mapping[int, int], folder: Path) -> dict[int, Stand]:
    """Where ranks stand that are still there.

    Args:
        pids: by rank. Those that are stopped are made to go on, for which they have no time left.
    """
    states = {rank: _state(pid) for rank, pid in pids.items()}
    asked: dict[int, int] = {}
    for rank, pid in pids.items():
        if states[rank] not in ("", "Z") and (folder / f"{pid}{STACKS}").exists():
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
    found = {}
    for rank, pid in asked.items():
        is_stopped = states[rank] in ("T", "t")
        place, waits = _place(pid, folder)
        found[rank] = Stand("was stopped by a signal, " * is_stopped + place, waits and not is_stopped)
    return found


def _state(pid: int) -> str:
    """The letter of a process' state, "" for none that is there."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return "?"
    return ""


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
    return "and did not say where", False


def _is_users(file: str) -> bool:
    library = sysconfig.get_paths()["stdlib"]
    inside = file.startswith((_PACKAGE, library, sys.base_prefix, "<")) or "site-packages" in file
    return not inside
