"""Which moves run beside compute: their place in the order of a step, and which go together.

A rank's moves have lanes of their own (see `runtime.lanes`), so that a move hides behind compute that neither
makes what it moves nor reads it. Three things give it such compute:

- Parameters are gathered one bundle ahead of what first reads them.
- What is reduced for the updates alone, gradients most of all, is read one bundle later than it could be.
- Moves of one kind along one axis go together until starting a collective is a small part of it.

Each of them holds a bundle more than must be; where bytes are limited, nothing is arranged.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from ..boxing.bundle import BUNDLED_KINDS
from ..boxing.route import LinkCost
from ..graph.step_graph import Phase, metas_of
from ..sbp.layout import At

if TYPE_CHECKING:
    from .schedule import Box, LaidOut, Op

Items = Sequence["Op | Box"]

#: A bundle is full when what it costs to start its collective is no more than this part of its time.
_START = 0.2


def overlapped(
    items: Items,
    links: Sequence[LinkCost],
    prepared: set[fx.Node],
    gates: Collection[LaidOut] = (),
) -> list[Op | Box]:
    """The items of a schedule in an order in which moves hide behind compute, bundles marked.

    Args:
        links: what moves cost, per axis.
        prepared: parameters, and what ops that only prepare them make of them.
        gates: what updates wait for: its moves wait for nobody.
    """
    numbers = itertools.count()
    arranged: list[Op | Box] = []
    for _, part in itertools.groupby(items, key=lambda item: item.walked):
        arranged += _Part(list(part), links, prepared, numbers, gates).arranged()
    return arranged


class _Part:
    """Items that are done equally often."""

    def __init__(
        self,
        items: Items,
        links: Sequence[LinkCost],
        prepared: set[fx.Node],
        numbers: Iterator[int],
        gates: Collection[LaidOut],
    ) -> None:
        self.gates = gates
        self.items, self.links, self.prepared = items, links, prepared
        self.numbers = numbers
        self.made_by = {value: at for at, item in enumerate(items) for value in item.outputs}
        self.done: set[int] = set()
        self.result: list[Op | Box] = []
        self.bundle_of: dict[int, int] = {}  # the bundle that a reduction went with
        self.flushed: list[int] = []
        gathers = [at for at, item in enumerate(items) if self._is_gather(item)]
        self.ahead = self._bundles(gathers)
        self.num_ahead = 0
        self.reductions = self._reductions()
        self.waiting = self._waiting()

    def arranged(self) -> list[Op | Box]:
        """The items in their new order."""
        open_: dict[tuple, list[int]] = {}
        held: list[int] = []  # what reads a reduction, in order
        for at in range(len(self.items)):
            self._gather_ahead(at)
            if at in self.done:
                continue
            if at in self.waiting:
                held.append(at)
            elif at in self.reductions:
                bundle = open_.setdefault(self._key(at), [])
                bundle.append(at)
                if self._is_full(bundle):
                    self._flush(open_.pop(self._key(at)))
                    held = self._read(held, before=self.flushed[-1])
            else:
                self._do(at)
        for bundle in open_.values():
            self._flush(bundle)
        for at in held:
            self._do(at)
        return self.result

    # --- what may go where -------------------------------------------------------------------------

    def _is_gather(self, item: Op | Box) -> bool:
        move = getattr(item, "move", None)
        if move is None or item.is_local or move.kind not in BUNDLED_KINDS:  # type: ignore[union-attr]
            return False
        return item.source.node in self.prepared  # type: ignore[union-attr]

    def _reductions(self) -> set[int]:
        """Moves of which only updates read what they make."""
        late: set[int] = set()  # items that only updates read, and updates
        found: set[int] = set()
        readers: dict[int, list[int]] = {}
        for at, item in enumerate(self.items):
            for value in item.inputs:
                if value in self.made_by:
                    readers.setdefault(self.made_by[value], []).append(at)
        for at in reversed(range(len(self.items))):
            item = self.items[at]
            read_late = all(reader in late for reader in readers.get(at, ()))
            move = getattr(item, "move", None)
            passes_on = len(item.inputs) == 1 and not self._is_gather(item)  # such as a view of a gradient
            if item.phase is Phase.UPDATE or (passes_on and read_late):
                late.add(at)
            together = move is not None and not item.is_local and move.kind in BUNDLED_KINDS  # type: ignore[union-attr]
            is_gate = any(value in self.gates for value in item.outputs)
            if together and read_late and not is_gate and not item.folds:  # type: ignore[union-attr]
                found.add(at)
        return found

    def _waiting(self) -> set[int]:
        """What reads a reduction, or what such a reader makes."""
        found: set[int] = set()
        for at, item in enumerate(self.items):
            makers = {self.made_by[value] for value in item.inputs if value in self.made_by}
            if any(maker in found or maker in self.reductions for maker in makers):
                found.add(at)
        return found

    # --- bundles -----------------------------------------------------------------------------------

    def _bundles(self, moves: Sequence[int]) -> list[list[int]]:
        """Moves, in their order, as bundles; those of one phase, kind, axis, dtype and stage go together."""
        bundles: list[list[int]] = []
        for at in moves:
            last = bundles[-1] if bundles else None
            alike = last is not None and self._key(last[0]) == self._key(at)
            if last is None or not alike or self._is_full(last):
                bundles.append([at])
            else:
                last.append(at)
        return bundles

    def _key(self, at: int) -> tuple:
        item = self.items[at]
        move = item.move  # type: ignore[union-attr]
        stages = tuple((axis, one) for axis, one in enumerate(move.source) if isinstance(one, At))
        partial = move.source[move.axis] if move.kind != "all_gather" else None
        return item.phase, item.unit, move.kind, move.axis, self._dtype(at), partial, stages

    def _dtype(self, at: int) -> torch.dtype:
        source = self.items[at].source  # type: ignore[union-attr]
        meta = metas_of(source.node)[source.index]
        assert meta is not None, f"{source.name} is absent"
        return meta.dtype

    def _is_full(self, bundle: Sequence[int]) -> bool:
        """Whether more moves would not make the collective cheaper by much."""
        move = self.items[bundle[0]].move  # type: ignore[union-attr]
        link = self.links[move.axis]
        size = sum(self.items[at].move.num_bytes(self._dtype(at)) for at in bundle)  # type: ignore[union-attr]
        return link.seconds(move.kind, 1) <= _START * link.seconds(move.kind, size)

    # --- the new order -----------------------------------------------------------------------------

    def _do(self, at: int) -> None:
        if at not in self.done:
            self.done.add(at)
            self.result.append(self.items[at])

    def _go(self, bundle: Sequence[int]) -> int:
        """Does moves together; returns the bundle's number."""
        number = next(self.numbers)
        for at in bundle:
            self.done.add(at)
            self.result.append(replace(self.items[at], bundle=number))  # type: ignore[call-arg]
        return number

    def _gather_ahead(self, at: int) -> None:
        """Gathers what comes at this place if it is not there yet, and what comes next."""
        while self.num_ahead < len(self.ahead):
            number = self.num_ahead
            due = self.ahead[max(0, number - 1)][0]
            if due > at:
                return
            self.num_ahead += 1
            for move in self.ahead[number]:
                for value in self.items[move].inputs:
                    self._prepare(value)
            self._go(self.ahead[number])

    def _prepare(self, value: LaidOut) -> None:
        """What makes a parameter ready to be gathered."""
        at = self.made_by.get(value)
        if at is not None and at not in self.done:
            for one in self.items[at].inputs:
                self._prepare(one)
            self._do(at)

    def _flush(self, bundle: Sequence[int]) -> None:
        number = self._go(bundle)
        self.flushed.append(number)
        for at in bundle:
            self.bundle_of[at] = number

    def _read(self, held: Sequence[int], before: int) -> list[int]:
        """Does what reads only reductions of earlier bundles; returns the rest."""
        rest: list[int] = []
        moves: list[int] = []
        for at in held:
            makers = [self.made_by[value] for value in self.items[at].inputs if value in self.made_by]
            there = all(
                self.bundle_of[one] < before if one in self.bundle_of else one in self.done for one in makers
            )
            if not there:
                rest.append(at)
            elif at in self.reductions:
                moves.append(at)
            else:
                self._do(at)
        for bundle in self._bundles(sorted(moves, key=lambda at: str(self._key(at)))):
            self._flush(bundle)
        return rest
