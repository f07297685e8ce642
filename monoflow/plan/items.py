"""What a schedule is made of: ops and moves, and the tensors that they read and make."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx

from ..boxing.route import LOCAL_KINDS, Move
from ..graph.step_graph import Output, Phase
from ..sbp.layout import NdSbp
from .rounds import Rounds, Unit


class LaidOut(NamedTuple):
    """A tensor of the graph (node and output index) in one layout; `phase` tells repeated gathers apart."""

    node: fx.Node
    index: int
    layout: NdSbp
    phase: str = ""

    @property
    def name(self) -> str:
        return f"{self.node.name}.{self.index}" if self.index else self.node.name


@dataclass(frozen=True)
class Op:
    """Run a node on tensors in these layouts.

    Attributes:
        walked: whether it is done for every micro-batch, not once a step.
        unit: with which work of a pipeline's stage it is done, if it is walked.
    """

    node: fx.Node
    inputs: tuple[LaidOut, ...]
    outputs: tuple[LaidOut, ...]
    phase: Phase
    walked: bool = False
    unit: Unit | None = None


@dataclass(frozen=True)
class Box:
    """One move of a route.

    Attributes:
        order: its number among all moves of the schedule that are not local.
        gives: whether this rank holds the source, in the part of the schedule that one rank runs.
        takes: whether it holds the target then.
        walked: whether it is done for every micro-batch, not once a step.
        folds: whether it puts micro-batches together: its target is there after the last one.
        bundle: the number of those that go as one collective, one after another in the schedule; -1 if alone.
        unit: with which work of a pipeline's stage it is done, if it is walked: on all ranks the same.
    """

    move: Move
    source: LaidOut
    target: LaidOut
    phase: Phase
    order: int = -1
    gives: bool = True
    takes: bool = True
    walked: bool = False
    folds: bool = False
    bundle: int = -1
    unit: Unit | None = None

    @property
    def inputs(self) -> tuple[LaidOut, ...]:
        return (self.source,) if self.gives else ()

    @property
    def outputs(self) -> tuple[LaidOut, ...]:
        return (self.target,) if self.takes else ()

    @property
    def is_local(self) -> bool:
        return self.move.kind in LOCAL_KINDS or self.move.mesh[self.move.axis] == 1


@dataclass(frozen=True)
class Schedule:
    """All ops and moves in one topological order, and where inputs come in and outputs leave.

    With micro-batches, what is walked stands together: what is before it is done before the first one, what
    is after it after the last.

    Attributes:
        rounds: how a pipeline's ranks go through the micro-batches.
    """

    items: tuple[Op | Box, ...]
    inputs: tuple[LaidOut, ...]
    outputs: tuple[tuple[Output, LaidOut], ...]
    rounds: Rounds | None = None

    @cached_property
    def gate(self) -> int:
        """How many items there are up to where all `checked` outputs are; state may change after them."""
        checked = {value for one, value in self.outputs if one.checked}
        makers = (at for at, item in enumerate(self.items, 1) if not checked.isdisjoint(item.outputs))
        return max(makers, default=0)
