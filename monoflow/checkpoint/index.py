"""The index of a checkpoint: which part of which file holds which slice of which tensor, with checksums.

`checkpoint.json` is JSON: `{"checksum": ..., "body": "..."}`, where the body is JSON text again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors.torch import _TYPES as DTYPES  # the names of dtypes in the safetensors format

from ..errors import CheckpointError, DamagedError
from .boxes import Box

INDEX = "checkpoint.json"
FORMAT, VERSION = "monoflow-checkpoint", 1
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def checksum(data: Any) -> str:
    """The checksum of bytes: XXH3, 64 bits, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


class Piece(NamedTuple):
    """What was written at once, and the checksum of its bytes in row-major order."""

    box: Box
    checksum: str


@dataclass(frozen=True)
class Entry:
    """A box of a tensor that lies in a file as one row-major array.

    Attributes:
        offset: of its first byte in the file.
        pieces: boxes that make it up.
    """

    file: str
    offset: int
    box: Box
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint; its entries make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class FileInfo:
    """A file's size, and the length and checksum of its head: of a safetensors file, else all of it."""

    size: int
    head: int
    checksum: str


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        meta: everything that is no tensor, for JSON.
    """

    files: Mapping[str, FileInfo]
    tensors: Mapping[str, Stored]
    meta: Mapping[str, Any]

    def dumps(self) -> str:
        tensors = {
            name: {
                "dtype": NAMES[one.dtype],
                "shape": one.shape,
                "entries": [
                    {"file": e.file, "offset": e.offset, "box": e.box, "pieces": e.pieces}
                    for e in one.entries
                ],
            }
            for name, one in self.tensors.items()
        }
        files = {name: vars(one) for name, one in self.files.items()}
        body = json.dumps(
            {"format": FORMAT, "version": VERSION, "files": files, "tensors": tensors, "meta": self.meta}
        )
        return json.dumps({"checksum": checksum(body.encode()), "body": body})

    @classmethod
    def parse(cls, text: bytes, where: str) -> Index:
        """The index in a file's bytes.

        Raises:
            DamagedError: it is not what was written, or no index.
            CheckpointError: it is of a version that this monoflow does not read.
        """
        body = _body(text, where)
        if body.get("format") != FORMAT:
            raise DamagedError(
                f"{where} is no index of a monoflow checkpoint (format {body.get('format')!r})"
            )
        if body.get("version") != VERSION:
            raise CheckpointError(
                f"{where} has format version {body.get('version')}, this monoflow reads version {VERSION}; "
                f"load it with the monoflow that wrote it ({_writer(body)}) and save it as safetensors with "
                f"`monoflow checkpoint convert`"
            )
        try:
            files = {name: FileInfo(**one) for name, one in body["files"].items()}
            tensors = {name: _stored(one) for name, one in body["tensors"].items()}
            return cls(files, tensors, body["meta"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(
                f"{where} lacks what an index has: {error!r}; it was not written whole"
            ) from None


def _body(text: bytes, where: str) -> dict[str, Any]:
    try:
        outer = json.loads(text)
        body, expected = outer["body"], outer["checksum"]
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{where} is no index of a checkpoint, or damaged: it does not parse") from None
    if checksum(body.encode()) != expected:
        raise DamagedError(
            f"{where} is damaged: its checksum is {checksum(body.encode())}, not {expected} as written"
        )
    return json.loads(body)


def _writer(body: Mapping[str, Any]) -> str:
    meta = body.get("meta")
    versions = meta.get("versions", {}) if isinstance(meta, dict) else {}
    return f"monoflow {versions.get('monoflow', 'of unknown version')}"


def _box(value: Any) -> Box:
    return tuple((int(start), int(stop)) for start, stop in value)


def _stored(one: Mapping[str, Any]) -> Stored:
    entries = tuple(
        Entry(
            e["file"],
            int(e["offset"]),
            _box(e["box"]),
            tuple(Piece(_box(box), digest) for box, digest in e["pieces"]),
        )
        for e in one["entries"]
    )
    return Stored(DTYPES[one["dtype"]], tuple(one["shape"]), entries)
