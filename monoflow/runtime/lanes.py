"""Lanes: threads that fire actors, so that compute, moves and the host's work overlap.

There is one lane for compute, one for each channel of moves and one for the host; each fires those of its
actors that can fire, as the engine does in one thread. A lane that waits, for an actor or inside a move, has
given up the interpreter's lock.

Two steps may be on their way, of which the first has precedence on every lane; `following` says what the
second may do.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..boxing.collectives import Board
from ..errors import RunError
from .channels import COMPUTE, Channel
from .firing import Firing, Homes, Registers
from .following import Following, Progress
from .network import Actor, Marking, Network
from .ready import Ready
from .signs import HANG

T = TypeVar("T")
Results = dict[int, list[torch.Tensor]]

#: How often, in seconds, one who waits for a step looks whether other ranks have failed or nothing happens.
_LOOK = 0.5


@dataclass(eq=False)
class _Flight:
    """A step on its way.

    Attributes:
        homes: where its state lives; None if that is for others to see to, so that no step may follow.
        kept: see `Ticket.keep`.
        broken: the actor of it that failed while the step before was not over, and why.
        is_ending: whether it has done everything, and a lane brings its state to where it lives.
    """

    number: int
    marking: Marking
    registers: Registers
    progress: Progress
    homes: Homes | None
    error: BaseException | None = None
    kept: object = None
    broken: tuple[Actor, BaseException] | None = None
    is_ending: bool = False
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

    def wait(self, lock: threading.RLock) -> None:
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

    def keep(self, value: object) -> None:
        """Keeps something until the step is over, and after that only if it changed no state."""
        self._crew.keep(self._flight, value)

    @property
    def went_well(self) -> bool:
        """Whether nothing speaks against it so far: it has not failed, and may change state."""
        return self._flight.error is None and not self._flight.marking.is_held_back

    @property
    def kept(self) -> object:
        """What is kept; None if nothing is, any more."""
        return self._flight.kept

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
    """The lanes of one engine; two steps are on their way at most.

    Args:
        board: where the other ranks are heard of, if there are others.
        patience: seconds without any firing after which a step fails; 0 to wait for ever.
        one_lane: whether all actors share one thread.

    Attributes:
        num_over: how many steps went well to their end.
        idle_since: when the last step was over, as `time.perf_counter_ns` has it; None while one runs.
    """

    def __init__(
        self, network: Network, firing: Firing, board: Board | None, patience: float, one_lane: bool = False
    ) -> None:
        self.network, self.firing, self.board, self.patience = network, firing, board, patience
        self.one_lane = one_lane
        self._lock = threading.RLock()  # `stop` may be called by a collection of garbage, anywhere
        self._over = threading.Condition(self._lock)
        channels = dict.fromkeys(
            [COMPUTE] if one_lane else [COMPUTE, *(one.channel for one in network.actors)]
        )
        self._lanes: dict[Channel, _Lane] = {channel: _Lane() for channel in channels}
        self._lane_of = [self._lanes.get(one.channel, self._lanes[COMPUTE]) for one in network.actors]
        self._threads: list[threading.Thread] = []
        self._following = Following(network)
        self._flights: list[_Flight] = []
        self._last = 0.0  # when an actor was last done, as `time.monotonic` has it
        self._failed = ""
        self._is_asked = False  # whether somebody waits for room for another step
        self._stopped = False
        self._num_steps = self.num_over = 0
        self.idle_since: int | None = 0

    @property
    def num_lanes(self) -> int:
        """How many threads there are."""
        return len(self._lanes)

    @property
    def markings(self) -> list[Marking]:
        """Of the steps that are on their way."""
        return [flight.marking for flight in list(self._flights)]

    def admit(self, follows: bool) -> None:
        """Waits until a step may take its inputs; at once if one has failed.

        Args:
            follows: whether the step before may still run then.
        """
        with self._lock:
            self._is_asked = True
            while self._flights and not (follows and self._has_room):
                self._rest()
            self._is_asked = False

    @property
    def _has_room(self) -> bool:
        """Whether the only step on its way lets another one take its inputs."""
        (first, *others) = self._flights
        return not others and first.homes is not None and first.progress.takes_inputs

    def start(self, registers: Registers, homes: Homes | None = None) -> Ticket:
        """Begins a step, whose inputs are in its registers.

        Args:
            homes: where the state lives that the step leaves. It is there when the step is over, and the next
                step may begin before that, if it has homes too. None if the caller keeps the state, for which
                both steps wait.

        Raises:
            RunError: an earlier step failed.
        """
        self.admit(homes is not None)
        with self._lock:
            if self._failed:
                raise RunError(f"a step failed before, so that the ranks are out of step: {self._failed}")
            if not self._threads:
                self._hire()
            marking, progress = Marking(self.network), Progress(self._following)
            flight = _Flight(self._num_steps, marking, registers, progress, homes)
            self._num_steps += 1
            self._last = time.monotonic()
            if self._flights:
                marking.shut(self._following.closed(self._flights[0].progress.places))
            self._flights.append(flight)
            self.idle_since = None
            self.firing.start()
            self._enter(flight, marking.ready())
            self._check_over()
        return Ticket(self, flight)

    def keep(self, flight: _Flight, value: object) -> None:
        """See `Ticket.keep`."""
        with self._lock:
            if not flight.is_over or flight.marking.is_held_back:
                flight.kept = value

    def wait(self, flight: _Flight) -> None:
        """Until a step is over. Raises what it failed of."""
        with self._lock:
            while not flight.is_over:
                self._rest()
        if flight.error is not None:
            raise flight.error

    def _rest(self) -> None:
        """Lets time go by, with the lock, and sees to it that it is worth while."""
        if not self._over.wait(_LOOK):
            self._without_lock(self._look)

    def stop(self) -> None:
        """Ends the threads that do not work on something."""
        with self._lock:
            self._stopped = True
            for lane in self._lanes.values():
                lane.wake()

    def dismiss(self) -> None:
        """Ends the threads and waits for them, though not for long: one may wait for a rank that is gone."""
        self.stop()
        end = time.monotonic() + _LOOK
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    # --- lanes -------------------------------------------------------------------------------------

    def _hire(self) -> None:
        for channel, lane in self._lanes.items():
            thread = threading.Thread(
                target=self._work, args=(lane,), name=f"monoflow {channel}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        _CREWS.add(self)

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
        step, _, _, number = lane.ready.pop()
        flight = self._flights[0 if step == self._flights[0].number else 1]
        actor, firing, registers, marking = (
            self.network.actors[number],
            self.firing,
            flight.registers,
            flight.marking,
        )
        if flight.broken is not None:
            return
        moment = marking.begin(actor)
        try:
            inputs = firing.read(registers, actor, moment)
            self._lock.release()
            try:
                results = firing.work(actor, step, moment, inputs)
            finally:
                self._lock.acquire()
            if flight.is_over:  # it failed elsewhere
                return
            ready = firing.end(registers, marking, actor, moment, results)
        except BaseException as error:
            broken = error
            self._without_lock(lambda: self._fail(flight, actor, broken))  # it may wait for other ranks
            return
        self._last = time.monotonic()
        del results
        self._enter(flight, ready, lane)
        if moment + 1 == actor.fires:
            opened = flight.progress.note(actor)
            if flight is self._flights[0]:
                self._open(opened)
        if marking.is_done:
            self._check_over()

    def _enter(self, flight: _Flight, actors: Sequence[Actor], own: _Lane | None = None) -> None:
        """Actors can fire; wakes their lanes."""
        for actor in actors:
            number, task = actor.number, actor.task
            lane = self._lane_of[number]
            lane.ready.push((flight.number, task.turn(flight.marking.fired[number]), task.index, number))
            if lane is not own:
                lane.wake()

    def _open(self, actors: Sequence[int]) -> None:
        """The first step is so far that the next one, if there is one, may fire more."""
        if len(self._flights) > 1:
            self._enter(self._flights[1], self._flights[1].marking.open(actors))
        elif self._is_asked and self._has_room:
            self._over.notify_all()

    def _check_over(self) -> None:
        """The first step is over when it has done everything and its state is where it lives."""
        if not self._flights or self._flights[0].is_ending or not self._flights[0].marking.is_done:
            return
        flight = self._flights[0]
        flight.is_ending = True
        if (homes := flight.homes) is not None:
            try:
                self._without_lock(lambda: flight.registers.settle(homes, flight.marking.is_held_back))
            except BaseException as error:
                broken = error
                self._without_lock(lambda: self._fail(flight, self.network.actors[-1], broken))
        if flight.is_over:  # it failed, here or elsewhere
            return
        self.num_over += 1
        self._open(flight.progress.end())
        self._end(flight)
        if self._flights and (failed := self._flights[0].broken) is not None:
            following = self._flights[0]
            self._without_lock(lambda: self._fail(following, *failed))
        self._check_over()

    def _without_lock(self, call: Callable[[], T]) -> T:
        self._lock.release()
        try:
            return call()
        finally:
            self._lock.acquire()

    def _end(self, flight: _Flight) -> None:
        flight.is_over = True
        if not flight.marking.is_held_back:
            flight.kept = None
        self._flights.remove(flight)
        if not self._flights:
            self.idle_since = time.perf_counter_ns()
        self._over.notify_all()

    # --- failure -----------------------------------------------------------------------------------

    def _fail(self, flight: _Flight, actor: Actor, error: BaseException) -> None:
        """An actor of this rank failed: of itself, or because another rank did.

        If the step before is not over, that ends first, as if this one had not begun.
        """
        said = self._heard_soon() if self.board is not None and actor.task.move is not None else None
        if said is not None:
            failure = RunError(said)
            failure.__cause__ = error
            error = failure
        with self._lock:
            if flight.is_over:
                return
            if said is None and flight is not self._flights[0]:
                flight.broken = actor, error
                return
        if said is None and self.board is not None:
            rank = actor.members[0].rank
            self.board.tell(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}")
        with self._lock:
            if not flight.is_over:
                self._give_up(error)

    def _heard_soon(self) -> str | None:
        """What another rank says of its failure, if a move broke because of that."""
        assert self.board is not None
        for _ in range(10):
            if (said := self.board.heard()) is not None:
                return said
            time.sleep(0.1)
        return None

    def _give_up(self, error: BaseException) -> None:
        """All steps fail."""
        for lane in self._lanes.values():
            lane.ready = Ready()
        self._failed = f"{type(error).__name__}: {error}"
        for flight in self._flights.copy():
            flight.error = error
            self._end(flight)

    def _look(self) -> None:
        """Whether others have failed, or nothing has happened for too long. Asks them without the lock."""
        text = self.board.heard() if self.board is not None else None
        if text is None:
            with self._lock:
                text = self._hang()
            if text is None:
                return
            sys.stderr.write(text + "\n")
            if self.board is not None:
                self.board.tell(text)
        with self._lock:
            if self._flights:
                self._give_up(RunError(text))

    def _hang(self) -> str | None:
        """Who waits for whom, if nothing has happened for too long."""
        quiet = time.monotonic() - self._last
        if self.patience <= 0 or quiet < self.patience or not self._flights:
            return None
        actors = self.network.actors
        if any(actors[number].task.move is None for one in self._flights for number in one.marking.running):
            return None  # something is being computed
        waiting = [line for one in self._flights for line in one.marking.wait_for_graph()]
        lines = [self._placed(actor, text) for actor, text in waiting]
        return f"{HANG} for {quiet:.0f} s; this is who waits for whom:\n" + "\n".join(lines)

    def _placed(self, actor: Actor, text: str) -> str:
        origin = self.firing.origin(actor)
        return f"{text}  [{origin}]" if origin else text


#: Those that have threads.
_CREWS: weakref.WeakSet[Crew] = weakref.WeakSet()


@atexit.register  # at import, so that it is called after the process group is left, which waits for steps
def _dismiss() -> None:
    """Before the interpreter ends, which would end a thread in the middle of torch, and abort."""
    for crew in list(_CREWS):
        crew.dismiss()
