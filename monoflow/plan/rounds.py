"""In which order a rank of a pipeline would do its work, were nothing ever late.

A rank has one stage or several, its chunks: stage s lies at rank s mod p. It goes through the micro-batches
in rounds of p, chunk after chunk: forward from its first chunk to its last, backward the other way (Narayanan
et al., "Efficient large-scale language model training on GPU clusters", 2021). Forward is ahead of backward
by as much as the stages in between take; then one forward and one backward take turns.
Where the gradients of weights wait, they do so for as many backward as the rank has ranks before it, which
are the bubbles that they are to fill (Qi et al., "Zero bubble pipeline parallelism", 2023, ZB-H1).

Nothing makes a rank keep to that order. Of what could be done the first in it goes, and there is room for as
many micro-batches as it has under way: slots and priorities are all that a schedule is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What is done of a stage. Weights: the part of backward that no other stage waits for."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2


class Unit(NamedTuple):
    """What is done of a stage on a micro-batch, in one go."""

    kind: Kind
    stage: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Sorts units in the order in which a micro-batch goes through them."""
        forward = self.kind is Kind.FORWARD
        return (0, self.stage, 0) if forward else (1, -self.stage, int(self.kind))


@dataclass(frozen=True)
class Rounds:
    """A pipeline.

    Attributes:
        axis: of the placement, whose ranks the stages lie at.
        ranks: of the axis.
        stages: a multiple of `ranks`.
        zero_bubble: whether the gradients of weights wait for later micro-batches.
    """

    axis: int
    ranks: int
    stages: int
    micro_batches: int
    zero_bubble: bool = False

    @property
    def chunks(self) -> int:
        """The stages of a rank."""
        return self.stages // self.ranks

    def rank_of(self, unit: Unit) -> int:
        """Where it is done."""
        return unit.stage % self.ranks

    def turn(self, unit: Unit, time: int) -> int:
        """The place of a micro-batch's unit among all that its rank does."""
        return 3 * (self._index(unit, time) + self._behind(unit)) + int(unit.kind)

    def turns(self, unit: Unit) -> tuple[int, ...]:
        """Of every micro-batch."""
        return tuple(self.turn(unit, time) for time in range(self.micro_batches))

    @property
    def end(self) -> int:
        """A turn that is after all others."""
        last = self.micro_batches * self.chunks + self.ahead(0) + self.ranks
        return 3 * last

    def live(self, first: Unit, last: Unit) -> int:
        """The most micro-batches that a rank has begun `first` of, and not ended `last`."""
        begins, ends = self.turns(first), self.turns(last)
        ended, most = 0, 0
        for time, begin in enumerate(begins):
            while ended < time and ends[ended] < begin:
                ended += 1
            most = max(most, time + 1 - ended)
        return most

    def ahead(self, rank: int) -> int:
        """By how many units forward is ahead of backward."""
        hops = self.ranks - 1 - rank
        if self.chunks == 1:
            return hops
        return 2 * hops + (self.chunks - 1) * min(self.ranks, self.micro_batches)

    def delay(self, rank: int) -> int:
        """For how many backward units the gradients of weights wait."""
        return rank if self.zero_bubble else 0

    def lets_first(self, unit: Unit) -> int:
        """How many backward units gradients of weights let go first: those that they wait for.

        That backward may be a little late for gradients of weights that could have waited makes all stages
        before it late; with several stages a rank there is other work in between.
        """
        return self.delay(self.rank_of(unit)) if unit.kind is Kind.WEIGHTS and self.chunks == 1 else 0

    def _index(self, unit: Unit, time: int) -> int:
        """The number of a unit among all of its kind."""
        chunk = unit.stage // self.ranks
        if unit.kind is not Kind.FORWARD:
            chunk = self.chunks - 1 - chunk
        start = time - time % self.ranks
        size = min(self.ranks, self.micro_batches - start)
        return start * self.chunks + chunk * size + time - start

    def _behind(self, unit: Unit) -> int:
        """By how many units of its kind a unit is behind forward."""
        rank = self.rank_of(unit)
        if unit.kind is Kind.FORWARD:
            return 0
        return self.ahead(rank) + (self.delay(rank) if unit.kind is Kind.WEIGHTS else 0)
