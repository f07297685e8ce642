"""Ranks that build a model lazily must draw the same numbers: compared, and the first rank's are used."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..log import stage_logger
from ..mesh import Placement
from ..tensor import device_mesh
from ..tensor.record import Memory, Op, needed_ops
from .agree import check_same


def make_records_alike(memories: Sequence[Memory], placement: Placement, rank: int) -> None:
    """Gives every rank the first one's random keys of what was recorded, and says so if they differ.

    Raises:
        LayoutError, on every rank: the recorded ops or constants differ.
    """
    ops = needed_ops(memories)
    digests = {"how flow.lazy() recorded the model's initialization": _digest(memories, ops)}
    check_same(digests, "built the model differently", placement, rank)
    drawn = [op for op in ops if op.key is not None]
    if not drawn:
        return
    own = torch.stack([op.key for op in drawn if op.key is not None])
    keys = own.to(placement.device_type)
    mesh = device_mesh(placement)
    for axis in range(placement.num_axes):
        dist.broadcast(keys, placement.group(axis, rank)[0], group=mesh.get_group(axis))
    keys = keys.cpu()
    if not torch.equal(keys, own):
        stage_logger("runtime").warning(
            "the model was built with other random numbers than on rank %d, whose are used. Call "
            "torch.manual_seed with one seed on every rank before flow.lazy()",
            placement.ranks[0],
        )
    for op, key in zip(drawn, keys, strict=True):
        op.key = key


def _digest(memories: Sequence[Memory], ops: Sequence[Op]) -> int:
    """62 bits of everything that was recorded but the keys."""
    place: dict[Memory, int] = {}
    digest = hashlib.blake2b(digest_size=8)
    for memory in memories:
        _add(digest, memory, place)
    for op in ops:
        for view in (*op.read, *op.outputs):
            if view is not None:
                _add(digest, view.memory, place)
        text = op.with_tensors(lambda view: (place[view.memory], *view[1:]))  # type: ignore[arg-type, return-value]
        digest.update(repr((str(op.func), text, op.key is None, op.default_dtype)).encode())
    return int.from_bytes(digest.digest()) >> 2


def _add(digest: hashlib.blake2b, memory: Memory, place: dict[Memory, int]) -> None:
    if memory in place:
        return
    place[memory] = len(place)
    digest.update(repr((memory.num_bytes, memory.device.type)).encode())
    if memory.constant is not None:
        digest.update(memory.constant.contiguous().flatten().view(torch.uint8).numpy().tobytes())
