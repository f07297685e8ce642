"""Checkpoints: logical tensors in files that fit any layout; every rank writes and reads its parts."""

from .checkpointer import Checkpointer
from .group import Alone, Group, group_of, together
from .index import INDEX
from .loading import check, fill, misfits, whole
from .read import Checkpoint, Source, Wanted
from .saver import Saver
from .series import checkpoints
from .source import open_source, open_together
from .tree import decode, encode, tensor_names
from .write import Contents

__all__ = [
    "INDEX",
    "Alone",
    "Checkpoint",
    "Checkpointer",
    "Contents",
    "Group",
    "Saver",
    "Source",
    "Wanted",
    "check",
    "checkpoints",
    "decode",
    "encode",
    "fill",
    "group_of",
    "misfits",
    "open_source",
    "open_together",
    "tensor_names",
    "together",
    "whole",
]
