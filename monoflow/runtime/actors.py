"""The engine: every task of every rank that this process hosts is an actor.

An actor fires when its input registers are full and the actors that it must come after are done. A register
is free again as soon as the last of its readers has taken it. Of those that could fire, the one that comes
first in program order does: memory is then what the plan's schedule says it is (to gather every parameter at
once, because all of them are there, would fill it). Results do not depend on that order, but for collectives:
they fire in program order, the same on every rank. They block, so one order for all of them, whatever their
axis, is what keeps data-driven firing from deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from ..boxing.collectives import Transport, apply_move
from ..mesh import Placement
from .program import Program, Task

#: Describes a failing op of a task for the user: node name -> "module, file:line".
Describe = Callable[[str], str]


@dataclass(frozen=True, eq=False)
class _Actor:
    """One task of one rank, with registers by their number in the engine.

    Attributes:
        reads: the registers that it reads, each once.
        waiters: the actors that must come after this one.
    """

    rank: int
    task: Task
    inputs: tuple[int, ...]
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    waiters: tuple[int, ...]


class Engine:
    """Runs the programs of the ranks that this process hosts: one in a job of processes, all in a simulation.

    What does not change between steps is worked out here, once: who reads and who waits for what.

    Args:
        programs: by rank.
        transport: how tensors cross ranks.
        describe: names the origin of a graph node in error messages.
    """

    def __init__(
        self, programs: Mapping[int, Program], placement: Placement, transport: Transport, describe: Describe
    ) -> None:
        self.programs, self.placement = programs, placement
        self.transport, self.describe = transport, describe
        self.actors: list[_Actor] = []
        self.consumers: list[tuple[int, ...]] = []  # actors that read a register
        self.readers_left: list[int] = []  # reads of a register in one step, the outside's included
        self.missing: list[int] = []  # what an actor waits for once the program's inputs are filled
        self.filled: dict[int, tuple[int, ...]] = {}
        self.taken: dict[int, tuple[int, ...]] = {}
        self.turns = _one_order(programs)
        for rank, program in programs.items():
            self._hire(rank, program)
        self.first = [number for number, missing in enumerate(self.missing) if not missing]

    def _hire(self, rank: int, program: Program) -> None:
        actor_base, base = len(self.actors), len(self.consumers)
        waiters: list[list[int]] = [[] for _ in program.tasks]
        given = {port.register for port in program.inputs}
        for task in program.tasks:
            for earlier in task.after:
                waiters[earlier].append(actor_base + task.index)
        for task in program.tasks:
            distinct = dict.fromkeys(task.inputs)
            self.actors.append(
                _Actor(
                    rank,
                    task,
                    tuple(base + register for register in task.inputs),
                    tuple(base + register for register in distinct),
                    tuple(base + register for register in task.outputs),
                    tuple(waiters[task.index]),
                )
            )
            self.missing.append(sum(register not in given for register in distinct) + len(task.after))
        self.filled[rank] = tuple(base + port.register for port in program.inputs)
        self.taken[rank] = tuple(base + port.register for port in program.outputs)
        kept = {port.register for port in program.outputs}
        for register, consumers in enumerate(program.consumers):
            self.consumers.append(tuple(actor_base + index for index in consumers))
            self.readers_left.append(len(consumers) + (register in kept))

    def run(self, inputs: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """One step: tensors for every program's input ports to tensors of its output ports, by rank."""
        run = _Run(self)
        for rank in list(inputs):
            run.fill(self.filled[rank], inputs[rank])
        del inputs  # so that registers hold the only references
        with torch.no_grad():
            run.drive()
        return {rank: run.take(registers) for rank, registers in self.taken.items()}


def _one_order(programs: Mapping[int, Program]) -> tuple[int, ...]:
    """The moves' numbers in program order, which all ranks share."""
    orders = {
        rank: tuple(task.order for task in program.tasks if task.move is not None)
        for rank, program in programs.items()
    }
    first = next(iter(orders.values()), ())
    for rank, order in orders.items():
        assert order == first, f"rank {rank} runs collectives {order}, another rank {first}"
    return first


class Ready:
    """Actors that could fire, as (task index, number in the engine); the first in program order goes."""

    def __init__(self, entries: Iterable[tuple[int, int]]) -> None:
        self._heap = list(entries)
        heapq.heapify(self._heap)

    def push(self, entry: tuple[int, int]) -> None:
        """Adds an actor."""
        heapq.heappush(self._heap, entry)

    def pop(self) -> tuple[int, int]:
        """Takes out the actor that fires next."""
        return heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


class _Run:
    """The registers of one step, and what every actor still waits for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.slots: list[torch.Tensor | None] = [None] * len(engine.consumers)
        self.readers_left = engine.readers_left.copy()
        self.missing = engine.missing.copy()
        self.ready = Ready((engine.actors[number].task.index, number) for number in engine.first)
        self.num_fired = 0
        self.turn = 0
        self.arrived: dict[int, list[_Actor]] = {}  # at a collective, until it is its turn

    def fill(self, registers: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Fills the input registers of one rank."""
        for register, tensor in zip(registers, tensors, strict=True):
            if self.readers_left[register]:
                self.slots[register] = tensor

    def take(self, registers: Sequence[int]) -> list[torch.Tensor]:
        """What the output registers of one rank hold."""
        return [self._held(register) for register in registers]

    def _held(self, register: int) -> torch.Tensor:
        tensor = self.slots[register]
        assert tensor is not None, f"register {register} is empty"
        return tensor

    # --- firing ------------------------------------------------------------------------------------

    def drive(self) -> None:
        """Fires actors until none is left."""
        actors = self.engine.actors
        while self.ready:
            _, number = self.ready.pop()
            actor = actors[number]
            if actor.task.move is None:
                self._compute(actor)
            else:
                self._meet(actor)
        assert self.num_fired == len(actors), self._stuck()

    def _compute(self, actor: _Actor) -> None:
        module = actor.task.compute
        assert module is not None
        arguments = self._read(actor)
        try:
            # The list holds the last references: the module drops each tensor after its last use.
            results = module.forward(arguments)
        except Exception as error:
            error.add_note(self._origin(actor, error.__traceback__))
            raise
        self._finish(actor, results)

    def _meet(self, actor: _Actor) -> None:
        """A collective fires when every hosted rank has arrived and it is its turn."""
        turns, num_ranks = self.engine.turns, len(self.engine.programs)
        self.arrived.setdefault(actor.task.order, []).append(actor)
        while self.turn < len(turns) and len(self.arrived.get(turns[self.turn], ())) == num_ranks:
            self._collect(self.arrived.pop(turns[self.turn]))
            self.turn += 1

    def _collect(self, actors: Sequence[_Actor]) -> None:
        task = actors[0].task
        assert task.move is not None
        held = {actor.rank: self._read(actor)[0] for actor in actors}
        try:
            results = apply_move(task.move, held, self.engine.placement, self.engine.transport)
        except Exception as error:
            error.add_note(f"in {self._place(actors[0])}, {task.move}")
            raise
        del held
        for actor in actors:
            self._finish(actor, (results.pop(actor.rank),))

    # --- registers ---------------------------------------------------------------------------------

    def _read(self, actor: _Actor) -> list[torch.Tensor]:
        """The actor's inputs, taken out of the registers that nobody reads after it."""
        slots, readers_left = self.slots, self.readers_left
        arguments = [self._held(register) for register in actor.inputs]
        for register in actor.reads:
            readers_left[register] -= 1
            if not readers_left[register]:
                slots[register] = None
        return arguments

    def _finish(self, actor: _Actor, results: Sequence[torch.Tensor]) -> None:
        """Writes what an actor made and tells those who wait for it."""
        self.num_fired += 1
        for register, tensor in zip(actor.outputs, results, strict=True):
            if self.readers_left[register]:
                self.slots[register] = tensor
            self._notify(self.engine.consumers[register])
        self._notify(actor.waiters)

    def _notify(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.missing[number] -= 1
            if not self.missing[number]:
                self.ready.push((self.engine.actors[number].task.index, number))

    # --- what went wrong ---------------------------------------------------------------------------

    def _place(self, actor: _Actor) -> str:
        return f"task {actor.task.name} ({actor.task.phase}) of rank {actor.rank}"

    def _origin(self, actor: _Actor, trace: TracebackType | None) -> str:
        """Task, op, module and the user's line of what failed, by the line of generated code in the trace."""
        module = actor.task.compute
        assert module is not None
        line, code = None, type(module).forward.__code__
        while trace is not None:
            if trace.tb_frame.f_code is code:
                line = trace.tb_lineno
            trace = trace.tb_next
        where = f"in {self._place(actor)}"
        nodes = list(module.graph.nodes)
        positions = getattr(module, "_lineno_map", None) or {}
        position = positions.get(line - getattr(module, "_prologue_start", 0)) if line is not None else None
        if position is None or position >= len(nodes):
            return where
        return f"{where}: {self.engine.describe(nodes[position].name)}"

    def _stuck(self) -> str:
        """Which actors wait, and for what."""
        lines = []
        for number, missing in enumerate(self.missing):
            actor = self.engine.actors[number]
            if missing:
                empty = [
                    f"r{own}"
                    for own, register in zip(actor.task.inputs, actor.inputs, strict=True)
                    if self.slots[register] is None
                ]
                lines.append(
                    f"{self._place(actor)} misses {missing}: of registers {', '.join(empty) or 'none'}, "
                    f"of tasks {', '.join(map(str, actor.task.after)) or 'none'}"
                )
        for order, actors in self.arrived.items():
            turn = self.engine.turns[self.turn]
            lines += [
                f"{self._place(one)} (move {order}) waits for the turn of move {turn}" for one in actors
            ]
        return "the program cannot finish:\n" + "\n".join(lines[:20])
