"""Who writes what, and where: the same answer on every rank, from shapes and layouts alone.

Two arrangements. On a file system, a file holds whole tensors, and ranks write disjoint byte ranges of it:
the file is the same for every layout, and any safetensors reader opens it. An object store cannot write a
range: there every rank writes files of its own, with the boxes that it was given as arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from .boxes import Box, cut, describe, extents, num_elements, whole_box
from .held import Held, Holders
from .index import NAMES, Entry

#: Bytes of a piece: what is read, written and checked at once.
PIECE = 16 * 2**20
#: Replicas do not share the writing of less than this.
_LEAST_SHARE = 2**20
_ALIGNMENT = 8


class Write(NamedTuple):
    """A box of a tensor that one rank writes into an entry of that tensor."""

    name: str
    entry: int
    box: Box


@dataclass(frozen=True)
class Arrangement:
    """Where everything goes.

    Attributes:
        heads: per file, its first bytes: length and JSON of a safetensors header.
        sizes: per file, all its bytes.
        entries: per tensor; without checksums.
        writes: per rank, in the order of their offsets.
    """

    heads: Mapping[str, bytes]
    sizes: Mapping[str, int]
    entries: Mapping[str, tuple[Entry, ...]]
    writes: Mapping[int, tuple[Write, ...]]


class Share(NamedTuple):
    name: str
    box: Box
    rank: int


def shares(
    tensors: Mapping[str, Held], ranks: Sequence[int], holders: Holders, piece_bytes: int, is_cut: bool
) -> Iterator[Share]:
    """Every element of every tensor once, given to one of the ranks that hold it, so that bytes are balanced.

    Args:
        is_cut: whether a box may be given to several ranks in pieces.

    Raises:
        CheckpointError: no rank holds part of a tensor, or only ranks that are not here.
    """
    loads = dict.fromkeys(ranks, 0)
    for name, one in tensors.items():
        owners = holders.owners(name, one.shape, one.layout)
        found = sum(map(num_elements, owners))
        if found != math.prod(one.shape):
            raise CheckpointError(f"the ranks hold {found} of the {math.prod(one.shape)} elements of {name}")
        for box, those in owners.items():
            here = [rank for rank in those if rank in loads]
            if not here:
                raise CheckpointError(f"{name} lies on ranks {those}; of them none of {list(ranks)} saves")
            size = one.dtype.itemsize
            most = _share_bytes(num_elements(box) * size, len(here), piece_bytes) // size
            for part in cut(box, most) if is_cut else (box,):
                rank = min(here, key=lambda rank: (loads[rank], rank))
                loads[rank] += num_elements(part) * size
                yield Share(name, part, rank)


def _share_bytes(num_bytes: int, num_holders: int, piece_bytes: int) -> int:
    return min(piece_bytes, max(_LEAST_SHARE, -(-num_bytes // num_holders)))


def in_whole_files(
    files: Mapping[str, Mapping[str, Held]], ranks: Sequence[int], piece_bytes: int = PIECE
) -> Arrangement:
    """Whole tensors in shared files, in whose byte ranges the ranks write."""
    heads, sizes, entries = {}, {}, {}
    for file, tensors in files.items():
        if tensors:
            arrays = {name: (one.dtype, one.shape) for name, one in tensors.items()}
            heads[file], offsets, sizes[file] = head_of(arrays)
            for name, one in tensors.items():
                entries[name] = (Entry(file, offsets[name], whole_box(one.shape)),)
    tensors = {name: one for group in files.values() for name, one in group.items()}
    given = list(shares(tensors, ranks, Holders(), piece_bytes, is_cut=True))
    writes = {rank: tuple(Write(s.name, 0, s.box) for s in given if s.rank == rank) for rank in ranks}
    return Arrangement(heads, sizes, entries, writes)


def in_own_files(
    files: Mapping[str, Mapping[str, Held]], ranks: Sequence[int], label: str, piece_bytes: int = PIECE
) -> Arrangement:
    """Every rank's boxes in files of its own, written from first to last byte.

    Args:
        label: comes into the names, so that they differ from those of another save.
    """
    heads, sizes = {}, {}
    entries: dict[str, list[Entry]] = {}
    writes: dict[int, list[Write]] = {rank: [] for rank in ranks}
    holders = Holders()
    for file, tensors in files.items():
        stem = file.removesuffix(".safetensors")
        given = list(shares(tensors, ranks, holders, piece_bytes, is_cut=False))
        empty = [name for name, one in tensors.items() if 0 in one.shape]
        given += [Share(name, whole_box(tensors[name].shape), ranks[0]) for name in empty]
        for number, rank in enumerate(ranks, 1):
            own = [share for share in given if share.rank == rank]
            if not own:
                continue
            file = f"{stem}-{label}-{number:05}-of-{len(ranks):05}.safetensors"
            keys = {s: s.name + describe(s.box, tensors[s.name].shape) for s in own}
            arrays = {keys[s]: (tensors[s.name].dtype, extents(s.box)) for s in own}
            heads[file], offsets, sizes[file] = head_of(arrays)
            for s in sorted(own, key=lambda s: offsets[keys[s]]):
                ones = entries.setdefault(s.name, [])
                most = piece_bytes // tensors[s.name].dtype.itemsize
                if num_elements(s.box):
                    writes[rank] += [Write(s.name, len(ones), box) for box in cut(s.box, most)]
                ones.append(Entry(file, offsets[keys[s]], s.box))
    return Arrangement(
        heads,
        sizes,
        {name: tuple(ones) for name, ones in entries.items()},
        {rank: tuple(ones) for rank, ones in writes.items()},
    )


def head_of(arrays: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, int], int]:
    """The head of a safetensors file.

    Returns:
        its first bytes; where in the file each array begins, in bytes; and the size of the file. Arrays lie
        in the order of their elements' sizes, largest first, so that each is aligned.

    Raises:
        CheckpointError: the format has no such dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, begins = 0, {}
    for name, (dtype, shape) in sorted(arrays.items(), key=lambda one: -one[1][0].itemsize):
        if dtype not in NAMES:
            raise CheckpointError(f"{name} has dtype {dtype}, which safetensors cannot hold")
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        begins[name], at = at, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}, len(head) + at
