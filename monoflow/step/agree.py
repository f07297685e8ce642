"""What every rank must do and hold alike is compared: else a number would be wrong in silence, or ranks would
wait for each other without end.

How a step is called (shapes, settings, learning rates) is compared at every call, tensors when it is
compiled.
A plain tensor in a batch means the whole global batch on every rank. Parameters that are not split yet must
have begun alike; where they have not (no `torch.manual_seed` before the model was built), rank 0's are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..errors import LayoutError
from ..log import stage_logger
from ..mesh import Placement
from ..tensor import device_mesh

_PART = 1 << 20  # elements digested at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_alike(tensors: Mapping[str, torch.Tensor], placement: Placement, rank: int) -> None:
    """Raises LayoutError, on every rank, if a plain tensor is not the same on all of them."""
    differing = _differing(tensors, placement, rank)
    if differing:
        raise LayoutError(
            f"{differing[0]} differs between the ranks of {placement}; a plain tensor stands for the whole "
            "global one and must be the same on every rank. For what each rank loaded itself pass "
            "flow.from_local(batch), or load with flow.stream(dataset, batch_size)"
        )


def make_alike(tensors: Mapping[str, torch.Tensor], placement: Placement, rank: int) -> None:
    """Gives every rank the first one's values of the plain tensors that differ, in place, and says so."""
    differing = _differing(tensors, placement, rank)
    if not differing:
        return
    stage_logger("runtime").warning(
        "%d tensors, such as %s, began differently on the ranks; rank %d's are used. Call torch.manual_seed "
        "with one seed on every rank before the model is built",
        len(differing), differing[0], placement.ranks[0],
    )  # fmt: skip
    mesh = device_mesh(placement)
    with torch.no_grad():
        for name in differing:
            for axis in range(placement.num_axes):
                value = tensors[name].detach().contiguous()
                dist.broadcast(value, placement.group(axis, rank)[0], group=mesh.get_group(axis))
                tensors[name].copy_(value)


def check_same(parts: Mapping[str, int], what: str, placement: Placement, rank: int) -> None:
    """Raises LayoutError, on every rank, if a digest differs between ranks; one small collective an axis.

    Args:
        parts: digests by the name of what they stand for; the same names on every rank.
        what: what the ranks do differently, for the message.
    """
    mesh = device_mesh(placement)
    device = torch.device(placement.device_type)
    own = torch.tensor(list(parts.values()), dtype=torch.int64, device=device)
    differs = torch.zeros_like(own)
    for axis in range(placement.num_axes):
        sent = torch.stack([own, differs])
        found = [torch.empty_like(sent) for _ in range(placement.shape[axis])]
        dist.all_gather(found, sent, group=mesh.get_group(axis))
        # What the groups along the axes before found comes along, so that every rank knows of all.
        for digests, known in found:
            differs |= known | (digests != found[0][0])
    names = [name for name, one in zip(parts, differs.tolist(), strict=True) if one]
    if names:
        raise LayoutError(
            f"the ranks of {placement} {what}: {', '.join(names)} differ. Every rank must run the same "
            "program with the same settings; only what flow.stream and flow.from_local give may differ"
        )


def digest_of(value: object) -> int:
    """A 62-bit digest of nested tuples of plain values, the same in every process; other objects by type."""
    return int.from_bytes(hashlib.blake2b(repr(_portable(value)).encode(), digest_size=8).digest()) >> 2


def _portable(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(_portable(one) for one in value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    return str(value) if isinstance(value, torch.Size) else type(value).__name__


def _differing(tensors: Mapping[str, torch.Tensor], placement: Placement, rank: int) -> list[str]:
    """The names of plain tensors that are not the same everywhere; the same list on every rank."""
    names = [name for name, value in tensors.items() if not isinstance(value, DTensor)]
    if not names:
        return []
    mesh = device_mesh(placement)
    device = (
        tensors[names[0]].device if placement.device_type == "cpu" else torch.device(placement.device_type)
    )
    own = torch.stack([_digest(tensors[name]) for name in names]).to(device)
    differs = torch.zeros(len(names), dtype=torch.int64, device=device)
    for axis in range(placement.num_axes):
        found = [torch.empty_like(own) for _ in range(placement.shape[axis])]
        dist.all_gather(found, own, group=mesh.get_group(axis))
        differs |= torch.stack([one != found[0] for one in found]).any(0)
        # What one group found, the groups across must know too.
    for axis in range(placement.num_axes):
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return [name for name, one in zip(names, differs.tolist(), strict=True) if one]


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit digest of a tensor's shape and values; int64, 0-dim, on the CPU."""
    flat = tensor.detach().contiguous().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    weights = torch.arange(1, min(_PART, max(flat.numel(), 1)) + 1, device=flat.device) * 0x9E3779B1
    digest = torch.tensor(sum((i + 2) * n for i, n in enumerate(tensor.shape)))
    for part in flat.view(_INTEGERS[flat.element_size()]).split(_PART):
        digest = digest * 1_000_003 + (part.to(torch.int64) * weights[: len(part)]).sum().cpu()
    return digest
