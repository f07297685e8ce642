"""Backward of a stage sends first: what a send does not need is computed after it.

The stage before waits for the gradient of what it sent; nobody waits for the gradients of weights before the
last micro-batch. With these after the send, the way back through the stages takes the first alone, and the
stages that it reaches later idle for less (after Qi et al., "Zero Bubble Pipeline Parallelism", 2023). What
the gradients of weights read is held until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.step_graph import Phase
from ..sbp.layout import At, NdSbp
from .items import Box, LaidOut, Op

_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)

#: The axes along which a tensor lies at one stage, and which.
Stage = tuple[tuple[int, int], ...]


def sends_first(items: Sequence[Op | Box]) -> list[Op | Box]:
    """The items with backward ops of what is walked held until a move reads what they lead to.

    After the last move that leaves a stage in backward, the rest of what was held there follows in its order.
    """
    leaving: dict[Stage, int] = {}  # the last move that leaves a stage
    for at, item in enumerate(items):
        if _is_backward(item) and isinstance(item, Box) and _leaves(item):
            leaving[_stage(item.source.layout)] = at
    return _Order(items, leaving).ordered() if leaving else list(items)


class _Order:
    def __init__(self, items: Sequence[Op | Box], leaving: dict[Stage, int]) -> None:
        self.items, self.leaving = items, leaving
        self.made_by = {value: at for at, item in enumerate(items) for value in item.outputs}
        self.held: dict[int, None] = {}
        self.result: list[Op | Box] = []

    def ordered(self) -> list[Op | Box]:
        """The items in their new order."""
        for at, item in enumerate(self.items):
            stage = _stage_of(item)
            waits = _is_backward(item) and stage in self.leaving and at < self.leaving[stage]
            if waits and not (isinstance(item, Box) and _leaves(item)):
                self.held[at] = None
                continue
            self._do(at)
            if self.leaving.get(stage) == at:
                for one in [one for one in self.held if _stage_of(self.items[one]) == stage]:
                    self._do(one)
        assert not self.held, f"{len(self.held)} items are held for moves that do not come"
        return self.result

    def _do(self, at: int) -> None:
        """An item, after what it reads of those that are held."""
        stack, needed = [at], set()
        while stack:
            one = stack.pop()
            if one not in needed:
                needed.add(one)
                makers = (self.made_by.get(value) for value in self.items[one].inputs)
                stack += [maker for maker in makers if maker is not None and maker in self.held]
        for one in sorted(needed):
            if one == at or one in self.held:
                self.held.pop(one, None)
                self.result.append(self.items[one])


def _is_backward(item: Op | Box) -> bool:
    return item.walked and item.phase in _BACKWARD


def _leaves(box: Box) -> bool:
    """Whether a move takes a tensor from its stage to others."""
    return box.move.kind in ("send", "broadcast")


def _stage_of(item: Op | Box) -> Stage:
    """Where an item is done; of a move from stage to stage, where it comes from."""
    values: Sequence[LaidOut] = (item.source,) if isinstance(item, Box) else item.outputs or item.inputs
    return _stage(values[0].layout) if values else ()


def _stage(layout: NdSbp) -> Stage:
    return tuple((axis, one.stage) for axis, one in enumerate(layout) if isinstance(one, At))
