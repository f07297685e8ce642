"""What a path holds: a checkpoint of ours, a series of them, or what another program wrote."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from .dcp import METADATA, Distributed
from .files import bytes_at
from .foreign import SINGLE, Safetensors, StateDictFile, holds_safetensors
from .group import Group, first_does, together
from .index import INDEX
from .local import recover
from .read import Checkpoint, Source
from .remote import is_url
from .series import checkpoints


def open_source(path: str | Path) -> Source:
    """Opens what is at a path; of a series of checkpoints, the newest.

    Raises:
        CheckpointError: nothing there can be read, or it is damaged.
    """
    text = str(path).removeprefix("file://").rstrip("/")
    files = bytes_at(text)
    if files.size(INDEX) is not None:
        return Checkpoint(text)
    if series := checkpoints(text):
        return Checkpoint(series[-1][1])
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
    """Opens a source on every rank, after a replacement that was cut short is put right. Collective."""
    if not is_url(str(path)):
        first_does(group, lambda: recover(Path(str(path).removeprefix("file://"))))
    opened: list[Source] = []
    together(group, lambda: opened.append(open_source(path)))
    return opened[0]
