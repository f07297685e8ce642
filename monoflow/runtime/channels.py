"""Channels: what carries moves, and the order in which each carries them, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ..boxing.route import LOCAL_KINDS
from ..mesh import Placement
from .program import HOST_KINDS, Program, Rate, Task


class Channel(NamedTuple):
    """Where an actor runs: compute, host, or what carries a move.

    A group of ranks along an axis is one channel; so is each direction between two ranks, or else backward of
    one micro-batch would have to come back before forward of the next goes out.

    Attributes:
        axis: the axis of the placement.
        ends: the ranks that a move goes between, if it goes from one to another.
    """

    kind: str
    axis: int = -1
    ends: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.axis < 0:
            return self.kind
        return f"{self.kind} on axis {self.axis}" + (
            "" if self.ends is None else f" from {self.ends[0]} to {self.ends[1]}"
        )


class HasTask(Protocol):
    """Who runs a task."""

    @property
    def task(self) -> Task: ...


T = TypeVar("T", bound=HasTask)

COMPUTE, HOST = Channel("compute"), Channel("host")


def channel_of(task: Task, placement: Placement, rank: int) -> Channel:
    """What a task of a rank runs on; moves that need no other rank are computed."""
    move = task.move
    if move is None or move.kind in LOCAL_KINDS:
        return COMPUTE
    if move.axis == placement.num_axes or placement.shape[move.axis] == 1:
        return COMPUTE
    if move.kind == "send":
        group = placement.group(move.axis, rank)
        source, target = (group[sbp[move.axis].stage] for sbp in (move.source, move.target))  # type: ignore[union-attr]
        return Channel("send", move.axis, (source, target))
    return Channel("collectives", move.axis)


def lane_of(task: Task, program: Program) -> Channel:
    """Where a task of a program runs: compute, host, or the channel of a move."""
    return HOST if task.kind in HOST_KINDS else channel_of(task, program.placement, program.rank)


def turns(actors: Sequence[T], micro_batches: int, by_rank: bool) -> Iterator[T]:
    """The moves of a channel in the order in which they go in a step.

    First those of the prologue, by their number; then the walked ones, by their turns and their number; then
    the rest.

    Args:
        by_rank: whether the moves are of one rank's work, so that tasks' turns say when; else they go
            micro-batch by micro-batch.
    """
    ordered = sorted(actors, key=lambda actor: actor.task.order)
    walked = [actor for actor in ordered if actor.task.rate is Rate.MICRO]
    first = walked[0].task.order if walked else -1
    once = [actor for actor in ordered if actor.task.rate is Rate.STEP]
    yield from (actor for actor in once if actor.task.order < first)
    due = (
        (actor.task.turn(time) if by_rank else time, actor.task.order, actor)
        for time in range(micro_batches)
        for actor in walked
    )
    yield from (actor for _, _, actor in sorted(due, key=lambda one: one[:2]))
    yield from (actor for actor in once if actor.task.order > first)
