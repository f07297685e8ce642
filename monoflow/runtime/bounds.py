"""How many bytes a step's registers hold: task by task, and in any timing that the program allows."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence

from .channels import COMPUTE, Channel, lane_of
from .pace import paced
from .program import Program, Rate, Task


class Bounds:
    """Bytes of a step's registers, without inputs that live outside it, and what is updated there.

    Args:
        one_order: whether the moves of all channels go in one order, as one thread runs them.

    Attributes:
        outside: bytes of the inputs that live outside.
        fresh: of those that every step has a copy of.
        needed: per task, of what it fills, and of what it works with if it is a move.
        in_order: the most that is held if tasks fire one after the other, in program order.
        rest: per place in program order, the most that is held once all before it is done, in any timing.
    """

    def __init__(self, program: Program, one_order: bool) -> None:
        self.program, self.end = program, len(program.tasks)
        donated = {port.name for port in program.inputs if port.donated}
        outside = {port.register for port in program.inputs if not port.fresh}
        outside |= {port.register for port in program.outputs if port.replaces in donated}
        self.outside = sum(program.registers[p.register].num_bytes for p in program.inputs if not p.fresh)
        self.sizes = [0 if one.index in outside else one.num_bytes for one in program.registers]
        self.fresh = sum(self.sizes[port.register] for port in program.inputs)
        self.needed = [self._bytes(task.outputs) + self._workspace(task) for task in program.tasks]
        left = self._left()
        self.in_order = max(map(operator.add, left, self.needed), default=0)
        self.rest = self._rest(left, _needs(program, one_order))

    def _bytes(self, registers: Iterable[int]) -> int:
        return sum(self.sizes[register] for register in registers)

    def _workspace(self, task: Task) -> int:
        """What a move works with: at most a copy of what it reads or makes."""
        if task.move is None or lane_of(task, self.program) is COMPUTE:
            return 0
        sizes = [one.num_bytes for one in self.program.registers]
        return max(sum(sizes[one] for one in task.inputs), sum(sizes[one] for one in task.outputs))

    def _left(self) -> list[int]:
        """Per place: what all tasks before it leave for those after, and for the outside."""
        program, changes = self.program, [0] * (self.end + 2)
        written = {register: task.index for task in program.tasks for register in task.outputs}
        kept = {port.register for port in program.outputs}
        explains = bool(
            program.gates
        )  # a step that changes nothing may be done again, to see why, by some policies
        for register, size in enumerate(self.sizes):
            first = written.get(register, -1)
            last = (
                self.end
                if register in kept or (explains and first < 0)
                else max(program.consumers[register], default=-1)
            )
            if first < last:
                changes[first + 1] += size
                changes[last + 1] -= size
        return list(itertools.accumulate(changes[: self.end + 1]))

    def _rest(self, left: Sequence[int], needs: Sequence[int]) -> list[int]:
        """As long as the first of the tasks that are not done is not, nothing that needs it has begun."""
        tasks, rest = self.program.tasks, [left[self.end]]
        for first in reversed(tasks):
            begun = sum(
                self.needed[one.index]
                for one in tasks[first.index :]
                if not needs[one.index] >> first.index & 1 or first.rate is one.rate is Rate.MICRO
            )
            rest.append(max(rest[-1], left[first.index] + begun))
        return rest[::-1]


def _needs(program: Program, one_order: bool) -> list[int]:
    """Per task, a bit for each that is done before it begins; where both have rate MICRO, before it ends."""
    writers = {register: task.index for task in program.tasks for register in task.outputs}
    before = [
        {*task.after, *(writers[register] for register in task.inputs if register in writers)}
        for task in program.tasks
    ]
    pairs = [] if one_order else list(paced(program))
    moves = sorted((task for task in program.tasks if task.move is not None), key=lambda task: task.order)
    last: dict[Channel, int] = {}
    for task in moves:
        lane = lane_of(task, program)
        if lane is not COMPUTE:
            pairs.append((last.get(lane, task.index), task.index))
            last[lane] = task.index
    for earlier, later in pairs:
        if earlier < later:
            before[later].add(earlier)
    needs: list[int] = []
    for own in before:
        needs.append(functools.reduce(operator.or_, (needs[one] | 1 << one for one in own), 0))
    return needs
