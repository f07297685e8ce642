"""What a path holds: a checkpoint of ours, a series of them, or what another program wrote."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError, DamagedError
from .dcp import METADATA, Distributed
from .files import bytes_at
from .foreign import SINGLE, Safetensors, StateDictFile, holds_safetensors
from .group import Group, first_does, together
from .index import INDEX
from .local import recover
from .read import Checkpoint, Source
from .remote import is_url
from .series import newest


def open_source(path: str | Path) -> Source:
    """Opens what is at a path; of a series of checkpoints, the newest.

    Raises:
        CheckpointError: nothing there can be read, or it is damaged.
    """
    text = str(path).removeprefix("file://").rstrip("/")
    files = bytes_at(text)
    if files.size(INDEX) is not None:
        return Checkpoint(text)
    if (path_in_series := newest(text)) is not None:
        return Checkpoint(path_in_series)
    if text.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return StateDictFile(text)
    if text.endswith(".safetensors") or holds_safetensors(files):
        return Safetensors(text)
    if files.size(METADATA) is not None:
        return Distributed(text)
    raise CheckpointError(
        f"{path} holds no checkpoint: no {INDEX}, no steps, no {SINGLE}, no {METADATA}, and is no .pt file"
    )


def open_together(path: str | Path, group: Group) -> Source:
    """Opens a source on every rank, the same one: the first rank says which is the newest. Collective."""

    def find() -> str:
        if not is_url(str(path)):
            recover(Path(str(path).removeprefix("file://")))
        return open_source(path).path

    place = first_does(group, find)
    opened: list[Source] = []
    together(group, lambda: opened.append(open_source(place)))
    return opened[0]


def open_whole(path: str, group: Group) -> Source:
    """Opens one checkpoint of ours on every rank. Collective.

    Raises:
        DamagedError: its index is not what was written.
        CheckpointError: it cannot be read, or is of another version: it may be whole.
    """
    opened: list[Source] = []

    def damage() -> str:
        try:
            opened.append(Checkpoint(path))
        except DamagedError as error:
            return str(error)
        return ""

    if found := [text for text in together(group, damage) if text]:
        raise DamagedError(found[0])
    return opened[0]
