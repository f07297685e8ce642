"""Saving: arrange, copy (or read the live state as it is written), write, agree, publish."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .arrange import Arrangement, Write
from .boxes import whole_box
from .group import Group, first_does, together
from .held import Held, Holders, held, memory_of
from .index import INDEX, Entry, FileInfo, Index, Piece, Stored, checksum
from .local import LocalTarget
from .remote import HF_INDEX, RemoteTarget, is_url

MODEL_FILE, STATE_FILE = "model.safetensors", "state.safetensors"
_ALIGNMENT = 64


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is to hold. Of `meta` and `texts`, the first rank's are kept.

    Attributes:
        model: what `model.safetensors` holds, by the names of the model's state dict.
        state: all other tensors; their names differ from those of `model`.
        meta: everything that is no tensor, for JSON.
        texts: further small files by name.
    """

    model: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Snapshot:
    """What this rank writes of one checkpoint: views of the live state until `copy_to_host` was called.

    Attributes:
        metas: dtype and shape of every tensor.
        model_names: those that belong to the model.
        pieces: what this rank writes, in order.
    """

    target: LocalTarget | RemoteTarget
    group: Group
    arrangement: Arrangement
    metas: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    model_names: Sequence[str]
    meta: Mapping[str, Any]
    texts: Mapping[str, str]
    pieces: Iterable[tuple[Write, torch.Tensor]]

    def copy_to_host(self, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Copies this rank's share, so that the live state may change. Sends nothing.

        Args:
            memory: uint8, what an earlier copy returned; used again if it is large enough.

        Returns:
            uint8, the memory of the copy.
        """
        pieces = list(self.pieces)
        size = sum(_aligned(live.nbytes) for _, live in pieces)
        devices = {live.device.type for _, live in pieces} - {"cpu"}
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        at, copies = 0, []
        for write, live in pieces:
            copy = memory[at : at + live.nbytes].view(live.dtype).view(live.shape)
            copy.copy_(live, non_blocking=True)
            copies.append((write, copy))
            at += _aligned(live.nbytes)
        if devices:
            torch.accelerator.synchronize()
        self.pieces = copies
        return memory

    def on_host(self) -> Iterator[tuple[Write, torch.Tensor]]:
        """The pieces on the CPU, one at a time."""
        for write, tensor in self.pieces:
            yield write, tensor.cpu()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def prepare(path: str | Path, contents: Contents, group: Group) -> Snapshot:
    """Works out what every rank writes. Collective; moves no tensor.

    Raises:
        CheckpointError: the ranks would save different tensors, or what no checkpoint holds.
    """
    clashing = contents.model.keys() & contents.state.keys()
    assert not clashing, f"names of both model and state: {sorted(clashing)}"
    model = {name: held(one, group.ranks) for name, one in contents.model.items()}
    state = {name: held(one, group.ranks) for name, one in contents.state.items()}
    every = model | state
    label = _agree(every, group)
    target = RemoteTarget(str(path), label) if is_url(str(path)) else LocalTarget(str(path), label)
    arrangement = target.arrange({MODEL_FILE: model, STATE_FILE: state}, group.ranks)
    holders = Holders()
    pieces = [
        (write, _live(every[write.name], write, group.rank, holders))
        for write in arrangement.writes[group.rank]
    ]
    metas = {name: (one.dtype, one.shape) for name, one in every.items()}
    return Snapshot(target, group, arrangement, metas, list(model), contents.meta, contents.texts, pieces)


def _agree(tensors: Mapping[str, Held], group: Group) -> str:
    """Sees to it that all ranks save the same tensors; returns the first rank's label of this save."""
    own = {name: f"{one.dtype} {one.shape} {one.layout}" for name, one in tensors.items()}
    digest = checksum(json.dumps(own).encode())
    label, expected = group.gather((uuid.uuid4().hex[:12], digest))[0]
    if any(differs for differs in group.gather(digest != expected)):
        theirs = group.gather(own if digest != expected or group.rank == group.ranks[0] else None)
        first = theirs[0]
        rank, other = next(
            (r, one) for r, one in zip(group.ranks, theirs, strict=True) if one not in (None, first)
        )
        name = next(name for name in chain(first, other) if first.get(name) != other.get(name))
        raise CheckpointError(
            f"the ranks save different things: {name} is {first.get(name)} on rank {group.ranks[0]} and "
            f"{other.get(name)} on rank {rank}"
        )
    return label


def _live(one: Held, write: Write, rank: int, holders: Holders) -> torch.Tensor:
    for part in holders.parts(write.name, one.shape, one.layout, rank):
        if all(a <= c and d <= b for (a, b), (c, d) in zip(part.box, write.box, strict=True)):
            return memory_of(one.local, part, write.box)
    raise AssertionError(f"rank {rank} is to write {write.box} of {write.name}, which it does not hold")


def write(snapshot: Snapshot) -> None:
    """Writes a snapshot and puts it in its place, whole or not at all. Collective; needs no other thread.

    Raises:
        CheckpointError: it failed on some rank; what was there before is as it was. The same on all ranks.
    """
    target, group, arrangement = snapshot.target, snapshot.group, snapshot.arrangement
    try:
        first_does(group, lambda: target.begin(arrangement))
        written = together(group, lambda: target.write(arrangement, snapshot.on_host()))
        first_does(group, lambda: target.finish(_texts(snapshot, list(chain(*written)))))
    except CheckpointError:
        if group.rank == group.ranks[0]:
            target.abandon()
        raise


def _texts(snapshot: Snapshot, written: Sequence[tuple[Write, Piece]]) -> dict[str, bytes]:
    """The small files of a checkpoint; the index last."""
    arrangement = snapshot.arrangement
    pieces: dict[tuple[str, int], list[Piece]] = {}
    for one, piece in written:
        pieces.setdefault((one.name, one.entry), []).append(piece)
    tensors = {
        name: Stored(
            dtype,
            shape,
            tuple(
                Entry(e.file, e.offset, e.box, tuple(sorted(pieces.get((name, i), ()))))
                for i, e in enumerate(arrangement.entries[name])
            ),
        )
        for name, (dtype, shape) in snapshot.metas.items()
    }
    texts = {name: text.encode() for name, text in snapshot.texts.items()}
    files = {
        file: FileInfo(size, len(arrangement.heads[file]), checksum(arrangement.heads[file]))
        for file, size in arrangement.sizes.items()
    }
    files |= {name: FileInfo(len(text), len(text), checksum(text)) for name, text in texts.items()}
    if (weights := _weight_map(snapshot, tensors)) is not None:
        texts[HF_INDEX] = weights
    return {**texts, INDEX: Index(files, tensors, snapshot.meta).dumps().encode()}


def _weight_map(snapshot: Snapshot, tensors: Mapping[str, Stored]) -> bytes | None:
    """Hugging Face's index of the model's tensors over several files, if each lies whole in one of them."""
    model = {name: tensors[name] for name in snapshot.model_names}
    files = {
        name: [e.file for e in one.entries if e.box == whole_box(one.shape)] for name, one in model.items()
    }
    if not all(files.values()) or {MODEL_FILE} == {file for ones in files.values() for file in ones}:
        return None
    total = sum(
        piece.nbytes
        for piece in (torch.empty(one.shape, dtype=one.dtype, device="meta") for one in model.values())
    )
    body = {"metadata": {"total_size": total}, "weight_map": {name: ones[0] for name, ones in files.items()}}
    return json.dumps(body, indent=2).encode()
