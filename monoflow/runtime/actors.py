"""The engine: every task of every rank that this process hosts is an actor.

An actor fires when its input registers are full and its output registers are free; a register is free again
when all its consumers are done. There is no other order, but for collectives: those of one communicator fire
in program order, the same on every rank, so that data-driven firing cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from ..boxing.collectives import Transport, apply_move
from ..mesh import Placement
from .program import Program, Task

#: Describes a failing op of a task for the user: node name -> "module, file:line".
Describe = Callable[[str], str]


@dataclass(eq=False)
class _Actor:
    """One task of one rank, and what it still waits for."""

    rank: int
    task: Task
    missing: int
    readers: tuple["_Actor", ...] = ()
    waiters: list["_Actor"] = field(default_factory=list)


class Engine:
    """Runs the programs of the ranks that this process hosts: one in a job of processes, all in a simulation.

    Args:
        programs: by rank.
        transport: how tensors cross ranks.
        describe: names the origin of a graph node in error messages.
    """

    def __init__(
        self, programs: Mapping[int, Program], placement: Placement, transport: Transport, describe: Describe
    ) -> None:
        self.programs, self.placement, self.transport, self.describe = programs, placement, transport, describe

    @torch.no_grad()
    def run(self, inputs: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """One step: tensors for every program's input ports to tensors of its output ports, by rank."""
        run = _Run(self)
        for rank, tensors in inputs.items():
            run.fill(rank, tensors)
        run.drive()
        return {rank: run.take(rank) for rank in self.programs}


class _Run:
    """The actors and registers of one step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.slots: dict[tuple[int, int], torch.Tensor] = {}
        self.pending: dict[tuple[int, int], int] = {}
        self.ready: deque[_Actor] = deque()
        self.actors: dict[tuple[int, int], _Actor] = {}
        self.turns: dict[int, deque[int]] = {}
        self.waiting: dict[int, dict[int, _Actor]] = {}
        for rank, program in engine.programs.items():
            self._hire(rank, program)

    def _hire(self, rank: int, program: Program) -> None:
        kept = {port.register for port in program.outputs}
        for task in program.tasks:
            actor = _Actor(rank, task, len(set(task.inputs)) + len(task.after))
            self.actors[rank, task.index] = actor
            for earlier in task.after:
                self.actors[rank, earlier].waiters.append(actor)
            if not actor.missing:
                self.ready.append(actor)
        for register, consumers in enumerate(program.consumers):
            self.pending[rank, register] = len(consumers) + (register in kept)
        if not self.turns:
            for task in program.tasks:
                if task.move is not None:
                    self.turns.setdefault(task.move.axis, deque()).append(task.index)

    # --- registers ---------------------------------------------------------------------------------

    def fill(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the input registers of one rank."""
        for port, tensor in zip(self.engine.programs[rank].inputs, tensors, strict=True):
            self._write(rank, port.register, tensor)

    def take(self, rank: int) -> list[torch.Tensor]:
        """What the output registers of one rank hold."""
        return [self.slots[rank, port.register] for port in self.engine.programs[rank].outputs]

    def _write(self, rank: int, register: int, tensor: torch.Tensor) -> None:
        if self.pending[rank, register]:
            self.slots[rank, register] = tensor
        for consumer in self.engine.programs[rank].consumers[register]:
            self._arrived(self.actors[rank, consumer])

    def _release(self, actor: _Actor) -> None:
        for register in dict.fromkeys(actor.task.inputs):
            key = actor.rank, register
            self.pending[key] -= 1
            if not self.pending[key]:
                del self.slots[key]
        for waiter in actor.waiters:
            self._arrived(waiter)

    def _arrived(self, actor: _Actor) -> None:
        actor.missing -= 1
        if not actor.missing:
            self.ready.append(actor)

    # --- firing ------------------------------------------------------------------------------------

    def drive(self) -> None:
        """Fires actors until none is left."""
        num_fired = 0
        while self.ready:
            actor = self.ready.popleft()
            if actor.task.compute is not None:
                self._compute(actor)
                num_fired += 1
            else:
                num_fired += self._meet(actor)
        assert num_fired == len(self.actors), self._stuck()

    def _compute(self, actor: _Actor) -> None:
        task = actor.task
        assert task.compute is not None
        arguments = [self.slots[actor.rank, register] for register in task.inputs]
        try:
            results = task.compute(*arguments)
        except Exception as error:
            error.add_note(self._origin(actor, error.__traceback__))
            raise
        del arguments
        self._release(actor)
        for register, tensor in zip(task.outputs, results, strict=True):
            self._write(actor.rank, register, tensor)

    def _meet(self, actor: _Actor) -> int:
        """A collective fires when every hosted rank has arrived and it is its axis' turn."""
        self.waiting.setdefault(actor.task.index, {})[actor.rank] = actor
        assert actor.task.move is not None
        turn = self.turns[actor.task.move.axis]
        num_fired = 0
        while turn and len(self.waiting.get(turn[0], ())) == len(self.engine.programs):
            num_fired += self._collect(self.waiting.pop(turn.popleft()))
        return num_fired

    def _collect(self, actors: Mapping[int, _Actor]) -> int:
        task = next(iter(actors.values())).task
        assert task.move is not None
        held = {rank: self.slots[rank, actor.task.inputs[0]] for rank, actor in actors.items()}
        results = apply_move(task.move, held, self.engine.placement, self.engine.transport)
        del held
        for rank, actor in actors.items():
            self._release(actor)
            self._write(rank, actor.task.outputs[0], results[rank])
        return len(actors)

    # --- what went wrong ---------------------------------------------------------------------------

    def _origin(self, actor: _Actor, trace: TracebackType | None) -> str:
        module = actor.task.compute
        assert module is not None
        line, code = None, type(module).forward.__code__
        while trace is not None:
            if trace.tb_frame.f_code is code:
                line = trace.tb_lineno
            trace = trace.tb_next
        where = f"in task {actor.task.name} ({actor.task.phase}) of rank {actor.rank}"
        nodes = list(module.graph.nodes)
        positions = getattr(module, "_lineno_map", None) or {}
        position = positions.get(line - getattr(module, "_prologue_start", 0)) if line is not None else None
        if position is None or position >= len(nodes):
            return where
        return f"{where}, {self.engine.describe(nodes[position].name)}"

    def _stuck(self) -> str:
        left = [actor for actor in self.actors.values() if actor.missing]
        lines = [f"rank {a.rank}: {a.task.name} misses {a.missing} of its inputs" for a in left[:10]]
        return "the program cannot finish; waiting:\n" + "\n".join(lines)
