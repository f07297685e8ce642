"""Which actor feeds which, as data beside a trace: what is needed of a Program to read its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from .program import Program, Rate, Task


@dataclass(frozen=True)
class ActorInfo:
    """A task, as it was planned.

    Attributes:
        inputs, outputs: numbers of registers; each input once.
        micro: whether it fires for every micro-batch.
        order: of a move, its place among all; -1 for other tasks.
        group: of a move, the ranks that take part.
    """

    name: str
    phase: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    micro: bool
    order: int = -1
    group: tuple[int, ...] = ()


@dataclass(frozen=True)
class RegisterInfo:
    """A register: its slots, and the bytes of one of them.

    Attributes:
        micro: whether it is filled for every micro-batch.
    """

    name: str
    num_bytes: int
    slots: int
    micro: bool


@dataclass(frozen=True)
class Wiring:
    """Actors and registers of one rank's program.

    Attributes:
        is_pulled: whether the rank walks what it pulls, in every step another number of micro-batches.
    """

    program: str
    rank: int
    micro_batches: int
    actors: tuple[ActorInfo, ...]
    registers: tuple[RegisterInfo, ...]
    is_pulled: bool = False

    @staticmethod
    def of(name: str, program: Program) -> Wiring:
        """The wiring of a program; `name` tells it from others of the same job."""
        where = program.placement

        def actor(task: Task) -> ActorInfo:
            axis = where.num_axes if task.move is None else task.move.axis
            group = where.group(axis, program.rank) if axis < where.num_axes else ()
            inputs = tuple(dict.fromkeys(task.inputs))
            micro = task.rate is Rate.MICRO
            return ActorInfo(task.name, task.phase, inputs, task.outputs, micro, task.order, group)

        registers = tuple(
            RegisterInfo(one.name, one.num_bytes // one.slots, one.slots, one.rate is Rate.MICRO)
            for one in program.registers
        )
        actors = tuple(map(actor, program.tasks))
        return Wiring(name, program.rank, program.micro_batches, actors, registers, program.units > 0)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per register, the actors that read it."""
        found: list[list[int]] = [[] for _ in self.registers]
        for index, actor in enumerate(self.actors):
            for register in actor.inputs:
                found[register].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def writers(self) -> Mapping[int, int]:
        """Per register that an actor fills, that actor."""
        return {register: index for index, actor in enumerate(self.actors) for register in actor.outputs}

    def register_class(self, register: int) -> str:
        """From which phase to which a register carries; "forward -> backward" is kept for backward."""
        writer = self.writers.get(register)
        source = self.actors[writer].phase if writer is not None else "input"
        readers = self.readers[register]
        target = self.actors[readers[-1]].phase if readers else "result"
        return f"{source} -> {target}"

    def as_data(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Wiring:
        """What `as_data` gave. Raises KeyError or TypeError if it did not."""
        actors = tuple(
            ActorInfo(**{**one, **{key: tuple(one[key]) for key in ("inputs", "outputs", "group")}})
            for one in data["actors"]
        )
        registers = tuple(RegisterInfo(**one) for one in data["registers"])
        program, rank, num = data["program"], data["rank"], data["micro_batches"]
        return Wiring(program, rank, num, actors, registers, data.get("is_pulled", False))
