"""Moves as collectives: what a rank sends, the collective, and what a rank makes of what it received.

A transport carries the tensors of all the members of a group that it hosts: one in a distributed run,
every one in a simulation. The code here is the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from ..mesh import Placement
from ..sbp.layout import At, B, Partial, Sbp, Split, is_held, join, local_dim, take
from .route import LOCAL_KINDS, Kind, Move, Route, collective_kind

Tensor = torch.Tensor
#: What each hosted rank holds, sends or receives.
Tensors = Mapping[int, Tensor]


@dataclass(frozen=True)
class Group:
    """The ranks that differ only along one axis of a placement, in axis order."""

    axis: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


class Board(Protocol):
    """Where ranks in several processes tell each other that one of them failed."""

    def tell(self, text: str) -> None:
        """Says it to all ranks, unless one has said something before."""
        ...

    def heard(self) -> str | None:
        """What a rank said first, this one included; None as long as all is well."""
        ...


class Transport(Protocol):
    """Carries tensors between the members of a group. Every method takes and gives the hosted ranks'."""

    @property
    def board(self) -> Board | None:
        """Where other processes' ranks are heard of; None if this process hosts all ranks."""
        ...

    def all_gather(self, tensors: Tensors, group: Group) -> dict[int, Tensor]:
        """Equally shaped tensors, stacked: (group size, *shape)."""
        ...

    def all_reduce(self, tensors: Tensors, op: str, group: Group) -> dict[int, Tensor]:
        """The elementwise "sum", "max" or "min" of equally shaped tensors."""
        ...

    def reduce_scatter(self, tensors: Tensors, op: str, group: Group) -> dict[int, Tensor]:
        """From (group size, *shape) each: member i gets the reduction of everyone's part i."""
        ...

    def all_to_all(
        self,
        pieces: Mapping[int, Sequence[Tensor]],
        shapes: Mapping[int, Sequence[tuple[int, ...]]],
        group: Group,
    ) -> dict[int, list[Tensor]]:
        """Piece j of member i goes to member j as its piece i; `shapes` says what each receives."""
        ...

    def broadcast(self, tensors: Tensors, source: int, group: Group) -> dict[int, Tensor]:
        """The tensor of rank `source`; the others give one of the same shape and dtype."""
        ...

    def send(
        self, tensors: Tensors, source: int, target: int, shape: tuple[int, ...], group: Group
    ) -> dict[int, Tensor]:
        """From one member to another, point to point; only those two take part, and only `target` gets it.

        Args:
            tensors: of each of the two that is hosted: of the source what it sends, of the target an empty
                tensor, of the dtype and on the device that it is to receive.
            shape: of what is sent.
        """
        ...


@dataclass(frozen=True)
class AxisMove:
    """A move as the members of one group see it: `shape` is what their axis divides."""

    source: Sbp
    target: Sbp
    shape: tuple[int, ...]
    axis_size: int

    @classmethod
    def of(cls, move: Move, coordinate: Sequence[int]) -> AxisMove:
        """A route's move for the group of the rank at `coordinate`."""
        axis = move.axis
        return cls(move.source[axis], move.target[axis], move.group_shape(coordinate), move.mesh[axis])

    @cached_property
    def kind(self) -> Kind:
        kind = collective_kind(self.source, self.target)
        assert kind is not None, f"no single move from {self.source} to {self.target}"
        return kind

    @property
    def is_local(self) -> bool:
        """Whether every rank does it alone."""
        return self.kind in LOCAL_KINDS or self.axis_size == 1 or math.prod(self.shape) == 0

    @property
    def op(self) -> str:
        """The reduction of the partial that the move starts from or ends in."""
        partial = self.source if isinstance(self.source, Partial) else self.target
        assert isinstance(partial, Partial), self
        return partial.op

    def held(self, sbp: Sbp, index: int) -> tuple[int, ...]:
        """The shape that member `index` holds under `sbp`."""
        return _cut(self.shape, sbp, self.axis_size, index)

    @cached_property
    def source_owner(self) -> Tensor:
        """For a move within one dim: who holds each element before."""
        return self._owner(self.source)

    @cached_property
    def target_owner(self) -> Tensor:
        """For a move within one dim: who holds each element after."""
        return self._owner(self.target)

    def _owner(self, sbp: Sbp) -> Tensor:
        assert isinstance(sbp, Split), self
        owner = torch.empty(self.shape[sbp.dim], dtype=torch.int64)
        for index in range(self.axis_size):
            owner[self.indices(sbp, index)] = index
        return owner

    def indices(self, split: Split, index: int) -> Tensor:
        """The positions along the split dim, in order, that member `index` holds."""
        return take(torch.arange(self.shape[split.dim]), replace(split, dim=0), self.axis_size, index)

    @property
    def is_within_dim(self) -> bool:
        """Whether an all-to-all goes between two splits of the same dim."""
        source, target = self.source, self.target
        return isinstance(source, Split) and isinstance(target, Split) and source.dim == target.dim


def run_collective(move: AxisMove, tensors: Tensors, group: Group, transport: Transport) -> dict[int, Tensor]:
    """Execute a move for the hosted members of one group.

    Args:
        tensors: rank -> what it holds under `move.source`: an empty tensor of the dtype where that is
            nothing. In a send only the two ranks matter that take part.

    Returns:
        rank -> what it holds under `move.target`; ranks that hold nothing then are left out.
    """
    index = {rank: group.ranks.index(rank) for rank in tensors}
    for rank, tensor in tensors.items():
        expected = move.held(move.source, index[rank])
        assert tuple(tensor.shape) == expected, (
            f"{move}: rank {rank} holds {list(tensor.shape)}, not {expected}"
        )
    if move.is_local:
        found = {rank: run_local(move, index[rank], tensor) for rank, tensor in tensors.items()}
        return {rank: tensor for rank, tensor in found.items() if is_held((move.target,), (index[rank],))}
    if isinstance(move.source, At):
        return _from_stage(move, move.source, tensors, group, transport)
    if move.kind == "all_to_all":
        pieces = {rank: split_pieces(move, index[rank], tensor) for rank, tensor in tensors.items()}
        shapes = {rank: piece_shapes(move, index[rank]) for rank in tensors}
        arrived = transport.all_to_all(pieces, shapes, group)
        return {rank: join_pieces(move, index[rank], arrived[rank]) for rank in tensors}
    sent = {rank: prepare(move, tensor) for rank, tensor in tensors.items()}
    if move.kind == "all_gather":
        received = transport.all_gather(sent, group)
    elif move.kind == "all_reduce":
        received = transport.all_reduce(sent, move.op, group)
    else:
        received = transport.reduce_scatter(sent, move.op, group)
    return {rank: finish(move, index[rank], received[rank]) for rank in tensors}


def _from_stage(
    move: AxisMove, source: At, tensors: Tensors, group: Group, transport: Transport
) -> dict[int, Tensor]:
    """A broadcast from one stage to all, or a send to another one."""
    owner = group.ranks[source.stage]
    if isinstance(move.target, At):
        other = group.ranks[move.target.stage]
        pair = {rank: tensor for rank, tensor in tensors.items() if rank in (owner, other)}
        return transport.send(pair, owner, other, move.shape, group) if pair else {}
    given = {
        rank: tensor.contiguous() if rank == owner else tensor.new_empty(move.shape)
        for rank, tensor in tensors.items()
    }
    return transport.broadcast(given, owner, group)


def run_local(move: AxisMove, index: int, tensor: Tensor) -> Tensor:
    """A move that needs nobody else."""
    source, target, size = move.source, move.target, move.axis_size
    if size == 1 or move.kind == "drop":
        return tensor
    if math.prod(move.shape) == 0:
        return tensor.new_empty(move.held(target, index))
    if move.kind == "slice":
        assert isinstance(target, Split)
        return take(tensor, target, size, index).contiguous()
    if move.kind == "keep":
        return tensor if move.op != "sum" or index == 0 else torch.zeros_like(tensor)
    assert isinstance(source, Split), move
    whole = tensor.new_full(move.shape, identity(move.op, tensor.dtype))
    return whole.index_copy_(source.dim, move.indices(source, index).to(tensor.device), tensor)


def prepare(move: AxisMove, tensor: Tensor) -> Tensor:
    """What a rank puts into an all-gather, all-reduce or reduce-scatter; shards padded to the largest."""
    if move.kind == "all_reduce":
        return tensor.contiguous()
    size = move.axis_size
    if move.kind == "all_gather":
        return _padded(tensor, move.held(move.source, 0))
    target = move.target
    assert isinstance(target, Split), move
    if target.dim == 0 and target.blocks == 1 and tensor.shape[0] % (size * target.unit) == 0:
        return tensor.contiguous().unflatten(0, (size, -1))  # the parts lie one after another already
    largest = move.held(target, 0)
    return torch.stack([_padded(take(tensor, target, size, index), largest) for index in range(size)])


def finish(move: AxisMove, index: int, received: Tensor) -> Tensor:
    """What a rank makes of the result of an all-gather, all-reduce or reduce-scatter."""
    if move.kind == "all_reduce":
        return received
    if move.kind == "reduce_scatter":
        return _trimmed(received, move.held(move.target, index)).contiguous()
    source, size = move.source, move.axis_size
    assert isinstance(source, Split), move
    if source.dim == 0 and source.blocks == 1 and received.shape[0] * received.shape[1] == move.shape[0]:
        return received.flatten(0, 1)
    return join([_trimmed(received[i], move.held(source, i)) for i in range(size)], source)


def split_pieces(move: AxisMove, index: int, tensor: Tensor) -> list[Tensor]:
    """What a rank sends to each member in an all-to-all."""
    source, target = move.source, move.target
    assert isinstance(source, Split) and isinstance(target, Split), move
    if not move.is_within_dim:
        return [take(tensor, target, move.axis_size, other) for other in range(move.axis_size)]
    owners = move.target_owner[move.indices(source, index)]
    order = owners.argsort(stable=True).to(tensor.device)
    counts = owners.bincount(minlength=move.axis_size).tolist()
    return list(tensor.index_select(source.dim, order).split(counts, source.dim))


def piece_shapes(move: AxisMove, index: int) -> list[tuple[int, ...]]:
    """The shapes of what a rank receives from each member in an all-to-all."""
    source, target, size = move.source, move.target, move.axis_size
    assert isinstance(source, Split) and isinstance(target, Split), move
    mine = move.held(target, index)
    if not move.is_within_dim:
        return [_cut(mine, source, size, other) for other in range(size)]
    counts = move.source_owner[move.indices(target, index)].bincount(minlength=size).tolist()
    return [(*mine[: target.dim], count, *mine[target.dim + 1 :]) for count in counts]


def join_pieces(move: AxisMove, index: int, pieces: Sequence[Tensor]) -> Tensor:
    """What a rank makes of the pieces it received in an all-to-all."""
    source, target = move.source, move.target
    assert isinstance(source, Split) and isinstance(target, Split), move
    if not move.is_within_dim:
        return join(pieces, source)
    order = move.source_owner[move.indices(target, index)].argsort(stable=True)
    joined = torch.cat(list(pieces), target.dim)
    return torch.empty_like(joined).index_copy_(target.dim, order.to(joined.device), joined)


def apply_move(
    move: Move, tensors: Tensors, placement: Placement, transport: Transport, time: int = 0
) -> dict[int, Tensor]:
    """Execute a move of a route for all hosted ranks of a placement; see `run_collective`.

    Args:
        time: the micro-batch, where the mesh of the move has an axis more than the placement.
    """
    at = (time,) * (len(move.mesh) - placement.num_axes)
    results: dict[int, Tensor] = {}
    seen: set[int] = set()
    for rank in tensors:
        if rank in seen:
            continue
        group = Group(move.axis, placement.group(move.axis, rank))
        seen.update(group.ranks)
        whole = (*move.source[: move.axis], B, *move.source[move.axis + 1 :])
        if not is_held(whole, (*placement.coordinate(rank), *at)):  # a group of another stage
            continue
        axis_move = AxisMove.of(move, (*placement.coordinate(rank), *at))
        hosted = {member: tensors[member] for member in group.ranks if member in tensors}
        results |= run_collective(axis_move, hosted, group, transport)
    return results


def apply_route(
    route: Route, tensors: Tensors, placement: Placement, transport: Transport
) -> dict[int, Tensor]:
    """Execute a route for all hosted ranks of a placement: rank -> local tensor, before and after.

    A rank that holds nothing, at another stage than the tensor, gives and gets an empty one of the dtype.
    """
    held = dict(tensors)
    nothing = {rank: tensor.new_empty(0) for rank, tensor in tensors.items()}
    for step in route.steps:
        held = nothing | apply_move(step, held, placement, transport)
    return held


def _cut(shape: Sequence[int], sbp: Sbp, axis_size: int, index: int) -> tuple[int, ...]:
    """`shape` as member `index` of an axis holds it."""
    if not is_held((sbp,), (index,)):
        return (0,)
    if not isinstance(sbp, Split):
        return tuple(shape)
    extent = local_dim(shape[sbp.dim], sbp, axis_size, index)
    return (*shape[: sbp.dim], extent, *shape[sbp.dim + 1 :])


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) == shape:
        return tensor.contiguous()
    padded = tensor.new_zeros(shape)
    _trimmed(padded, tuple(tensor.shape)).copy_(tensor)
    return padded


def _trimmed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(extent) for extent in shape)]


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing under a reduction."""
    if op == "sum":
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max
