"""The engine: every task of every rank that this process hosts is an actor.

An actor fires when its input registers are full and a slot of each of its output registers is free; `network`
says who waits for whom. Of those that could fire, the one of the earliest micro-batch and then the first in
program order does: memory is then what the plan's schedule says it is (to gather every parameter at once,
because all of them are there, would fill it), and backward of a micro-batch goes before forward of the next.
Results do not depend on that order. Moves fire in one order for each channel, the same on every rank: they
block, so that is what keeps data-driven firing from deadlock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter_ns

import torch

from ..boxing.collectives import Transport
from ..mesh import Placement
from .firing import Describe, Firing, Registers
from .network import Actor, Marking, Network
from .program import Kind, Program
from .recorder import Recorder


class Engine:
    """Runs the programs of the ranks that this process hosts: one in a job of processes, all in a simulation.

    What does not change between steps is worked out here, once: who reads and who waits for what.

    Args:
        programs: by rank.
        transport: how tensors cross ranks.
        describe: names the origin of a graph node in error messages.

    Attributes:
        recorder: is told of every firing, if there is one.
    """

    def __init__(
        self, programs: Mapping[int, Program], placement: Placement, transport: Transport, describe: Describe
    ) -> None:
        self.programs, self.placement = programs, placement
        self.network = Network(programs, placement)
        self.firing = Firing(self.network, transport, describe)
        self.recorder: Recorder | None = None
        self.num_steps = 0

    def run(self, inputs: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        """One step: tensors for every program's input ports to tensors of its output ports, by rank."""
        registers = Registers(self.network)
        for rank in list(inputs):
            registers.fill(rank, inputs[rank])
        del inputs  # so that registers hold the only references
        with torch.no_grad():
            self._drive(registers)
        self.num_steps += 1
        return {rank: registers.take(rank) for rank in self.programs}

    def _drive(self, registers: Registers) -> None:
        """Fires actors until none is left."""
        marking, actors = Marking(self.network), self.network.actors
        ready = Ready((0, actor.task.index, actor.number) for actor in marking.ready())
        while ready:
            actor = actors[ready.pop()[2]]
            time = marking.begin(actor)
            self._fire(registers, actor, time)
            for one in marking.end(actor):
                ready.push((marking.fired[one.number], one.task.index, one.number))
        assert marking.is_done, "\n".join(["the program cannot finish:", *marking.wait_for_graph()[:20]])

    def _fire(self, registers: Registers, actor: Actor, time: int) -> None:
        recorder = self.recorder  # it may change at any time
        start = perf_counter_ns() if recorder is not None else 0
        inputs = [registers.read(actor, member, time) for member in actor.members]
        results = self.firing.work(actor, time, inputs)
        if recorder is not None:
            report(recorder, actor, self.num_steps, time, start, results)
        for member, made in zip(actor.members, results, strict=True):
            registers.write(member, time, made)


class Ready:
    """Actors that could fire, as (micro-batch, task index, number in the network); the first of them goes."""

    def __init__(self, entries: Iterable[tuple[int, int, int]]) -> None:
        self._heap = list(entries)
        heapq.heapify(self._heap)

    def push(self, entry: tuple[int, int, int]) -> None:
        """Adds an actor."""
        heapq.heappush(self._heap, entry)

    def pop(self) -> tuple[int, int, int]:
        """Takes out the actor that fires next."""
        return heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


def report(
    recorder: Recorder,
    actor: Actor,
    step: int,
    time: int,
    start: int,
    results: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Tells a recorder of a firing that has just ended."""
    end = perf_counter_ns()
    kind = Kind.ACCUMULATE if actor.folds else actor.task.kind
    for member, made in zip(actor.members, results, strict=True):
        num_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in made)
        recorder.record(
            str(actor.channel), kind, member.task.name, member.rank, step, time, start, end, num_bytes
        )
