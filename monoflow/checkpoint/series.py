"""A directory of checkpoints, one folder a step: `step-0000000100`; the newest, and those no longer kept."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from .index import INDEX
from .local import clean, recover
from .remote import is_url, open_url

_NAME = re.compile(r"step-(\d+)$")


def path_of(folder: str, number: int) -> str:
    """Where the checkpoint of a step is."""
    return f"{str(folder).rstrip('/')}/step-{number:010}"


def checkpoints(folder: str | Path) -> list[tuple[int, str]]:
    """The complete checkpoints of a directory or URL: step and path, oldest first."""
    found = []
    if is_url(str(folder)):
        system, root = open_url(str(folder).rstrip("/"))
        system.invalidate_cache()
        names = system.ls(root, detail=False) if system.exists(root) else []
        complete = [name for name in names if _NAME.search(name) and system.exists(f"{name}/{INDEX}")]
        found = [(_number(name), f"{str(folder).rstrip('/')}/{name.rsplit('/', 1)[-1]}") for name in complete]
    elif Path(folder).is_dir():
        found = [
            (_number(one.name), str(one))
            for one in Path(folder).iterdir()
            if _NAME.match(one.name) and (one / INDEX).exists()
        ]
    return sorted(found)


def candidates(folders: Sequence[str]) -> list[str]:
    """The checkpoints of some directories to go on from, the newest first; of one step, the first folder's.

    What a save that was replaced left is taken back. For one process at a time, while nobody saves.
    """
    found = []
    for place, folder in enumerate(folders):
        if not is_url(folder):
            for left in Path(folder).glob("step-*.*-*"):
                recover(left.with_name(left.name.split(".")[0]))
        found += [(-number, place, path) for number, path in checkpoints(folder)]
    return [path for _, _, path in sorted(found)]


def newest(folder: str | Path) -> str | None:
    """The path of the newest complete checkpoint of a directory or URL."""
    found = checkpoints(folder)
    return found[-1][1] if found else None


def opened(folder: str | Path) -> str | None:
    """The newest complete checkpoint of a folder that is to be saved to; makes the folder.

    Raises:
        CheckpointError: nothing can be written there, which is better known before training than after.
    """
    if not is_url(str(folder)):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {str(folder)!r}: {error.strerror or error}; give "
                "flow.checkpointer a folder that every rank can write to"
            ) from error
    return newest(folder)


def _number(name: str) -> int:
    found = _NAME.search(name)
    assert found is not None, name
    return int(found[1])


def prune(folder: str | Path, number: int, keep_last: int | None) -> None:
    """Removes what interrupted saves left, and checkpoints that the newest one replaces.

    For one process at a time.

    Args:
        number: the step of the newest, which is in its place. Those of later steps are of a run that was
            begun anew, or are damaged and were passed over: this run does not have the steps after which they
            were saved.
        keep_last: how many stay; None for all.
    """
    if not is_url(str(folder)):
        for left in Path(folder).glob("step-*.*-*"):
            own = left.with_name(left.name.split(".")[0])
            recover(own)
            clean(own)
    found = dict(checkpoints(folder))
    if number not in found:  # it was taken away meanwhile
        return
    past = [path for step, path in found.items() if step <= number]
    later = [path for step, path in found.items() if step > number]
    for path in later + (past[:-keep_last] if keep_last else []):
        if is_url(path):
            system, root = open_url(path)
            system.rm_file(f"{root}/{INDEX}")  # without it, it is no checkpoint
            system.rm(root, recursive=True)
        else:
            aside = Path(f"{path}.tmp-removed")
            Path(path).rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
