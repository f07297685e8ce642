"""Folders in which the ranks of a running job tell of themselves, one a job."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..config import Settings
from ..errors import FlowError
from ..runtime.signs import EVENTS, NAMES, SNAPSHOT

RUN_DIR, TRACE_EVENTS = "MONOFLOW_RUN_DIR", "MONOFLOW_TRACE_EVENTS"


def folder_of_job(env: Mapping[str, str]) -> Path:
    """The folder of the job that this process starts: MONOFLOW_RUN_DIR, or one of its own in the cache.

    It need not exist. Folders that jobs of this host left when they were killed are removed.
    """
    settings = Settings.from_env(env)
    if settings.run_dir:
        return Path(settings.run_dir).expanduser()
    for pid, folder in _known(settings):
        if not is_alive(pid) or pid == os.getpid():
            clear(folder)
    return _folder(settings) / f"{socket.gethostname()}-{os.getpid()}"


def clear(folder: Path) -> None:
    """Removes what ranks wrote, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for file in list(folder.iterdir()):
            if file.suffix in (SNAPSHOT, EVENTS, NAMES, ".new"):
                file.unlink(missing_ok=True)
        folder.rmdir()


def find(job: str | None, env: Mapping[str, str]) -> Path:
    """The folder of a running job.

    Args:
        job: its folder, or the process that started it; None for the one that was started last.

    Raises:
        FlowError: there is no such job.
    """
    if job is not None and not job.isdigit():
        if not Path(job).is_dir():
            raise FlowError(
                f"no folder {job!r}; give a job's folder, or the process id of its `monoflow run`"
            )
        return Path(job)
    settings = Settings.from_env(env)
    if job is None and settings.run_dir:
        return Path(settings.run_dir).expanduser()
    running = [(pid, folder) for pid, folder in _known(settings) if is_alive(pid)]
    chosen = [(pid, folder) for pid, folder in running if job is None or pid == int(job)]
    if not chosen:
        others = ", ".join(str(pid) for pid, _ in running) or "none"
        what = "job runs" if job is None else f"job of process {job} runs"
        raise FlowError(
            f"no {what} on this host (running: {others}); start one with `monoflow run script.py`; "
            "it shows from its first step on"
        )
    return max(chosen, key=lambda item: item[1].stat().st_mtime)[1]


def is_alive(pid: int) -> bool:
    """Whether a process of this host runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _folder(settings: Settings) -> Path:
    return Path(settings.cache).expanduser() / "runs"


def _known(settings: Settings) -> Iterator[tuple[int, Path]]:
    """The jobs of this host that have a folder, with the process that started them."""
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(_folder(settings).iterdir()):
            host, _, pid = folder.name.rpartition("-")
            if host == socket.gethostname() and pid.isdigit():
                yield int(pid), folder
