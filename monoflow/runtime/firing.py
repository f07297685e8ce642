"""One firing of an actor: what it reads out of its registers, what it does, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns

import torch

from ..boxing.bundle import apply_bundle
from ..boxing.collectives import AxisMove, Transport, apply_move
from ..boxing.placed import neutral
from .accumulate import accumulated
from .network import Actor, Marking, Member, Network
from .origin import failing_node
from .program import Kind, Rate
from .pulled import Units, folded
from .recorder import Fired, Recorder

Tensor = torch.Tensor
#: Describes a failing op of a task for the user: node name -> "module, file:line".
Describe = Callable[[str], str]

#: By rank, and in the order of its output ports: where state lives that a step leaves; None of a result.
Homes = Mapping[int, Sequence[Tensor | None]]

#: What a firing gives that pulled a unit, when there was none left.
_NONE_LEFT: list[Sequence[Tensor]] = [()]


def is_finite(scalar: Tensor) -> bool:
    """Whether a scalar is neither Inf nor NaN. On an accelerator it is waited for."""
    return math.isfinite(scalar.item())


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
        return [self._taken(rank, register) for register in self.network.taken[rank]]

    def settle(self, homes: Homes, is_held_back: bool = False) -> None:
        """Brings the state that a step leaves to where it lives, unless it was updated there.

        Args:
            is_held_back: whether it leaves none, but the state that it found.
        """
        moved: list[Tensor] = []
        places: list[Tensor] = []
        for rank, own in homes.items():
            for register, home in zip(self.network.taken[rank], own, strict=True):
                if home is None:
                    continue
                cell = self.network.cells[register].base
                value = home if is_held_back else self._held(cell)
                if value.data_ptr() != home.data_ptr() and home.numel():
                    moved.append(value)
                    places.append(home)
                self.cells[cell] = home
        if moved:
            torch.ops.aten._foreach_copy_(places, moved)

    def read(self, actor: Actor, member: Member, time: int) -> list[Tensor]:
        """A member's inputs; before them, what a move along time has so far."""
        cells, left = self.cells, self.left
        arguments: list[Tensor] = []
        if actor.folds and time:
            base = member.targets[0].base
            arguments.append(self._held(base))
            cells[base] = None
        for base, modulus in member.sources:
            cell = base + time % modulus
            tensor = cells[cell]
            assert tensor is not None, f"slot {cell} is empty"
            arguments.append(tensor)
            left[cell] -= 1
            if not left[cell]:
                cells[cell] = None
        return arguments

    def write(self, member: Member, time: int, results: Sequence[Tensor]) -> None:
        """Puts what a member made."""
        reads, targets = self.network.reads, member.targets
        assert len(results) == len(targets), (
            f"{member.task.name} made {len(results)} of {len(targets)} tensors"
        )
        for position, (base, modulus) in enumerate(targets):
            cell, tensor = base + time % modulus, results[position]
            if reads[cell]:
                self.left[cell] = reads[cell]
                self.cells[cell] = tensor

    def close(self, actor: Actor, fired: int, empty: Callable[[], Tensor]) -> None:
        """An actor that fires for pulled units has done its last: lets go what it would read again.

        Args:
            empty: makes what a move along time gives that saw nothing.
        """
        (member,) = actor.members
        if actor.folds and not fired:
            self.write(member, 0, [empty()])
        program, base = self.network.programs[member.rank], self.network.bases[member.rank]
        for register, (cell, _) in zip(member.inputs, member.sources, strict=True):
            if program.registers[register - base].rate is Rate.STEP:
                self.left[cell] -= actor.fires - fired
                if not self.left[cell]:
                    self.cells[cell] = None

    def _taken(self, rank: int, register: int) -> Tensor:
        tensor = self.cells[self.network.cells[register].base]
        if tensor is None and self.network.gated:  # what would have made it was held back
            own = self.network.programs[rank].registers[register - self.network.bases[rank]]
            is_inexact = own.dtype.is_floating_point or own.dtype.is_complex
            fill = float("nan") if is_inexact else 0
            return torch.full((), fill, dtype=own.dtype, device=self.network.placement.device_type).expand(
                own.shape
            )
        return self._held(self.network.cells[register].base)

    def _held(self, cell: int) -> Tensor:
        tensor = self.cells[cell]
        assert tensor is not None, f"slot {cell} is empty"
        return tensor


class Firing:
    """Does what actors are there for.

    Args:
        transport: how tensors cross ranks.
        describe: names the origin of a graph node in error messages.
        recorder: is told of every firing, if there is one; may change at any time.
        units: hands out what ranks pull, where they do.
    """

    def __init__(
        self,
        network: Network,
        transport: Transport,
        describe: Describe,
        recorder: Recorder | None = None,
        units: Units | None = None,
    ) -> None:
        assert units is not None or not network.pulled, "nobody hands out the units that ranks pull"
        self.network, self.transport, self.describe = network, transport, describe
        self.recorder, self.units = recorder, units
        self.placement = network.placement

    def start(self) -> None:
        """A step begins; the one before is over."""
        if self.units is not None:
            self.units.start()

    def read(self, registers: Registers, actor: Actor, time: int) -> list[list[Tensor]]:
        """What each member of an actor reads."""
        members = actor.members
        if len(members) == 1:
            return [registers.read(actor, members[0], time)]
        return [registers.read(actor, member, time) for member in members]

    def write(self, registers: Registers, actor: Actor, time: int, results: list[Sequence[Tensor]]) -> None:
        """Puts what each member made."""
        members = actor.members
        assert len(results) == len(members), f"{len(members)} members of {actor.place} made {len(results)}"
        for position, member in enumerate(members):
            registers.write(member, time, results[position])

    def end(
        self,
        registers: Registers,
        marking: Marking,
        actor: Actor,
        time: int,
        results: list[Sequence[Tensor]],
    ) -> list[Actor]:
        """A firing is over: puts what it made. Returns those that can fire now."""
        if results is not _NONE_LEFT:
            members = actor.members
            if len(members) == 1:
                registers.write(members[0], time, results[0])
            else:
                self.write(registers, actor, time, results)
            if not actor.is_gate or self._is_open(actor, results):
                return marking.end(actor)
            held_back = marking.hold_back()
            return [*held_back, *marking.end(actor)]
        for one in self.network.pulled[actor.members[0].rank]:
            registers.close(one, marking.fired[one.number], partial(self._unmoved, one.members[0]))
        return marking.close(actor)

    def _is_open(self, actor: Actor, results: list[Sequence[Tensor]]) -> bool:
        """Whether what an actor that fills gates made lets state change: it is finite."""
        gates = self.network.gates
        return all(
            register not in gates or is_finite(tensor)
            for member, made in zip(actor.members, results, strict=True)
            for register, tensor in zip(member.outputs, made, strict=True)
        )

    def work(self, actor: Actor, step: int, time: int, inputs: list[list[Tensor]]) -> list[Sequence[Tensor]]:
        """Runs one firing, and tells the recorder.

        Args:
            step, time: the number of the step, and of the micro-batch; of those that were pulled, how many
                came before it.
            inputs: what each member reads; emptied, so that the list holds the last references.

        Returns:
            What each member writes. An exception gets a note with the task, the op and the user's line.
        """
        recorder = self.recorder
        if recorder is None:
            return self._done(actor, time, inputs)
        start = perf_counter_ns()
        results = self._done(actor, time, inputs)
        end = perf_counter_ns()
        kind = Kind.ACCUMULATE if actor.folds else actor.task.kind
        for member, made in zip(actor.members, results, strict=True):
            num_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in made)
            name, rank = member.task.name, member.rank
            recorder.record(Fired(str(actor.lane), kind, name, rank, step, time, start, end, num_bytes))
        return results

    def origin(self, actor: Actor) -> str:
        """The user's line of a task's first op; "" of a move."""
        if actor.task.compute is None:
            return ""
        nodes = actor.task.compute.graph.nodes
        return next((self.describe(node.name) for node in nodes if node.op == "call_function"), "")

    def _done(self, actor: Actor, time: int, inputs: list[list[Tensor]]) -> list[Sequence[Tensor]]:
        if actor.is_pulled:
            return [self._pulled(actor, int(inputs[0].pop()), time == 0, inputs[0])]
        if actor.computes:
            return [self._compute(actor, time, inputs[0])]
        task = actor.task
        if task.pulls:
            return self._pull(actor)
        try:
            if actor.folds:
                return [
                    [accumulated(self._along_time(member, time), given, time)]
                    for member, given in zip(actor.members, inputs, strict=True)
                ]
            return self._move(actor, time, inputs)
        except Exception as error:
            error.add_note(f"in {actor.place}{_when(actor, time)}, {task.move}")
            raise

    def _pull(self, actor: Actor) -> list[Sequence[Tensor]]:
        """The number of the next unit of work for a rank that has done those before."""
        assert self.units is not None
        if self.placement.device_type != "cpu":
            torch.accelerator.current_stream().synchronize()  # what is only under way is not done
        unit = self.units.pull(actor.members[0].rank, self.network.micro_batches)
        return _NONE_LEFT if unit is None else [[torch.tensor(unit)]]

    def _pulled(self, actor: Actor, unit: int, is_first: bool, given: list[Tensor]) -> Sequence[Tensor]:
        """One unit of work."""
        if actor.task.compute is not None:
            return self._compute(actor, unit, given)
        assert actor.task.move is not None
        try:
            return [folded(actor.task.move, given, unit, is_first)]
        except Exception as error:
            error.add_note(f"in {actor.place}, unit {unit}, {actor.task.move}")
            raise

    def _unmoved(self, member: Member) -> Tensor:
        """What a rank has that did no unit."""
        assert member.task.move is not None
        register = self.network.programs[member.rank].registers[member.task.outputs[0]]
        return neutral(member.task.move, register.dtype, self._device())

    def _compute(self, actor: Actor, time: int, given: list[Tensor]) -> Sequence[Tensor]:
        function = actor.function
        if function is None:
            function = actor.task.module(time).forward
        try:
            return function(given, time) if actor.fires > 1 else function(given)
        except Exception as error:
            node = failing_node(actor.task.module(time), error.__traceback__)
            told = f": {self.describe(node)}" if node else ""
            error.add_note(f"in {actor.place}{_when(actor, time)}{told}")
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
        return torch.empty(0, dtype=dtype, device=self._device())

    def _device(self) -> torch.device:
        if self.placement.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.placement.device_type, torch.accelerator.current_device_index())


def _when(actor: Actor, time: int) -> str:
    return f", {'unit' if actor.is_pulled else 'micro-batch'} {time}" if actor.fires > 1 else ""
