"""What a trace is made of: a record of every firing."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Fired(NamedTuple):
    """One task fired.

    Attributes:
        lane: "compute", "host", or the channel of a move.
        kind: one of `program.Kind`.
        step, time: the number of the step of this engine, and of the micro-batch.
        start, end: `time.perf_counter_ns`.
        num_bytes: of what it wrote; of a rank that only sends, 0.
    """

    lane: str
    kind: str
    name: str
    rank: int
    step: int
    time: int
    start: int
    end: int
    num_bytes: int


class Recorder(Protocol):
    """Is told of every firing of an actor, from the thread that it ran on."""

    def record(self, fired: Fired) -> None:
        """One task fired."""
        ...
