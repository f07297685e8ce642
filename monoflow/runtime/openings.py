"""When a step may begin to do what, while the step before it still runs.

The second of two steps is like any other, but that each of its tasks is closed until the step before has done
all its tasks before some place in program order. The places are worked out from the program alone:

    state     what the step before leaves is where the next one reads it: an input that is updated in place
              opens once its update and whoever reads that are done, any other once the step before is over
    lanes     moves of a channel, and the host's work, keep their order: after the last of the step before
    compute   only what depends on the batch alone, or prepares what is moved; the rest when the step is over:
              compute of two steps would hold what is needed inside of its tasks twice
    gates     nothing before it is known whether the step before changes state
    memory    the registers of both steps, with what moves work with, never hold more than those of one step
              do where program order fills them most: a plan's memory is enough for two steps

The step before waits for nothing of the next. So both end if one alone does, each with the numbers that it
has alone. `following` keeps to the places while steps run.
"""

from __future__ import annotations

from typing import NamedTuple

from .bounds import Bounds
from .channels import COMPUTE, HOST, Channel, lane_of
from .program import Program, Task

#: What carries moves where one order is that of all.
_ANY = Channel("moves")


class Openings(NamedTuple):
    """When a next step may do what: once all tasks before a place in program order are done.

    With n tasks, place n + 1 is when the step is over and its state is where it lives.

    Attributes:
        inputs: take its inputs, of which it has copies.
        tasks: fire its tasks; never earlier for a later task.
    """

    inputs: int
    tasks: tuple[int, ...]


def openings(program: Program, one_order: bool = False) -> Openings:
    """When a next step of a program may do what; all of it when the one before is over, if need be.

    Args:
        one_order: whether the moves of all channels go in one order, as one thread runs them.
    """
    over = len(program.tasks) + 1
    if not program.follows or program.units:
        return Openings(over, (over,) * len(program.tasks))
    bounds, order = Bounds(program, one_order), _Order(program, one_order)
    held = bounds.fresh
    gates = [task.index + 1 for task in program.tasks if not set(program.gates).isdisjoint(task.outputs)]
    first = place = _fitting(bounds, held, max(gates, default=0))
    places = []
    for task in program.tasks:
        held += bounds.needed[task.index]
        place = _fitting(bounds, held, max(place, order.place(task)))
        places.append(place)
    return Openings(first, tuple(places))


def _fitting(bounds: Bounds, held: int, place: int) -> int:
    """From when on, but not before a place, a next step may hold some bytes."""
    while place < len(bounds.rest) and held + bounds.rest[place] > bounds.in_order:
        place += 1
    return place


class _Order:
    """What a task may not overtake, its memory left aside."""

    def __init__(self, program: Program, one_order: bool) -> None:
        self.program, self.over = program, len(program.tasks) + 1
        self.lanes = [lane_of(task, program) for task in program.tasks]
        if one_order:
            self.lanes = [one if one in (COMPUTE, HOST) else _ANY for one in self.lanes]
        self.last = {lane: index + 1 for index, lane in enumerate(self.lanes)}
        self.kept = {port.register for port in program.outputs}
        #: Registers that depend on nothing but the batch.
        self.of_batch = {port.register for port in program.inputs if port.fresh}
        for task in program.tasks:
            if self.of_batch.issuperset(task.inputs):
                self.of_batch.update(task.outputs)
        self.left = self._left()

    def place(self, task: Task) -> int:
        """When a task may fire."""
        lane = self.lanes[task.index]
        if lane is not COMPUTE:
            place = self.last[lane]
        else:
            place = 0 if self.of_batch.issuperset(task.inputs) or self._prepares(task) else self.over
        return max(place, *(self.left.get(register, 0) for register in task.inputs), 0)

    def _prepares(self, task: Task) -> bool:
        """Whether moves alone read what a task makes."""
        readers = [index for register in task.outputs for index in self.program.consumers[register]]
        moved = all(self.lanes[index] is not COMPUTE for index in readers)
        return moved and self.kept.isdisjoint(task.outputs)

    def _left(self) -> dict[int, int]:
        """Per input register that the step before leaves anew, when it has."""
        writers = {register: task.index for task in self.program.tasks for register in task.outputs}
        left = {port.replaces: port.register for port in self.program.outputs if port.replaces}
        found: dict[int, int] = {}
        for port in self.program.inputs:
            register = left.get(port.name)
            if register is None or register == port.register:
                continue
            uses = (writers.get(register, -1), *self.program.consumers[register])
            found[port.register] = max(uses) + 1 if port.donated else self.over
        return found
