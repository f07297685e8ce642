"""Program: what one rank executes. Tasks read and write registers; that is all there is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from ..boxing.route import Move
from ..config import SETTINGS
from ..mesh import Placement

#: The name of the placeholder of a task's graph that is the number of the micro-batch.
TIME = "time"


class Rate(StrEnum):
    """How often in a step an actor fires, or a register is filled."""

    STEP = "step"
    MICRO = "micro-batch"


class Kind(StrEnum):
    """What an actor is for."""

    SOURCE = "source"
    COPY = "copy"
    COMPUTE = "compute"
    BOXING = "boxing"
    ACCUMULATE = "accumulate"
    OPTIMIZER = "optimizer"
    SINK = "sink"
    WRITER = "writer"


#: Actors that wait for the outside, not for a device.
HOST_KINDS = frozenset({Kind.SOURCE, Kind.SINK, Kind.WRITER})


@dataclass(frozen=True)
class Register:
    """A bounded slot for one tensor: an actor writes it, its consumers read it and hand it back.

    Attributes:
        shape: of the largest tensor that it holds; that of the first micro-batch if it is filled for each.
        slots: how many tensors it holds at a time.
        rate: how often in a step it is filled.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: int = 1
    rate: Rate = Rate.STEP

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize * self.slots


@dataclass(frozen=True, eq=False)
class Task:
    """A piece of program. Exactly one of `compute`, `move` and `pulls` is set.

    A task of rate MICRO fires once for every micro-batch, in their order. It reads registers of rate MICRO
    micro-batch by micro-batch, and those of rate STEP again each time. A move along time, the axis after the
    placement's own, has rate MICRO and fills a register of rate STEP when it has seen every micro-batch: it
    adds them up (P(sum) -> B), or joins them (S -> B).

    Where micro-batches are pulled, one task that `pulls` fills a register with the number of a unit of work.
    All others of rate MICRO read it as their last input, so that the rank pulls the next when they are done.

    Attributes:
        compute: from the input registers to the output registers, as `task_module` makes it.
        move: a collective along one axis, from one input register to one output register. A rank that only
            sends has no output, one that only receives no input.
        after: tasks of this program that must be done first although no register links them.
        bundled: the moves that go with `move` as one collective, one for each further input and output.
        order: the place of a move among all moves of the plan: the same number on every rank that takes part.
        role: what a computation is for, where it is not what its phase says.
        others: the form of `compute` for micro-batches whose tensors have other shapes than the first one's,
            by number; by unit where they are pulled.
        pulls: whether it asks for the next unit of work.
        gated: whether it is held back, for this step, if what the program's gates hold is not finite.
        turns: by micro-batch, its place among all that its rank would do if nothing were late: of the tasks
            that could fire the first one does, and moves go in that order. () for the micro-batch's number.
        behind: a task of this program that it lets go first, and for how many later micro-batches; () for
            none.
    """

    index: int
    name: str
    phase: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    compute: fx.GraphModule | None = None
    move: Move | None = None
    after: tuple[int, ...] = ()
    order: int = -1
    rate: Rate = Rate.STEP
    others: Mapping[int, fx.GraphModule] = field(default_factory=dict)
    role: Kind | None = None
    bundled: tuple[Move, ...] = ()
    pulls: bool = False
    gated: bool = False
    turns: tuple[int, ...] = ()
    behind: tuple[int, int] | tuple[()] = ()

    @property
    def kind(self) -> Kind:
        """What it is for."""
        if self.role is not None:
            return self.role
        if self.move is not None:
            return Kind.BOXING
        return Kind.OPTIMIZER if self.phase == "update" else Kind.COMPUTE

    def turn(self, time: int) -> int:
        """Its place in a micro-batch."""
        return self.turns[time] if self.turns else time

    def module(self, time: int = 0) -> fx.GraphModule:
        """What computes a micro-batch."""
        found = self.others.get(time, self.compute)
        assert found is not None, f"task {self.name} computes nothing"
        return found


def task_module(graph: fx.Graph) -> fx.GraphModule:
    """A graph as a task's function: from a list of tensors, which it empties, to a list of tensors.

    Whoever hands over the only references so lets every tensor go after its last use inside the task. A
    placeholder called "time" is the number of the micro-batch, or of the unit that was pulled, the function's
    second argument.
    """
    graph.set_codegen(_TakesList())
    return fx.GraphModule(torch.nn.Module(), graph)


class _TakesList(CodeGen):
    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **kwargs: Any) -> str:
        names = [text.split(":")[0].split("=")[0].strip() for text in free_vars if text != "self"]
        names = [name for name in names if name != TIME]
        lines = [f"def {self._func_name}(self, tensors, {TIME}=0){maybe_return_annotation}:"]
        if names:
            lines += [f"    {', '.join(names)}, = tensors", "    tensors.clear()"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Port:
    """A register that the outside fills before the step (an input) or takes after it (an output).

    Attributes:
        replaces: of an output, the input whose next value it is.
        donated: an input that the program overwrites with its next value.
        fresh: an input that every step has a copy of, such as its batch.
    """

    name: str
    register: int
    replaces: str = ""
    donated: bool = False
    fresh: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """The tasks of one rank in one order that all ranks share for their collectives.

    Attributes:
        units: of how many units of work, a micro-batch of one rank each, all ranks pull what they walk; 0
            where every rank walks its own micro-batches.
        gates: registers of scalars, the same on every rank, that must be finite for state to change.
        follows: whether a step may begin while the one before runs, see `following`: none of the outputs that
            replace an input shares memory with another output.
    """

    rank: int
    placement: Placement
    tasks: tuple[Task, ...]
    registers: tuple[Register, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    micro_batches: int = 1
    units: int = 0
    gates: tuple[int, ...] = ()
    follows: bool = False

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Per register, the tasks that read it."""
        found: list[list[int]] = [[] for _ in self.registers]
        for task in self.tasks:
            for register in dict.fromkeys(task.inputs):
                found[register].append(task.index)
        return tuple(map(tuple, found))

    def text(self) -> str:
        """The program for people: registers with their bytes, then one line a task."""
        lines = [f"Program of rank {self.rank} on {self.placement}"]
        for port in self.inputs:
            lines.append(f"  r{port.register} <- {port.name}{' (donated)' if port.donated else ''}")
        for task in self.tasks:
            reads = ", ".join(f"r{i}" for i in task.inputs)
            writes = ", ".join(f"r{i}:{list(self.registers[i].shape)}" for i in task.outputs)
            what = str(task.move) if task.move is not None else f"{_num_ops(task)} ops"
            what = f"pulls one of {self.units} units" if task.pulls else what
            what += f" and {len(task.bundled)} others" * bool(task.bundled)
            lines.append(f"  t{task.index} {task.phase} {task.name}: ({reads}) -> ({writes})  # {what}")
        for port in self.outputs:
            lines.append(
                f"  {port.name} <- r{port.register}{f' replaces {port.replaces}' * bool(port.replaces)}"
            )
        return "\n".join(lines)


def _num_ops(task: Task) -> int:
    if task.compute is None:
        return 0
    return sum(node.op == "call_function" for node in task.compute.graph.nodes)


def gated(tasks: Sequence[Task], gates: Sequence[int], in_place: Collection[int]) -> tuple[Task, ...]:
    """The tasks with those marked that must wait for the gates, and do so.

    Args:
        gates: registers; none for no gate.
        in_place: the tasks that overwrite state. What reads what they make waits with them.
    """
    if not gates:
        return tuple(tasks)
    writers = {task.index for task in tasks if not set(gates).isdisjoint(task.outputs)}
    behind: set[int] = set()
    made: list[Task] = []
    for task in tasks:
        if task.index in in_place or not behind.isdisjoint(task.inputs):
            behind.update(task.outputs)
            task = replace(task, gated=True, after=tuple(sorted(writers.union(task.after))))
        made.append(task)
    return tuple(made)


def verify(program: Program) -> Program:
    """Returns the program if every register is written once, before it is read; asserts otherwise.

    MONOFLOW_VERIFY=0 turns it off.
    """
    if not SETTINGS.verify:
        return program
    written = {port.register for port in program.inputs}
    for position, task in enumerate(program.tasks):
        kinds = task.compute is not None, task.move is not None, task.pulls
        assert task.index == position and sum(kinds) == 1, task.name
        assert not task.pulls or program.units, f"task {task.name} pulls, and there are no units"
        missing = set(task.inputs) - written
        assert not missing, f"task {task.name} reads registers {missing} before they are written"
        twice = set(task.outputs) & written
        assert not twice, f"task {task.name} writes registers {twice} again"
        before = (*task.after, *task.behind[:1])
        assert all(earlier < position for earlier in before), f"task {task.name} waits for a later task"
        assert task.move is None or task.order >= 0, f"the move {task.name} has no place among all moves"
        assert not task.gated or set(program.gates) <= written, f"task {task.name} runs before its gates"
        _check_rates(program, task)
        written |= set(task.outputs)
    missing = {port.register for port in program.outputs} - written
    assert not missing, f"outputs read registers {missing} that nothing writes"
    for port in (*program.inputs, *program.outputs):
        assert program.registers[port.register].rate is Rate.STEP, f"port {port.name} of rate MICRO"
    return program


def _check_rates(program: Program, task: Task) -> None:
    """A task reads what is filled as often as it fires, or once a step; it fills what it should."""
    read = {program.registers[register].rate for register in task.inputs}
    assert task.rate is Rate.MICRO or read <= {Rate.STEP}, f"task {task.name} reads micro-batches once a step"
    folds = task.move is not None and task.move.axis == program.placement.num_axes
    expected = Rate.STEP if folds else task.rate
    for register in task.outputs:
        found = program.registers[register].rate
        assert found is expected, (
            f"task {task.name} of rate {task.rate} fills register {register} of rate {found}"
        )
