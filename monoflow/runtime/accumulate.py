"""Moves along time: micro-batch by micro-batch, parts are added up or put where they belong in the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import torch

from ..boxing.collectives import AxisMove

Tensor = torch.Tensor

_IN_PLACE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda total, part: total.add_(part),
    "max": lambda total, part: torch.maximum(total, part, out=total),
    "min": lambda total, part: torch.minimum(total, part, out=total),
}


def accumulated(move: AxisMove, given: list[Tensor], time: int) -> Tensor:
    """What a rank has of a tensor after micro-batch `time`.

    Args:
        given: what it had before, if this is not the first, and the micro-batch's part; emptied. The first
            part becomes the total itself if the list holds the only reference to its memory.
    """
    part = given.pop()
    if move.kind == "all_reduce":
        if time:
            return _IN_PLACE[move.op](given.pop(), part)
        if sys.getrefcount(part) <= 2 and is_sole(part):
            return part
        return part.clone(memory_format=torch.contiguous_format)
    assert move.kind == "all_gather", f"{move.source} -> {move.target} is no move along time"
    whole = given.pop() if time else part.new_empty(move.shape)
    return whole.index_copy_(move.source.dim, move.indices(move.source, time).to(part.device), part)  # type: ignore[union-attr]


def is_sole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory, and no other tensor shares that."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.dtype.itemsize or not tensor.is_contiguous():
        return False
    # Two: the tensor, and Python's own handle of the storage.
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # pyright: ignore[reportAttributeAccessIssue]
