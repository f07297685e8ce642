"""One firing of an actor: what it reads out of its registers, what it does, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from types import TracebackType

import torch

from ..boxing.bundle import apply_bundle
from ..boxing.collectives import AxisMove, Transport, apply_move
from .accumulate import accumulated
from .network import Actor, Member, Network
from .program import Kind
from .recorder import Recorder

Tensor = torch.Tensor
#: Describes a failing op of a task for the user: node name -> "module, file:line".
Describe = Callable[[str], str]


class Registers:
    """What the registers of a network hold during one step.

    A tensor is let go as soon as the last of its readers has taken it: a reader holds the only reference, and
    drops it after its own last use.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.cells: list[Tensor | None] = [None] * len(network.reads)
        self.left = network.reads.copy()

    def fill(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Fills the input registers of one rank."""
        for register, tensor in zip(self.network.filled[rank], tensors, strict=True):
            cell = self.network.cells[register].base
            if self.left[cell]:
                self.cells[cell] = tensor

    def take(self, rank: int) -> list[Tensor]:
        """What the output registers of one rank hold."""
        return [self._held(self.network.cells[register].base) for register in self.network.taken[rank]]

    def read(self, actor: Actor, member: Member, time: int) -> list[Tensor]:
        """A member's inputs; before them, what a move along time has so far."""
        cells, left, places = self.cells, self.left, self.network.cells
        arguments: list[Tensor] = []
        if actor.folds and time:
            arguments.append(self._held(places[member.outputs[0]].base))
            cells[places[member.outputs[0]].base] = None
        for register in member.inputs:
            base, modulus = places[register]
            arguments.append(self._held(base + time % modulus))
        for register in member.reads:
            base, modulus = places[register]
            cell = base + time % modulus
            left[cell] -= 1
            if not left[cell]:
                cells[cell] = None
        return arguments

    def write(self, member: Member, time: int, results: Sequence[Tensor]) -> None:
        """Puts what a member made."""
        reads = self.network.reads
        for register, tensor in zip(member.outputs, results, strict=True):
            base, modulus = self.network.cells[register]
            cell = base + time % modulus
            if reads[cell]:
                self.left[cell] = reads[cell]
                self.cells[cell] = tensor

    def _held(self, cell: int) -> Tensor:
        tensor = self.cells[cell]
        assert tensor is not None, f"slot {cell} is empty"
        return tensor


class Firing:
    """Does what actors are there for.

    Args:
        transport: how tensors cross ranks.
        describe: names the origin of a graph node in error messages.
        recorder: who is to be told of a firing now.
    """

    def __init__(
        self,
        network: Network,
        transport: Transport,
        describe: Describe,
        recorder: Callable[[], Recorder | None] = lambda: None,
    ) -> None:
        self.network, self.transport, self.describe = network, transport, describe
        self.recorder = recorder
        self.placement = network.placement

    def read(self, registers: Registers, actor: Actor, time: int) -> list[list[Tensor]]:
        """What each member of an actor reads."""
        return [registers.read(actor, member, time) for member in actor.members]

    def write(self, registers: Registers, actor: Actor, time: int, results: list[Sequence[Tensor]]) -> None:
        """Puts what each member made."""
        for member, made in zip(actor.members, results, strict=True):
            registers.write(member, time, made)

    def work(self, actor: Actor, step: int, time: int, inputs: list[list[Tensor]]) -> list[Sequence[Tensor]]:
        """Runs one firing, and tells the recorder.

        Args:
            step, time: the number of the step, and of the micro-batch.
            inputs: what each member reads; emptied, so that the list holds the last references.

        Returns:
            What each member writes. An exception gets a note with the task, the op and the user's line.
        """
        recorder = self.recorder()
        if recorder is None:
            return self._done(actor, time, inputs)
        start = perf_counter_ns()
        results = self._done(actor, time, inputs)
        end = perf_counter_ns()
        kind = Kind.ACCUMULATE if actor.folds else actor.task.kind
        for member, made in zip(actor.members, results, strict=True):
            num_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in made)
            name, rank = member.task.name, member.rank
            recorder.record(str(actor.lane), kind, name, rank, step, time, start, end, num_bytes)
        return results

    def origin(self, actor: Actor) -> str:
        """The user's line of a task's first op; "" of a move."""
        if actor.task.compute is None:
            return ""
        nodes = actor.task.compute.graph.nodes
        return next((self.describe(node.name) for node in nodes if node.op == "call_function"), "")

    def _done(self, actor: Actor, time: int, inputs: list[list[Tensor]]) -> list[Sequence[Tensor]]:
        if actor.task.move is None:
            return [self._compute(actor, time, inputs[0])]
        try:
            if actor.folds:
                return [
                    [accumulated(self._along_time(member, time), given, time)]
                    for member, given in zip(actor.members, inputs, strict=True)
                ]
            return self._move(actor, time, inputs)
        except Exception as error:
            error.add_note(f"in {actor.place}{_when(actor, time)}, {actor.task.move}")
            raise

    def _compute(self, actor: Actor, time: int, given: list[Tensor]) -> Sequence[Tensor]:
        module = actor.task.module(time)
        try:
            return module.forward(given, time) if actor.fires > 1 else module.forward(given)
        except Exception as error:
            error.add_note(self._origin(actor, time, error.__traceback__))
            raise

    def _along_time(self, member: Member, time: int) -> AxisMove:
        assert member.task.move is not None
        return AxisMove.of(member.task.move, (*self.placement.coordinate(member.rank), time))

    def _move(self, actor: Actor, time: int, inputs: list[list[Tensor]]) -> list[Sequence[Tensor]]:
        move = actor.task.move
        assert move is not None
        if actor.task.bundled:
            given = {
                m.rank: [own.pop(0) for _ in m.task.inputs]
                for m, own in zip(actor.members, inputs, strict=True)
            }
            made = apply_bundle([move, *actor.task.bundled], given, self.placement, self.transport, time)
            return [made.pop(member.rank) for member in actor.members]
        held = {
            member.rank: given.pop() if given else self._nothing(member)
            for member, given in zip(actor.members, inputs, strict=True)
        }
        results = apply_move(move, held, self.placement, self.transport, time)
        del held
        return [[results.pop(member.rank)] if member.outputs else [] for member in actor.members]

    def _nothing(self, member: Member) -> Tensor:
        """What a rank gives that only receives: an empty tensor like what is to come."""
        program = self.network.programs[member.rank]
        dtype = program.registers[member.task.outputs[0]].dtype
        if self.placement.device_type == "cpu":
            return torch.empty(0, dtype=dtype)
        device = torch.device(self.placement.device_type, torch.accelerator.current_device_index())
        return torch.empty(0, dtype=dtype, device=device)

    def _origin(self, actor: Actor, time: int, trace: TracebackType | None) -> str:
        """Task, op, module and the user's line of what failed, by the line of generated code in the trace."""
        module = actor.task.module(time)
        line, code = None, type(module).forward.__code__
        while trace is not None:
            if trace.tb_frame.f_code is code:
                line = trace.tb_lineno
            trace = trace.tb_next
        where = f"in {actor.place}{_when(actor, time)}"
        nodes = list(module.graph.nodes)
        positions = getattr(module, "_lineno_map", None) or {}
        position = positions.get(line - getattr(module, "_prologue_start", 0)) if line is not None else None
        if position is None or position >= len(nodes):
            return where
        return f"{where}: {self.describe(nodes[position].name)}"


def _when(actor: Actor, time: int) -> str:
    return f", micro-batch {time}" if actor.fires > 1 else ""
