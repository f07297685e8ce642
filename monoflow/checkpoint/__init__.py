"""Checkpoints: logical tensors in files that fit any layout; every rank writes and reads its parts."""

from .checkpointer import Checkpointer
from .every import Every
from .group import Alone, Group, first_does, group_of, together
from .index import INDEX
from .loading import check, fill, misfits, whole
from .read import Checkpoint, Source, Wanted
from .saver import Saver
from .series import candidates, checkpoints
from .shadow import Shadow, folder_of
from .source import open_source, open_together, open_whole
from .tree import decode, encode, tensor_names
from .write import Contents

__all__ = [
    "INDEX",
    "Alone",
    "Checkpoint",
    "Checkpointer",
    "Contents",
    "Every",
    "Group",
    "Saver",
    "Shadow",
    "Source",
    "Wanted",
    "candidates",
    "check",
    "checkpoints",
    "decode",
    "encode",
    "fill",
    "first_does",
    "folder_of",
    "group_of",
    "misfits",
    "open_source",
    "open_together",
    "open_whole",
    "tensor_names",
    "together",
    "whole",
]
