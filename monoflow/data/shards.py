"""Tar shards as WebDataset writes them: members with the same name up to the first dot make a sample."""

from __future__ import annotations

import os
import re
import tarfile
from typing import Any, NamedTuple

from ..errors import FlowError
from .blocks import Block, BlockFiles, Opened, Paths

#: As WebDataset splits a member's name: the key may have folders, the extension begins at the first dot.
_NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")


def webdataset(paths: Paths) -> TarShards:
    """Samples of tar shards: {"__key__": name, extension: bytes, ...}; decode them with `transform=`.

    Counting reads the headers of the members only (each rank those of a part of the shards); then a rank
    reads the headers of a shard again and, of the contents, its own samples only. A shard that is cut off
    within a member has a corrupt last sample.

    Args:
        paths: a shard, a pattern such as "train-*.tar" (sorted), or several of them.

    Raises:
        FlowError: a path names no file; while counting, if a shard is compressed or is no tar file.
    """
    return TarShards(paths)


class TarShards(BlockFiles):
    """See `webdataset`."""

    def count(self, path: str) -> list[Block]:
        return [Block(path, 0, os.path.getsize(path), len(read_index(path)))]

    def open(self, block: Block) -> Shard:
        return Shard(block.path)

    def describe_row(self, block: Block, opened: Opened | None, row: int) -> str:
        return f"key {opened.index[row][0]!r}" if isinstance(opened, Shard) else f"row {row}"


class Member(NamedTuple):
    """Where the content of a member is, in bytes."""

    extension: str
    start: int
    size: int


def read_index(path: str) -> list[tuple[str, list[Member]]]:
    """(key, members) of each sample, in the order of the shard."""
    samples: list[tuple[str, list[Member]]] = []
    size, is_cut = os.path.getsize(path), False
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                name = _NAME.fullmatch(member.name)
                if name is None or not member.isreg():
                    continue
                key, extension = name.groups()
                if not samples or samples[-1][0] != key:
                    samples.append((key, []))
                samples[-1][1].append(Member(extension, member.offset_data, member.size))
                is_cut = member.offset_data + member.size > size
                if is_cut:
                    break  # cut off here: this sample is corrupt, those before it are not
                shard.members = []  # pyright: ignore[reportAttributeAccessIssue]  # it keeps every header
            if not is_cut:
                _check_end(path, shard.offset)  # pyright: ignore[reportAttributeAccessIssue]
    except tarfile.TarError as error:
        raise FlowError(
            f"{path} cannot be read as a tar shard ({error}); a compressed one has to be unpacked first, "
            f"since a rank reads only its own samples of it"
        ) from error
    return samples


def _check_end(path: str, end: int) -> None:
    """tarfile takes a header that it cannot read for the end: what comes after would be lost in silence."""
    with open(path, "rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"the header at byte {end} is damaged")


class Shard:
    """An open shard: its index, and reads of single members (at offsets, so a fork does no harm)."""

    def __init__(self, path: str) -> None:
        self.path, self.index = path, read_index(path)
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with the block)

    def sample(self, row: int) -> dict[str, Any]:
        key, members = self.index[row]
        return {"__key__": key} | {one.extension: self._read(one) for one in members}

    def _read(self, member: Member) -> bytes:
        content = os.pread(self.file.fileno(), member.size, member.start)
        if len(content) < member.size:
            raise ValueError(
                f".{member.extension} has {member.size} bytes, of which the shard holds {len(content)}"
            )
        return content

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
