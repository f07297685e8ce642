"""The engine: every task of every rank that this process hosts is an actor.

An actor fires when its input registers are full and a slot of each of its output registers is free; `network`
says who waits for whom. Of those that could fire, the one whose turn is first and then the first in program
order does: memory is then what the plan's schedule says it is (to gather every parameter at once, because all
of them are there, would fill it), and a micro-batch goes before the next, or as a pipeline's rounds have it.
Results do not depend on that order. Moves fire in one order for each channel, the same on every rank: they
block, so that is what keeps data-driven firing from deadlock.

Where nothing waits, in a simulation and on one device, actors fire in the thread that calls; a rank among
others has `lanes`. On an accelerator `streams` are the lanes: whoever calls puts the work into them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter_ns

import torch

from ..boxing.collectives import Transport
from ..config import SETTINGS
from ..log import IDLE, Wait, tell
from ..mesh import Placement
from .channels import HOST
from .finding import Finding, Origin
from .firing import Describe, Firing, Homes, Registers
from .lanes import Crew, Results, Ticket
from .liveness import verify_live
from .network import Actor, Marking, Network
from .program import Program
from .pulled import Counter, StoreCounter, Units
from .ready import Ready
from .recorder import Recorder
from .streams import Accelerator, Device, Streams


class Done:
    """A step that was over when it had started."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def result(self) -> Results:
        """Tensors of the output ports of every hosted rank."""
        return self._results


class Engine:
    """Runs the programs of the ranks that this process hosts: one in a job of processes, all in a simulation.

    What does not change between steps is worked out here, once: who reads and who waits for what.

    Args:
        programs: by rank.
        transport: how tensors cross ranks.
        describe: names the origin of a graph node in error messages.
        lanes: whether compute, moves and the host's work have a thread each, or one for all, where a rank has
            threads of its own, and whether moves have streams of their own on an accelerator; None to fire in
            the thread that calls, and in its stream, come what may.
        patience: seconds without any firing after which a step on lanes fails; 0 for no end.
        units: hands out what ranks pull; made here when left out, which all ranks must do at the same time.
        device: whose streams are lanes; that of the placement where a rank has some when left out.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        placement: Placement,
        transport: Transport,
        describe: Describe,
        lanes: bool | None = SETTINGS.lanes,
        patience: float = SETTINGS.watchdog,
        units: Units | None = None,
        device: Device | None = None,
    ) -> None:
        self.programs, self.placement = programs, placement
        on_cpu, board = placement.device_type == "cpu", transport.board
        if device is None and not on_cpu and board is not None and lanes:
            device = Accelerator()
        one_order = board is None or not lanes or not on_cpu
        self.network = Network(programs, placement, one_order, is_paced=not one_order or device is not None)
        self._streams = None if device is None else Streams(self.network, device)
        if SETTINGS.verify:
            verify_live(self.network)
        if self.network.pulled and units is None:
            units = Counter() if board is None else StoreCounter.of_job(placement.size)
        self.firing = Firing(self.network, transport, describe, units=units)  # lanes keep no engine alive
        self.num_steps = self._num_over = 0
        self._marking: Marking | None = None  # of the last step that this thread drove
        self._idle_since = 0  # of that thread
        self._crew: Crew | None = None
        waits = any(one.channel is HOST for one in self.network.actors)
        if on_cpu and lanes is not None and (board is not None or (waits and lanes)):
            self._crew = Crew(self.network, self.firing, board, patience, one_lane=not lanes)
            weakref.finalize(self, self._crew.stop).atexit = False  # then it is dismissed

    @property
    def recorder(self) -> Recorder | None:
        """Who is told of every firing, if anybody is; may change at any time."""
        return self.firing.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.firing.recorder = recorder

    @property
    def runs_beside(self) -> bool:
        """Whether a step that was started runs on lanes while its caller goes on."""
        return self._crew is not None

    @property
    def num_over(self) -> int:
        """How many went well to their end, of the `num_steps` that began."""
        return self._num_over if self._crew is None else self._crew.num_over

    @property
    def follows(self) -> bool:
        """Whether a step may begin while the one before runs."""
        return self.runs_beside and all(program.follows for program in self.programs.values())

    def admit(self, follows: bool) -> None:
        """Waits until a step may take its inputs. Returns at once if a step has failed.

        Args:
            follows: whether the step before may still run then; it must have been started with homes. It is
                known then whether it changes state.
        """
        if self._crew is not None:
            self._crew.admit(follows)

    def start(
        self,
        inputs: Mapping[int, Sequence[torch.Tensor]],
        homes: Homes | None = None,
    ) -> Ticket | Done:
        """Begins a step; returns once its inputs are taken. Without lanes the step is over then.

        Args:
            inputs: tensors for every program's input ports, by rank.
            homes: where the state lives that the step leaves, for an engine that `follows`. It is there when
                the step is over; an input that an output replaces is that very memory, so that the next step
                may begin before that. Without homes steps wait for each other.

        Raises:
            RunError: an earlier step failed.
        """
        registers = self._filled(inputs)
        del inputs  # so that registers hold the only references
        return self._started(registers, homes)

    def run(self, inputs: Mapping[int, Sequence[torch.Tensor]]) -> Results:
        """One step: tensors for every program's input ports to tensors of its output ports, by rank."""
        registers = self._filled(inputs)
        del inputs
        return self._started(registers).result()

    def running(self) -> list[tuple[int, str, str, int]]:
        """What fires at this moment, for people to see: (rank, lane, name, micro-batch)."""
        markings = [self._marking] if self._crew is None else self._crew.markings
        running = [
            (self.network.actors[number], marking.fired[number])
            for marking in markings
            if marking is not None
            for number in list(marking.running)
        ]
        return [
            (member.rank, str(actor.lane), member.task.name, time)
            for actor, time in running
            for member in actor.members
        ]

    def in_caller(self) -> Engine:
        """An engine for the same programs that fires in the thread that calls it: a profiler sees it."""
        firing = self.firing
        return Engine(
            self.programs,
            self.placement,
            firing.transport,
            firing.describe,
            lanes=None,
            units=firing.units,
        )

    def origins(self, inputs: Mapping[int, Sequence[torch.Tensor]]) -> list[Origin]:
        """Where what is not finite in a step's gates comes from: the step once more, without changing state.

        On several ranks all of them call it; each finds what it made itself.
        """
        finding = Finding(self.firing)
        registers = self._filled(inputs)
        if self._crew is None:
            with torch.no_grad():
                self._drive(registers, finding)
        else:
            crew = Crew(self.network, finding, self._crew.board, self._crew.patience, self._crew.one_lane)
            try:
                crew.start(registers).result()
            finally:
                crew.stop()
        return finding.found

    def _filled(self, inputs: Mapping[int, Sequence[torch.Tensor]]) -> Registers:
        registers = Registers(self.network)
        for rank, tensors in inputs.items():
            registers.fill(rank, tensors)
        return registers

    def _started(self, registers: Registers, homes: Homes | None = None) -> Ticket | Done:
        assert homes is None or self.follows, "an engine whose steps do not follow each other is given homes"
        self._tell_idle()
        self.num_steps += 1
        if self._crew is not None:
            return self._crew.start(registers, homes)
        with torch.no_grad():
            self._drive(registers)
        self._num_over += 1
        self._idle_since = perf_counter_ns()
        return Done({rank: registers.take(rank) for rank in self.programs})

    def _tell_idle(self) -> None:
        """For how long nothing ran before the step that starts now."""
        now = perf_counter_ns()
        since = self._idle_since if self._crew is None else self._crew.idle_since
        tell(Wait(IDLE, "engine", self.num_steps, now if since is None else since, now))

    def _drive(self, registers: Registers, firing: Firing | None = None) -> None:
        """Fires actors until none is left."""
        with nullcontext() if self._streams is None else self._streams.step():
            self._fire_all(registers, self.firing if firing is None else firing)

    def _fire_all(self, registers: Registers, firing: Firing) -> None:
        firing.start()
        marking, actors, step = Marking(self.network), self.network.actors, self.num_steps - 1
        self._marking, fired, streams = marking, marking.fired, self._streams
        ready = Ready((0, one.task.turn(0), one.task.index, one.number) for one in marking.ready())
        given: list[Actor] = []
        while given or ready.heap:
            if len(given) == 1 and not ready.heap:
                (actor,) = given
            else:
                for one in given:
                    task = one.task
                    ready.push((0, task.turn(fired[one.number]), task.index, one.number))
                actor = actors[ready.pop()[3]]
            time = marking.begin(actor)
            inputs = firing.read(registers, actor, time)
            if streams is None:
                results = firing.work(actor, step, time, inputs)
                given = firing.end(registers, marking, actor, time, results)
            else:
                with streams.lane(actor, time, inputs):
                    results = firing.work(actor, step, time, inputs)
                    given = firing.end(registers, marking, actor, time, results)
                streams.made(actor, time, results)
            del results
        if not marking.is_done:
            lines = [text for _, text in marking.wait_for_graph()]
            raise AssertionError("\n".join(["the program cannot finish:", *lines[:20]]))
