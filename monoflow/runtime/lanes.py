"""Lanes: threads that fire actors, so that compute, moves and the host's work overlap.

There is one lane for compute, one for each channel of moves and one for the host; each fires those of its
actors that can fire, as the engine does in one thread. A lane that waits, for an actor or inside a move, has
given up the interpreter's lock.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..boxing.collectives import Board
from ..errors import RunError
from .channels import COMPUTE, Channel
from .firing import Firing, Registers
from .network import Actor, Marking, Network
from .ready import Ready

Results = dict[int, list[torch.Tensor]]

#: How the report of a step in which nothing happens begins.
HANG = "no actor has fired"
#: How often, in seconds, one who waits for a step looks whether other ranks have failed or nothing happens.
_LOOK = 0.5


@dataclass(eq=False)
class _Flight:
    """A step on its way.

    Attributes:
        last: when an actor was last done, as `time.monotonic` has it.
    """

    number: int
    marking: Marking
    registers: Registers
    last: float
    error: BaseException | None = None
    is_over: bool = False


class _Lane:
    """A thread's actors that could fire, and the gate that it waits at for more.

    The gate is a plain lock, which costs less than a condition: whoever opens it holds the crew's lock, and
    only does when somebody waits.
    """

    def __init__(self) -> None:
        self.ready = Ready()
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_waiting = False

    def wait(self, lock: threading.Lock) -> None:
        """Until it is woken; gives up the crew's lock meanwhile."""
        self._is_waiting = True
        lock.release()
        self._gate.acquire()
        lock.acquire()

    def wake(self) -> None:
        """Ends its waiting; with the crew's lock."""
        if self._is_waiting:
            self._is_waiting = False
            self._gate.release()


class Ticket:
    """A step that was started."""

    def __init__(self, crew: Crew, flight: _Flight) -> None:
        self._crew, self._flight = crew, flight

    def result(self) -> Results:
        """Waits for the step: tensors of the output ports of every hosted rank.

        Raises:
            RunError: another rank failed, or nothing has happened for too long.
            Exception: what an actor of this rank raised, with notes on where.
        """
        self._crew.wait(self._flight)
        registers = self._flight.registers
        return {rank: registers.take(rank) for rank in registers.network.programs}


class Crew:
    """The lanes of one engine; one step is on its way at a time.

    Args:
        board: where the other ranks are heard of, if there are others.
        patience: seconds without any firing after which a step fails; 0 to wait for ever.
        one_lane: whether all actors share one thread.
    """

    def __init__(
        self, network: Network, firing: Firing, board: Board | None, patience: float, one_lane: bool = False
    ) -> None:
        self.network, self.firing, self.board, self.patience = network, firing, board, patience
        self.one_lane = one_lane
        self._lock = threading.Lock()
        self._over = threading.Condition(self._lock)
        channels = dict.fromkeys(
            [COMPUTE] if one_lane else [COMPUTE, *(one.channel for one in network.actors)]
        )
        self._lanes: dict[Channel, _Lane] = {channel: _Lane() for channel in channels}
        self._lane_of = [self._lanes.get(one.channel, self._lanes[COMPUTE]) for one in network.actors]
        self._threads: list[threading.Thread] = []
        self._flight: _Flight | None = None
        self._failed = ""
        self._stopped = False
        self._num_steps = 0

    @property
    def num_lanes(self) -> int:
        """How many threads there are."""
        return len(self._lanes)

    @property
    def marking(self) -> Marking | None:
        """Of the step that is on its way, if one is."""
        flight = self._flight
        return None if flight is None else flight.marking

    def start(self, registers: Registers) -> Ticket:
        """Begins a step, whose inputs are in its registers, once the one before is done.

        Raises:
            RunError: an earlier step failed.
        """
        if (before := self._flight) is not None:
            self.wait(before)
        with self._lock:
            if self._failed:
                raise RunError(f"a step failed before, so that the ranks are out of step: {self._failed}")
            if not self._threads:
                self._hire()
            flight = _Flight(self._num_steps, Marking(self.network), registers, time.monotonic())
            self._num_steps += 1
            self._flight = flight
            self.firing.start()
            self._enter(flight, flight.marking.ready())
            self._check_over(flight)
        return Ticket(self, flight)

    def wait(self, flight: _Flight) -> None:
        """Until a step is over. Raises what it failed of."""
        with self._lock:
            while not flight.is_over:
                if not self._over.wait(_LOOK):
                    self._look(flight)
        if flight.error is not None:
            raise flight.error

    def stop(self) -> None:
        """Ends the threads that do not work on something."""
        with self._lock:
            self._stopped = True
            for lane in self._lanes.values():
                lane.wake()

    # --- lanes -------------------------------------------------------------------------------------

    def _hire(self) -> None:
        for channel, lane in self._lanes.items():
            thread = threading.Thread(
                target=self._work, args=(lane,), name=f"monoflow {channel}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    @torch.no_grad()
    def _work(self, lane: _Lane) -> None:
        """What a thread does."""
        with self._lock:
            while True:
                while not lane.ready and not self._stopped:
                    lane.wait(self._lock)
                if self._stopped:
                    return
                self._fire(lane)

    def _fire(self, lane: _Lane) -> None:
        """Fires the first of a lane's actors; with the lock, which it gives up while the actor works."""
        flight, actor = self._flight, self.network.actors[lane.ready.pop()[2]]
        assert flight is not None, f"{actor.place} fires outside a step"
        moment = flight.marking.begin(actor)
        inputs = self.firing.read(flight.registers, actor, moment)
        self._lock.release()
        try:
            results = self.firing.work(actor, flight.number, moment, inputs)
        except BaseException as error:
            self._fail(flight, actor, error)  # not under the lock: it may wait for other ranks
            self._lock.acquire()
            return
        self._lock.acquire()
        if flight.is_over:  # it failed elsewhere
            return
        ready = self.firing.end(flight.registers, flight.marking, actor, moment, results)
        flight.last = time.monotonic()
        del results
        self._enter(flight, ready, lane)
        self._check_over(flight)

    def _enter(self, flight: _Flight, actors: Sequence[Actor], own: _Lane | None = None) -> None:
        """Actors can fire; wakes their lanes."""
        for actor in actors:
            lane = self._lane_of[actor.number]
            turn = actor.task.turn(flight.marking.fired[actor.number])
            lane.ready.push((turn, actor.task.index, actor.number))
            if lane is not own:
                lane.wake()

    def _check_over(self, flight: _Flight) -> None:
        if flight.marking.is_done:
            self._end(flight)

    def _end(self, flight: _Flight, error: BaseException | None = None) -> None:
        flight.is_over, flight.error = True, error
        self._flight = None
        self._over.notify_all()

    # --- failure -----------------------------------------------------------------------------------

    def _fail(self, flight: _Flight, actor: Actor, error: BaseException) -> None:
        """An actor of this rank failed: of itself, or because another rank did."""
        if self.board is not None:
            said = self._heard_soon() if actor.task.move is not None else None
            if said is not None:
                failure = RunError(said)
                failure.__cause__ = error
                error = failure
            else:
                rank = actor.members[0].rank
                self.board.tell(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}")
        with self._lock:
            if not flight.is_over:
                self._give_up(flight, error)

    def _heard_soon(self) -> str | None:
        """What another rank says of its failure, if a move broke because of that."""
        assert self.board is not None
        for _ in range(10):
            if (said := self.board.heard()) is not None:
                return said
            time.sleep(0.1)
        return None

    def _give_up(self, flight: _Flight, error: BaseException) -> None:
        for lane in self._lanes.values():
            lane.ready = Ready()
        self._failed = f"{type(error).__name__}: {error}"
        self._end(flight, error)

    def _look(self, flight: _Flight) -> None:
        """Whether others have failed, or nothing has happened for too long."""
        if self.board is not None and (said := self.board.heard()) is not None:
            self._give_up(flight, RunError(said))
            return
        quiet = time.monotonic() - flight.last
        if self.patience <= 0 or quiet < self.patience:
            return
        if any(self.network.actors[number].task.move is None for number in flight.marking.running):
            return  # something is being computed
        lines = [self._placed(actor, text) for actor, text in flight.marking.wait_for_graph()]
        text = f"{HANG} for {quiet:.0f} s; this is who waits for whom:\n" + "\n".join(lines)
        sys.stderr.write(text + "\n")
        if self.board is not None:
            self.board.tell(text)
        self._give_up(flight, RunError(text))

    def _placed(self, actor: Actor, text: str) -> str:
        origin = self.firing.origin(actor)
        return f"{text}  [{origin}]" if origin else text
