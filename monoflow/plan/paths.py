"""Paths: the moves that bring a tensor from one layout of a plan to another, along devices and along time.

Along time there are two moves: a slice of what is whole, which is local, and the way back, which waits for
the last micro-batch. Partials and parts are put together over time before devices exchange them, so that this
happens once a step; what is whole is exchanged before it is sliced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..boxing.route import Move, Route, route
from ..sbp.layout import B, Broadcast, NdSbp, Sbp, Split, local_dim
from ..sbp.signature import TensorMeta
from .plan import Plan
from .when import arriving


class Paths:
    """Routes between layouts of a plan's tensors, remembered."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._known: dict[tuple[NdSbp, NdSbp, TensorMeta], Route] = {}

    def of(self, source: NdSbp, target: NdSbp, meta: TensorMeta) -> Route:
        """The moves from one layout to another.

        Args:
            meta: of the whole tensor.
        """
        key = (source, target, meta)
        if key not in self._known:
            find = self._with_time if self.plan.has_time else self._over_devices
            self._known[key] = find(source, target, meta)
        return self._known[key]

    def _over_devices(self, source: NdSbp, target: NdSbp, meta: TensorMeta) -> Route:
        return route(source, target, meta.shape, meta.dtype, self.plan.placement.shape, self.plan.links)

    def _with_time(self, source: NdSbp, target: NdSbp, meta: TensorMeta) -> Route:
        shape, last = self.plan.placement.shape, len(source) - 1
        given, wanted = source[:-1], target[:-1]
        first: list[Move] = []
        then: list[Move] = []
        time = source[-1]
        if arriving(time, given, wanted, shape) != target[-1]:
            if isinstance(target[-1], Broadcast):
                time, middle = B, (*given, B)
                first.append(Move(last, source, middle, meta.shape, self.plan.mesh))
            else:
                assert isinstance(time, Broadcast), f"{meta} cannot move from {source} to {target} in time"
                then.append(Move(last, (*wanted, B), target, meta.shape, self.plan.mesh))
        within = self._over_devices(given, wanted, self._of_micro_batch(meta, given, time))
        moves = list(self._timed(within.steps, given, time, meta))
        if any(None in (*move.source, *move.target) for move in moves):
            chain = list(self._one_by_one(given, wanted, meta.shape))
            moves = list(self._timed(chain, given, time, meta))
        return Route(
            source, target, meta, self.plan.mesh, (*first, *moves, *then), (*within.bytes, 0), within.cost
        )

    def _of_micro_batch(self, meta: TensorMeta, given: NdSbp, time: Sbp) -> TensorMeta:
        """What all devices together have of a tensor in the first micro-batch."""
        if not isinstance(time, Split):
            return meta
        parts = 1
        for one, size in zip(given, self.plan.placement.shape, strict=True):
            parts *= size if isinstance(one, Split) and one.dim == time.dim else 1
        held = local_dim(meta.shape[time.dim] // parts, time, self.plan.micro_batches, 0)
        shape = (*meta.shape[: time.dim], parts * held, *meta.shape[time.dim + 1 :])
        return TensorMeta(shape, meta.dtype)

    def _timed(self, steps: Sequence[Move], given: NdSbp, time: Sbp, meta: TensorMeta) -> Iterator[Move]:
        """Moves between devices as moves of the whole mesh; None along time where no name says how."""
        mesh = self.plan.placement.shape
        for step in steps:
            source = (*step.source, arriving(time, given, step.source, mesh))
            target = (*step.target, arriving(time, given, step.target, mesh))
            yield Move(step.axis, source, target, meta.shape, self.plan.mesh)  # pyright: ignore

    def _one_by_one(self, given: NdSbp, wanted: NdSbp, shape: tuple[int, ...]) -> Iterator[Move]:
        """Every axis by itself: to B from the innermost on, and then to what is wanted."""
        state, mesh = given, self.plan.placement.shape
        axes = [axis for axis, (now, then) in enumerate(zip(given, wanted, strict=True)) if now != then]
        for axis, one in (*((axis, B) for axis in reversed(axes)), *((axis, wanted[axis]) for axis in axes)):
            after = (*state[:axis], one, *state[axis + 1 :])
            if after != state:
                yield Move(axis, state, after, shape, mesh)
            state = after
