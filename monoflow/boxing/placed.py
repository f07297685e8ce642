"""Sums over the parts of a mesh by whoever made them: each part is added where it lies in the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sbp.layout import Partial, Split, take
from .collectives import identity
from .route import Move

Tensor = torch.Tensor


def has_rows(move: Move) -> bool:
    """Whether parts have places of their own in the whole, along some axis; else each is as large as that."""
    return any(isinstance(one, Split) for one in move.source)


def add_part(move: Move, whole: Tensor, part: Tensor, coordinate: Sequence[int]) -> Tensor:
    """The whole tensor, with the part of one coordinate of the mesh added in place.

    Args:
        move: whose source says how parts lie: along every axis S of one block, or P(sum).
    """
    rows = whole
    for one, size, index in zip(move.source, move.mesh, coordinate, strict=True):
        if isinstance(one, Split):
            assert one.blocks == 1, f"{move.source} is no view of the whole"
            rows = take(rows, one, size, index)
    rows.add_(part)
    return whole


def neutral(move: Move, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What changes nothing in the reduction of all parts of a mesh: the share of a rank that made none."""
    ops = {one.op for one in move.source if isinstance(one, Partial)}
    (op,) = ops if not has_rows(move) else ("sum",)
    return torch.full(move.shape, identity(op, dtype), dtype=dtype, device=device)
