"""Several moves as one collective: what they send lies in one buffer, so that its start is paid once.

The moves are of one kind along one axis, of one dtype and reduction, and all are all-gathers, all-reduces or
reduce-scatters. What each rank holds afterwards is what the moves would give one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..mesh import Placement
from .collectives import AxisMove, Group, Transport, finish, prepare
from .route import Move

Tensor = torch.Tensor

#: What can be put together.
BUNDLED_KINDS = ("all_gather", "all_reduce", "reduce_scatter")
#: How many compute tasks a move may run beside, from the first one after it. Of two, one is often short: a
#: gather and a reduction seldom fall in the same place.
BESIDE = 2


def apply_bundle(
    moves: Sequence[Move],
    tensors: Mapping[int, Sequence[Tensor]],
    placement: Placement,
    transport: Transport,
    time: int = 0,
) -> dict[int, list[Tensor]]:
    """Execute moves together for all hosted ranks: rank -> a tensor for each move, before and after.

    Args:
        tensors: of the ranks that take part: with stages, those of one of them.
        time: the micro-batch, where the meshes of the moves have an axis more than the placement.
    """
    at = (time,) * (len(moves[0].mesh) - placement.num_axes)
    results: dict[int, list[Tensor]] = {}
    for rank in tensors:
        if rank not in results:
            group = Group(moves[0].axis, placement.group(moves[0].axis, rank))
            coordinate = (*placement.coordinate(rank), *at)
            hosted = {member: tensors[member] for member in group.ranks if member in tensors}
            results |= _run([AxisMove.of(move, coordinate) for move in moves], hosted, group, transport)
    return results


def _run(
    moves: Sequence[AxisMove], tensors: Mapping[int, Sequence[Tensor]], group: Group, transport: Transport
) -> dict[int, list[Tensor]]:
    """One group's members."""
    kind, size = moves[0].kind, group.size
    parts = {
        rank: [prepare(move, tensor) for move, tensor in zip(moves, given, strict=True)]
        for rank, given in tensors.items()
    }
    shapes = [part.shape for part in next(iter(parts.values()))]
    if kind == "reduce_scatter":  # (size, *part) each: the parts of one member lie together
        sent = {rank: torch.cat([part.reshape(size, -1) for part in own], 1) for rank, own in parts.items()}
    else:
        sent = {rank: torch.cat([part.reshape(-1) for part in own]) for rank, own in parts.items()}
    del parts
    if kind == "all_gather":
        received = transport.all_gather(sent, group)
        shapes = [(size, *shape) for shape in shapes]
    elif kind == "all_reduce":
        received = transport.all_reduce(sent, moves[0].op, group)
    else:
        received = transport.reduce_scatter(sent, moves[0].op, group)
        shapes = [shape[1:] for shape in shapes]
    lead = 1 if kind == "all_gather" else 0  # of a gather, one row for every member
    counts = [torch.Size(shape[lead:]).numel() for shape in shapes]
    results: dict[int, list[Tensor]] = {}
    for rank, whole in received.items():
        pieces = whole.split(counts, lead)
        index = group.ranks.index(rank)
        # A part of the buffer would keep all of it alive, so each move takes its own.
        results[rank] = [
            _owned(finish(move, index, piece.reshape(shape)), whole)
            for move, piece, shape in zip(moves, pieces, shapes, strict=True)
        ]
    return results


def _owned(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The tensor in memory of its own, contiguous."""
    shared = tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    return tensor.clone(memory_format=torch.contiguous_format) if shared else tensor
