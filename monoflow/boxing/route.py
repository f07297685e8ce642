"""Routes: the cheapest sequence of single-axis moves between two nd-SBPs, its bytes and its cost.

Bytes are what one rank sends along the axis under the bandwidth-optimal (ring) algorithms, Chan et al.,
"Collective communication: theory, practice, and experience", 2007, section 3. With n ranks on the axis and
`full` the bytes of the tensor that the axis divides (the global tensor as cut by the other axes' splits):

    all-gather, reduce-scatter    (n - 1) / n * full
    all-reduce                    twice that
    all-to-all                    (n - 1) / n * full / n
    broadcast, send               full

Of uneven shards the largest counts, rounded up to whole bytes. Local moves send nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..errors import LayoutError
from ..sbp.layout import (
    At,
    B,
    Broadcast,
    NdSbp,
    Partial,
    Sbp,
    Split,
    first_holder,
    fits,
    local_dim,
    local_shape,
    text,
)
from ..sbp.signature import TensorMeta
from .curve import Curve

#: What a move does. "slice" (B -> S), "keep" (B -> P), "pad" (S -> P) and "drop" (B -> At) are local.
Kind = Literal[
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "send",
    "slice", "keep", "pad", "drop",
]  # fmt: skip

LOCAL_KINDS = ("slice", "keep", "pad", "drop")


class LinkCost(NamedTuple):
    """The cost of an axis: `alpha` seconds per phase of a collective, `beta` seconds per byte sent.

    An all-reduce has two phases (a reduce-scatter and an all-gather), the others one. Kinds that were
    measured have a curve, seconds by bytes, that says it instead.
    """

    alpha: float = 2e-5
    beta: float = 1e-9
    launch: float = 0.0
    curves: tuple[tuple[str, Curve], ...] = ()

    def seconds(self, kind: Kind, num_bytes: int) -> float:
        """The time of one move; local moves are free."""
        if kind in LOCAL_KINDS:
            return 0.0
        for measured, curve in self.curves:
            if measured == kind:
                return curve.seconds(num_bytes)
        return self.launch + self.alpha * (2 if kind == "all_reduce" else 1) + self.beta * num_bytes

    def scaled(self, factor: float) -> LinkCost:
        """The cost of an axis on which everything takes so many times as long."""
        curves = tuple((kind, curve.scaled(factor)) for kind, curve in self.curves)
        return LinkCost(self.alpha * factor, self.beta * factor, self.launch * factor, curves)


def collective_kind(source: Sbp, target: Sbp) -> Kind | None:
    """What takes an axis from one SBP to another in one move; None if equal, or if it takes several.

    Between partials, and between one stage and parts on all ranks, the way leads through B.
    """
    if source == target:
        return None
    if isinstance(source, At):
        return "send" if isinstance(target, At) else "broadcast" if isinstance(target, Broadcast) else None
    if isinstance(target, At):
        return "drop" if isinstance(source, Broadcast) else None
    if isinstance(source, Split):
        if isinstance(target, Split):
            return "all_to_all"
        return "all_gather" if isinstance(target, Broadcast) else "pad"
    if isinstance(source, Broadcast):
        return "slice" if isinstance(target, Split) else "keep"
    if isinstance(target, Partial):
        return None
    return "all_reduce" if isinstance(target, Broadcast) else "reduce_scatter"


def move_bytes(kind: Kind, full_bytes: int, axis_size: int) -> int:
    """The bytes that one rank sends along the axis; see the top of this file.

    Args:
        full_bytes: bytes of the tensor that the axis divides.
        axis_size: how many ranks the axis has.
    """
    if kind in LOCAL_KINDS or axis_size == 1:
        return 0
    others = axis_size - 1
    if kind in ("send", "broadcast"):
        return full_bytes
    if kind == "all_reduce":
        return -(-2 * others * full_bytes // axis_size)
    if kind == "all_to_all":
        return -(-others * full_bytes // (axis_size * axis_size))
    return -(-others * full_bytes // axis_size)


def copied_end(move: Move) -> int | None:
    """Which of its two tensors a move copies beside sending it: what comes in (0), or what goes out (1).

    Parts along the first dim lie one after the other; those along any other are copied out of the whole, or
    into it.
    """
    if move.kind not in ("all_gather", "reduce_scatter"):
        return None
    split = (move.source if move.kind == "all_gather" else move.target)[move.axis]
    assert isinstance(split, Split), move
    in_pieces = split.dim > 0 or split.blocks > 1
    return (1 if move.kind == "all_gather" else 0) if in_pieces else None


def axis_price(source: Sbp, target: Sbp, meta: TensorMeta, axis_size: int, link: LinkCost) -> float:
    """Seconds to go from one SBP to another along one axis, when other axes leave the tensor whole."""
    if source == target or axis_size == 1 or meta.numel == 0:
        return 0.0
    # Between partials of different ops there is no direct move: all-reduce, then keep (free).
    kind = collective_kind(source, target) or "all_reduce"
    return link.seconds(kind, move_bytes(kind, meta.num_bytes, axis_size))


def fits_mesh(shape: Sequence[int], sbp: NdSbp, mesh: Sequence[int]) -> bool:
    """Whether every rank's splits fit what the outer axes leave it of each dim."""
    sizes = [{extent} for extent in shape]
    for one, axis_size in zip(sbp, mesh, strict=True):
        if isinstance(one, At) and not 0 <= one.stage < axis_size:
            return False
        if not isinstance(one, Split):
            continue
        if not 0 <= one.dim < len(shape) or not all(fits(n, one, axis_size) for n in sizes[one.dim]):
            return False
        sizes[one.dim] = {local_dim(n, one, axis_size, i) for n in sizes[one.dim] for i in range(axis_size)}
    return True


@dataclass(frozen=True)
class Move:
    """One axis changes its SBP; the nd-SBPs before and after, for a tensor of global `shape`."""

    axis: int
    source: NdSbp
    target: NdSbp
    shape: tuple[int, ...]
    mesh: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        kind = collective_kind(self.source[self.axis], self.target[self.axis])
        assert kind is not None, f"no single move from {text(self.source)} to {text(self.target)}"
        return kind

    def group_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The shape that the axis divides, for the group of the rank at `coordinate`.

        (0,) where that group has no part in the tensor.
        """
        whole = (*self.source[: self.axis], B, *self.source[self.axis + 1 :])
        return local_shape(self.shape, whole, self.mesh, coordinate)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The bytes that a rank with the largest shards sends."""
        full = TensorMeta(self.group_shape(first_holder(self.source)), dtype).num_bytes
        return move_bytes(self.kind, full, self.mesh[self.axis])

    def __str__(self) -> str:
        return f"{text(self.source)} -> {text(self.target)} by {self.kind} on axis {self.axis}"


@dataclass(frozen=True)
class Route:
    """The cheapest way from one nd-SBP to another.

    `bytes` says per axis what a rank sends; `cost` is in seconds.
    """

    source: NdSbp
    target: NdSbp
    meta: TensorMeta
    mesh: tuple[int, ...]
    steps: tuple[Move, ...]
    bytes: tuple[int, ...]
    cost: float

    def text(self) -> str:
        """One line per step."""
        head = f"{self.meta} on {self.mesh}: {text(self.source)} -> {text(self.target)}"
        lines = [f"  {step}, {step.num_bytes(self.meta.dtype)} bytes" for step in self.steps]
        return "\n".join([head, *lines])


def route(
    source: NdSbp,
    target: NdSbp,
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: Sequence[int],
    links: Sequence[LinkCost] | None = None,
) -> Route:
    """The cheapest sequence of single-axis moves from `source` to `target`.

    Between them an axis takes the SBP it has in `source`, the one it has in `target`, B, or on a mesh of
    several axes a split that carries a shard over another axis: an all-reduce over two axes is a
    reduce-scatter on one, an all-reduce of the shard on the other and an all-gather, where that sends less.

    Args:
        shape, dtype: of the global tensor.
        mesh: how many ranks each axis has.
        links: the cost of every axis; alike when left out.

    Raises:
        LayoutError: `source` or `target` does not fit the tensor or the mesh.
    """
    meta, mesh = TensorMeta(tuple(shape), dtype), tuple(mesh)
    for sbp in (source, target):
        if len(sbp) != len(mesh):
            raise LayoutError(f"{text(sbp)} has {len(sbp)} axes, the mesh {mesh} has {len(mesh)}")
        if not fits_mesh(meta.shape, sbp, mesh):
            raise LayoutError(f"{text(sbp)} does not fit {meta} on a mesh of {mesh}")
    costs = tuple(links) if links is not None else (LinkCost(),) * len(mesh)
    steps = _shortest(tuple(source), tuple(target), meta, mesh, costs)
    sent = [0] * len(mesh)
    for step in steps:
        sent[step.axis] += step.num_bytes(dtype)
    seconds = sum(seconds_of(step, meta, costs) for step in steps)
    return Route(tuple(source), tuple(target), meta, mesh, steps, tuple(sent), seconds)


def price(
    source: NdSbp, target: NdSbp, meta: TensorMeta, mesh: Sequence[int], links: Sequence[LinkCost]
) -> float:
    """Seconds of the cheapest route. For one axis `axis_price` says the same without a search."""
    return route(source, target, meta.shape, meta.dtype, mesh, links).cost


def seconds_of(move: Move, meta: TensorMeta, links: Sequence[LinkCost]) -> float:
    """The time of one move of a tensor, given the cost of every axis."""
    if meta.numel == 0 or move.mesh[move.axis] == 1:
        return 0.0
    return links[move.axis].seconds(move.kind, move.num_bytes(meta.dtype))


def _shortest(
    source: NdSbp, target: NdSbp, meta: TensorMeta, mesh: tuple[int, ...], links: Sequence[LinkCost]
) -> tuple[Move, ...]:
    """Dijkstra over nd-SBPs; equal costs are decided by fewer steps, then by the order of discovery.

    There always is a path: from `source` to all B innermost axis first, and on to `target` outermost first.
    """
    order = itertools.count()
    queue: list[tuple[float, int, int, NdSbp, tuple[Move, ...]]] = [(0.0, 0, next(order), source, ())]
    done: set[NdSbp] = set()
    carrier = carriers(meta, mesh)
    on_axis = [dict.fromkeys((then, B, now, *carrier)) for now, then in zip(source, target, strict=True)]
    while queue:
        cost, length, _, state, path = heapq.heappop(queue)
        if state == target:
            return path
        if state in done:
            continue
        done.add(state)
        for move in single_moves(state, on_axis, meta, mesh):
            if move.target not in done:
                total = cost + seconds_of(move, meta, links)
                heapq.heappush(queue, (total, length + 1, next(order), move.target, (*path, move)))
    raise AssertionError(f"no route from {text(source)} to {text(target)} for {meta} on {mesh}")


def carriers(meta: TensorMeta, mesh: Sequence[int]) -> tuple[Split, ...]:
    """The split in which a shard is carried over another axis: the first dim that is even on all of them."""
    size = math.prod(mesh)
    even = (dim for dim, extent in enumerate(meta.shape) if extent and extent % size == 0)
    return tuple(Split(dim) for dim in itertools.islice(even, 1)) if len(mesh) > 1 else ()


def single_moves(
    state: NdSbp, on_axis: Sequence[Iterable[Sbp]], meta: TensorMeta, mesh: tuple[int, ...]
) -> Iterator[Move]:
    """The legal moves of one axis from `state` to any SBP that `on_axis` names for it."""
    for axis, now in enumerate(state):
        for then in on_axis[axis]:
            if collective_kind(now, then) is None or not _is_legal(state, axis, then, mesh):
                continue
            after = (*state[:axis], then, *state[axis + 1 :])
            if fits_mesh(meta.shape, after, mesh):
                yield Move(axis, state, after, meta.shape, mesh)


def _is_legal(state: NdSbp, axis: int, then: Sbp, mesh: Sequence[int]) -> bool:
    """Whether no inner axis depends on what this axis gives up or takes on.

    An inner split cuts what an outer one of the same dim left: to change the outer one would move the inner
    cuts too. And an outer sum of inner maxima is not the maximum of the sums.
    """
    dims = {one.dim for one in (state[axis], then) if isinstance(one, Split)}
    ops = {one.op for one in (state[axis], then) if isinstance(one, Partial)}
    for one, size in zip(state[axis + 1 :], mesh[axis + 1 :], strict=True):
        if size == 1:
            continue
        if isinstance(one, Split) and one.dim in dims:
            return False
        if isinstance(one, Partial) and ops - {one.op}:
            return False
    return True
