"""Transports: how collectives reach the other ranks. See `boxing.collectives.Transport` for the contract."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..boxing import Group, Tensors, reduce
from ..boxing.route import Kind, LinkCost
from ..config import SETTINGS
from ..mesh import Placement
from .board import StoreBoard, number_of_groups

Tensor = torch.Tensor

_COLLECTIVES = torch.ops._c10d_functional


@dataclass(frozen=True, order=True)
class CommKey:
    """What collectives are counted by."""

    axis: str
    kind: str
    dtype: str


@dataclass(frozen=True)
class CommStats:
    """Collectives of one rank so far: (calls, bytes sent) per axis, kind and dtype.

    Bytes are what a rank sends under the bandwidth-optimal algorithm (see `boxing.route`), padding of
    uneven shards included.
    """

    counts: Mapping[CommKey, tuple[int, int]]

    def calls(self, kind: str | None = None, axis: str | None = None) -> int:
        """The number of calls, of one kind or axis or of all."""
        return sum(count[0] for key, count in self.counts.items() if _matches(key, kind, axis))

    def num_bytes(self, kind: str | None = None, axis: str | None = None) -> int:
        """The bytes sent, by one kind or along one axis or all."""
        return sum(count[1] for key, count in self.counts.items() if _matches(key, kind, axis))

    def text(self) -> str:
        """One line per axis, kind and dtype."""
        return "\n".join(
            f"{key.axis} {key.kind} {key.dtype}: {calls} calls, {num_bytes} bytes"
            for key, (calls, num_bytes) in sorted(self.counts.items())
        )


def _matches(key: CommKey, kind: str | None, axis: str | None) -> bool:
    return kind in (None, key.kind) and axis in (None, key.axis)


@dataclass
class _Counter:
    """Counts what one rank sends, from any thread."""

    axes: tuple[str, ...]
    counts: dict[CommKey, tuple[int, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, group: Group, kind: str, dtype: torch.dtype, num_bytes: int) -> None:
        key = CommKey(self.axes[group.axis], kind, str(dtype).removeprefix("torch."))
        with self.lock:
            calls, sent = self.counts.get(key, (0, 0))
            self.counts[key] = (calls + 1, sent + num_bytes)

    def snapshot(self) -> CommStats:
        with self.lock:
            return CommStats(dict(self.counts))


def _bytes_sent(kind: str, tensor: Tensor, group: Group) -> int:
    """What a rank that passes `tensor` to a collective sends."""
    others, size = group.size - 1, group.size
    num_bytes = tensor.numel() * tensor.dtype.itemsize
    if kind in ("send", "broadcast"):  # a broadcast passes it on, from one to the next
        return num_bytes
    if kind == "all_gather":
        return others * num_bytes
    if kind == "all_reduce":
        return -(-2 * others * num_bytes // size)
    assert kind == "reduce_scatter", kind
    return others * num_bytes // size


class SimTransport:
    """All ranks of a placement in one process: every member of a group is hosted, so nothing waits.

    Reductions go in axis order, in the tensors' own dtype.
    """

    board = None  # there is no other process to tell anything

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._counters = {rank: _Counter(placement.axes) for rank in placement.ranks}

    def stats(self, rank: int) -> CommStats:
        """What `rank` has sent so far."""
        return self._counters[rank].snapshot()

    def all_gather(self, tensors: Tensors, group: Group) -> dict[int, Tensor]:
        ordered = self._ordered(tensors, group, "all_gather")
        return {rank: torch.stack(ordered) for rank in group.ranks}

    def all_reduce(self, tensors: Tensors, op: str, group: Group) -> dict[int, Tensor]:
        total = reduce(self._ordered(tensors, group, "all_reduce"), op)
        return {rank: total.clone() for rank in group.ranks}

    def reduce_scatter(self, tensors: Tensors, op: str, group: Group) -> dict[int, Tensor]:
        ordered = self._ordered(tensors, group, "reduce_scatter")
        return {
            rank: reduce([tensor[index] for tensor in ordered], op).clone()
            for index, rank in enumerate(group.ranks)
        }

    def all_to_all(
        self,
        pieces: Mapping[int, Sequence[Tensor]],
        shapes: Mapping[int, Sequence[tuple[int, ...]]],
        group: Group,
    ) -> dict[int, list[Tensor]]:
        self._check(pieces, group)
        received: dict[int, list[Tensor]] = {}
        for index, rank in enumerate(group.ranks):
            received[rank] = [pieces[other][index].clone() for other in group.ranks]
            expected = [tuple(shape) for shape in shapes[rank]]
            got = [tuple(piece.shape) for piece in received[rank]]
            assert got == expected, f"rank {rank} expects pieces of {expected} and is sent {got}"
            own = pieces[rank]
            sent = sum(p.numel() * p.dtype.itemsize for i, p in enumerate(own) if i != index)
            self._counters[rank].add(group, "all_to_all", own[0].dtype, sent)
        return received

    def broadcast(self, tensors: Tensors, source: int, group: Group) -> dict[int, Tensor]:
        self._ordered(tensors, group, "broadcast")
        return {rank: tensors[source].clone() for rank in group.ranks}

    def send(
        self, tensors: Tensors, source: int, target: int, shape: tuple[int, ...], group: Group
    ) -> dict[int, Tensor]:
        assert set(tensors) == {source, target}, f"{source} to {target} is given those of {sorted(tensors)}"
        sent, expected = tensors[source], tensors[target].dtype
        assert (tuple(sent.shape), sent.dtype) == (shape, expected), (
            f"rank {target} expects {list(shape)} {expected} and is sent {list(sent.shape)} {sent.dtype}"
        )
        self._counters[source].add(group, "send", sent.dtype, _bytes_sent("send", sent, group))
        return {target: sent.clone()}

    def _check(self, tensors: Mapping[int, object], group: Group) -> None:
        assert set(tensors) == set(group.ranks), f"{group} is given tensors of ranks {sorted(tensors)}"

    def _ordered(self, tensors: Tensors, group: Group, kind: str) -> list[Tensor]:
        self._check(tensors, group)
        ordered = [tensors[rank] for rank in group.ranks]
        kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in ordered}
        assert len(kinds) == 1, f"{kind} of {group} is given different tensors: {kinds}"
        for rank in group.ranks:
            self._counters[rank].add(
                group, kind, tensors[rank].dtype, _bytes_sent(kind, tensors[rank], group)
            )
        return ordered


class DistTransport:
    """One rank of a placement in a torch.distributed run; it hosts that rank alone.

    It has process groups of its own, so that its collectives never meet those of anyone else. To make one is
    a collective of the whole world: every process makes one, also one whose rank is not in the placement.

    Gloo and NCCL both have every collective used here (reduce-scatter and all-to-all with uneven splits
    included, Gloo since torch 2.7). What they lack is dtypes: see `_carrier`.

    Args:
        link: see below, as seconds to start and for every byte sent; None for none.

    Attributes:
        board: where the ranks hear of each other's failures.
        link: a slower link to pretend, for benches: what the lane of every move sleeps once it is through,
            with the interpreter's lock given up.
    """

    def __init__(
        self, placement: Placement, rank: int, link: tuple[float, float] | None = SETTINGS.link_delay
    ) -> None:
        self.placement, self.rank = placement, rank
        self.link = None if link is None else LinkCost(*link)
        self.board = StoreBoard(number_of_groups())
        self._groups = {
            axis: _group_along(axis, placement, rank) for axis, size in enumerate(placement.shape) if size > 1
        }
        self._counter = _Counter(placement.axes)
        weakref.finalize(self, _leave, list(self._groups.values())).atexit = False

    def stats(self) -> CommStats:
        """What this rank has sent so far."""
        return self._counter.snapshot()

    def all_gather(self, tensors: Tensors, group: Group) -> dict[int, Tensor]:
        tensor = self._own(tensors)
        if group.size == 1:
            return {self.rank: tensor[None]}
        flat = _carrier(tensor).flatten()
        with self._sending(group, "all_gather", tensor):
            gathered = _wait(_COLLECTIVES.all_gather_into_tensor(flat, group.size, self._name(group)))
        stacked = gathered.view(tensor.dtype).view(group.size, *tensor.shape)
        return {self.rank: _reordered(stacked, self._seats(group))}

    def all_reduce(self, tensors: Tensors, op: str, group: Group) -> dict[int, Tensor]:
        tensor = self._own(tensors)
        if group.size == 1:
            return {self.rank: tensor}
        value, op = _reducible(tensor, op)
        with self._sending(group, "all_reduce", tensor):
            total = _wait(_COLLECTIVES.all_reduce(value, op, self._name(group)))
        return {self.rank: _restored(total, tensor.dtype)}

    def reduce_scatter(self, tensors: Tensors, op: str, group: Group) -> dict[int, Tensor]:
        tensor = self._own(tensors)
        if group.size == 1:
            return {self.rank: tensor[0]}
        value, op = _reducible(_reordered(tensor, _inverse(self._seats(group))).flatten(), op)
        with self._sending(group, "reduce_scatter", tensor):
            part = _wait(_COLLECTIVES.reduce_scatter_tensor(value, op, group.size, self._name(group)))
        return {self.rank: _restored(part, tensor.dtype).view(tensor.shape[1:])}

    def all_to_all(
        self,
        pieces: Mapping[int, Sequence[Tensor]],
        shapes: Mapping[int, Sequence[tuple[int, ...]]],
        group: Group,
    ) -> dict[int, list[Tensor]]:
        own = pieces[self.rank]
        if group.size == 1:
            return {self.rank: list(own)}
        dtype, me = own[0].dtype, group.ranks.index(self.rank)
        sent = sum(piece.numel() for i, piece in enumerate(own) if i != me) * dtype.itemsize
        seats = self._seats(group)
        members = _inverse(seats)
        carried = _carrier(torch.cat([own[member].flatten() for member in members]))
        width = dtype.itemsize // carried.dtype.itemsize
        counts = [math.prod(shapes[self.rank][member]) for member in members]
        self._counter.add(group, "all_to_all", dtype, sent)
        with self._linked("all_to_all", sent):
            received = _wait(
                _COLLECTIVES.all_to_all_single(
                    carried,
                    [count * width for count in counts],
                    [own[member].numel() * width for member in members],
                    self._name(group),
                )
            )
        parts = received.view(dtype).split(counts)
        pairs = zip(seats, shapes[self.rank], strict=True)
        return {self.rank: [parts[seat].view(shape) for seat, shape in pairs]}

    def broadcast(self, tensors: Tensors, source: int, group: Group) -> dict[int, Tensor]:
        tensor = self._own(tensors)
        if group.size == 1:
            return {self.rank: tensor}
        seat = self._seats(group)[group.ranks.index(source)]
        with self._sending(group, "broadcast", tensor):
            sent = _wait(_COLLECTIVES.broadcast(_carrier(tensor).flatten(), seat, self._name(group)))
        return {self.rank: sent.view(tensor.dtype).view(tensor.shape)}

    def send(
        self, tensors: Tensors, source: int, target: int, shape: tuple[int, ...], group: Group
    ) -> dict[int, Tensor]:
        tensor, pair = self._own(tensors), self._groups[group.axis]
        if self.rank == source:
            assert tuple(tensor.shape) == shape, f"{list(tensor.shape)} is to be sent as {list(shape)}"
            with self._sending(group, "send", tensor):
                _finished(dist.isend(_carrier(tensor), target, pair))
            return {}
        assert self.rank == target, f"rank {self.rank} takes part in a move from {source} to {target}"
        received = tensor.new_empty(shape)
        with self._linked("send", received.nbytes):
            _finished(dist.irecv(_carrier(received), source, pair))
        return {self.rank: received}

    def _own(self, tensors: Tensors) -> Tensor:
        assert set(tensors) == {self.rank}, f"rank {self.rank} is given tensors of ranks {sorted(tensors)}"
        return tensors[self.rank].contiguous()

    def _sending(self, group: Group, kind: Kind, tensor: Tensor) -> AbstractContextManager[None]:
        """Counts a move of a tensor that this rank passes; within it, the move is made."""
        num_bytes = _bytes_sent(kind, tensor, group)
        self._counter.add(group, kind, tensor.dtype, num_bytes)
        return self._linked(kind, num_bytes)

    def _linked(self, kind: Kind, num_bytes: int) -> AbstractContextManager[None]:
        """Within it a move is made, over the link that is pretended, if there is one."""
        return contextlib.nullcontext() if self.link is None else _slept(self.link.seconds(kind, num_bytes))

    def _name(self, group: Group) -> str:
        """The process group along an axis; functional collectives go by name."""
        group_along = self._groups[group.axis]
        assert group_along is not None, f"rank {self.rank} is not in {self.placement}"
        return group_along.group_name

    def _seats(self, group: Group) -> list[int]:
        """For each member, in axis order, its rank in the process group: torch sorts those."""
        ordered = dist.get_process_group_ranks(self._groups[group.axis])
        return [ordered.index(rank) for rank in group.ranks]


def _group_along(axis: int, placement: Placement, rank: int) -> dist.ProcessGroup | None:
    """The process group of a rank along an axis; every process makes those of all ranks."""
    own = None
    for ranks in dict.fromkeys(placement.group(axis, member) for member in placement.ranks):
        group = dist.new_group(sorted(ranks))
        own = group if rank in ranks else own
    return own  # pyright: ignore[reportReturnType]


def _leave(groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Gives back process groups, unless all of them have been."""
    for group in groups:
        with contextlib.suppress(ValueError):
            if group is not None:
                dist.destroy_process_group(group)


@contextlib.contextmanager
def _slept(seconds: float) -> Iterator[None]:
    yield
    time.sleep(seconds)


def _inverse(seats: Sequence[int]) -> list[int]:
    return [seats.index(i) for i in range(len(seats))]


def _reordered(stacked: Tensor, order: list[int]) -> Tensor:
    """The parts of the first dim in another order; the tensor itself if that is the order it has."""
    return stacked if order == list(range(len(order))) else stacked[order]


def _finished(work: dist.Work | None) -> None:
    """Waits for a point-to-point move of this rank."""
    assert work is not None, "this rank is not in the group that it sends or receives in"
    work.wait()


def _wait(tensor: Tensor) -> Tensor:
    return _COLLECTIVES.wait_tensor(tensor)


#: What every back end carries as it is.
_CARRIED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)


def _carrier(tensor: Tensor) -> Tensor:
    """The same bytes in a dtype that every back end can move."""
    tensor = tensor.contiguous()
    if tensor.dtype in _CARRIED:
        return tensor
    return tensor.flatten().view(torch.uint8)


def _reducible(tensor: Tensor, op: str) -> tuple[Tensor, str]:
    """The tensor in a dtype that every back end can reduce, and the op to reduce it with."""
    if tensor.dtype == torch.bool:  # 0 and 1 as bytes: a sum of truth values is their "or"
        return tensor.view(torch.uint8), "max" if op == "sum" else op
    if tensor.dtype in (torch.int8, torch.int16):
        return tensor.to(torch.int32), op
    return tensor, op


def _restored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The result of a reduction in the dtype it started from."""
    return tensor.view(dtype) if dtype == torch.bool else tensor.to(dtype)
