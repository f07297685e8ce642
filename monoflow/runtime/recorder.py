"""What a trace is made of: a call for every firing."""

from __future__ import annotations

from typing import Protocol


class Recorder(Protocol):
    """Is told of every firing of an actor, from the thread that it ran on."""

    def record(
        self,
        lane: str,
        kind: str,
        name: str,
        rank: int,
        step: int,
        time: int,
        start_ns: int,
        end_ns: int,
        num_bytes: int,
    ) -> None:
        """One task fired.

        Args:
            lane: "compute", "host", or the channel of a move.
            kind: one of `program.Kind`.
            step, time: the number of the step of this engine, and of the micro-batch.
            start_ns, end_ns: `time.perf_counter_ns`.
            num_bytes: of what it wrote; of a rank that only sends, 0.
        """
        ...
