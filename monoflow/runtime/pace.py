"""How far moves and compute of a rank may run apart, where each has a lane of its own.

Program order is the order in which the plan's memory was added up. A collective starts when the compute
before it in that order is done, so that what it makes is not there sooner than planned. Compute starts when
the collectives before the last BESIDE compute tasks are done: what they read is held for so many of them, not
for all that follow. What goes between two stages keeps to the slots of its registers alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..boxing.bundle import BESIDE, BUNDLED_KINDS
from .program import Program, Task


def paced(program: Program) -> Iterator[tuple[int, int]]:
    """Pairs of tasks, by their index, of which the second waits until the first is done."""
    compute = -1  # the compute task before
    since: list[list[int]] = [[]]  # collectives since it; before them, those between it and the one before
    for task in program.tasks:
        if _is_collective(task, program):
            if compute >= 0:
                yield compute, task.index
            since[-1].append(task.index)
        elif task.compute is not None:
            if len(since) > BESIDE:
                for move in since.pop(0):
                    yield move, task.index
            compute = task.index
            since.append([])


def _is_collective(task: Task, program: Program) -> bool:
    move, placement = task.move, program.placement
    return (
        move is not None
        and move.kind in (*BUNDLED_KINDS, "all_to_all")
        and move.axis < placement.num_axes
        and placement.shape[move.axis] > 1
    )
