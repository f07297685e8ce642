"""The network that programs are: who waits for whom, as tokens on edges between actors.

It is a marked graph (Commoner, Holt, Even, Pnueli, "Marked directed graphs", 1971): an actor fires when
there is a token on every edge into it, takes one of each, and gives tokens to those who wait for it. An edge
stands for

    a register      from the actor that fills it to one that reads it; a token is a tensor to read
    a slot          back from a reader to the actor that fills; a token is the right to fill one more
    a task before   from a task to one that must come after it (`Task.after`)
    a turn          among the moves of a channel, which go in one order on all ranks
    the pace        between compute and collectives, see `pace`: without it, all parameters would be gathered
                    as soon as a step starts, and fill the memory

What can fire does not depend on when anything else fires, so that a network which finishes in one order of
firing finishes in every one, with the same numbers. The engine moves tensors over it; `liveness` goes through
it without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ..mesh import Placement
from .channels import COMPUTE, HOST, Channel, channel_of, lane_of, turns
from .pace import paced
from .program import Program, Rate, Task


class Waits(StrEnum):
    """What an actor waits for."""

    REGISTER = "register"
    SLOT = "slot"
    TASK = "task"
    TURN = "turn"
    PACE = "pace"


class Edge(NamedTuple):
    """From an actor (None: the outside, or whoever has the turn) to one that waits for it."""

    waits: Waits
    source: int | None
    target: int
    register: int = -1


class Cells(NamedTuple):
    """The slots of one register: that of micro-batch t is `base + t % modulus`."""

    base: int
    modulus: int


@dataclass(frozen=True, slots=True)
class Member:
    """A task of one rank, with registers by their number in the network.

    Attributes:
        sources, targets: where the slots of its inputs and of its outputs are.
    """

    rank: int
    task: Task
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sources: tuple[Cells, ...]
    targets: tuple[Cells, ...]


@dataclass(eq=False, slots=True)
class Actor:
    """What fires as one: a task, or a move on all the hosted ranks that take part in it.

    Attributes:
        task: that of the first of its ranks.
        computes: whether its task does; `function` is what, if that is the same for every micro-batch.
        is_gate: whether it fills a gate that others wait for.
        fires: how often in a step; at most, where micro-batches are pulled.
        is_pulled: whether it fires for units that its rank pulls, whose number is its last input.
        folds: whether it is a move along time, which fills its output when it fires for the last time.
        lane: where it runs: compute, host, or the channel of a move.
        channel: whose order it keeps to: its lane's, or that of all, in one thread.
        takes: the edges into it.
        gives: (edge, tokens) of every firing, and of the last one of a step.
        gives_late: (edge, number) of every firing after so many.
    """

    number: int
    members: tuple[Member, ...]
    fires: int
    folds: bool
    lane: Channel
    channel: Channel
    is_pulled: bool = False
    takes: list[int] = field(default_factory=list)
    gives: list[tuple[int, int]] = field(default_factory=list)
    gives_last: list[tuple[int, int]] = field(default_factory=list)
    gives_late: list[tuple[int, int]] = field(default_factory=list)
    turn: int = -1
    is_gate: bool = False
    task: Task = field(init=False)
    computes: bool = field(init=False)
    function: Callable[..., Sequence[Tensor]] | None = field(init=False)

    def __post_init__(self) -> None:
        task = self.task = self.members[0].task
        self.computes = task.compute is not None
        self.function = task.compute.forward if task.compute is not None and not task.others else None

    @property
    def place(self) -> str:
        """Its name for people."""
        member = self.members[0]
        return f"task {member.task.name} ({member.task.phase}) of rank {member.rank}"


class Network:
    """The programs of the hosted ranks as one marked graph.

    Args:
        programs: by rank.
        one_order: all moves go in one order, as one thread runs them; otherwise those of each channel do.
        micro_batches: how many to walk; the programs' own number when left out, where they are pulled the
            number of units, which one rank may get all of.
        is_paced: whether compute and collectives keep each other's pace; unless all go in one order, when
            left out.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        placement: Placement,
        one_order: bool = True,
        micro_batches: int | None = None,
        is_paced: bool | None = None,
    ) -> None:
        self.programs, self.placement = programs, placement
        self.is_paced = not one_order if is_paced is None else is_paced
        found = {program.units or program.micro_batches for program in programs.values()}
        assert len(found) == 1, f"ranks walk different numbers of micro-batches: {sorted(found)}"
        self.micro_batches = found.pop() if micro_batches is None else micro_batches
        self.one_order = one_order
        self.actors: list[Actor] = []
        self.edges: list[Edge] = []
        self.tokens: list[int] = []  # at the start of a step, once the inputs are filled
        self.cells: list[Cells] = []  # by register
        self.reads: list[int] = []  # by cell: how often what is in it is read, by the outside too
        self.bases: dict[int, int] = {}  # by rank: the number of its first register
        self.filled: dict[int, tuple[int, ...]] = {}
        self.taken: dict[int, tuple[int, ...]] = {}
        self.channels: dict[Channel, list[Actor]] = {}
        self._actor_of: dict[tuple[int, int], int] = {}  # rank and task index
        for rank, program in programs.items():
            self._add_registers(rank, program)
        self._add_actors()
        for rank, program in programs.items():
            self._connect(rank, program)
            if self.is_paced:
                self._set_pace(rank, program)
        for actor in self.actors:
            if actor.turn >= 0:
                self.channels.setdefault(actor.channel, []).append(actor)
        self.waiters = [edge.target for edge in self.edges]
        self.missing = [sum(not self.tokens[edge] for edge in actor.takes) for actor in self.actors]
        self.num_firings = sum(actor.fires for actor in self.actors)
        self.pulled = {rank: self._pulled(rank) for rank, one in programs.items() if one.units}
        self.gates = {self.bases[rank] + register for rank, one in programs.items() for register in one.gates}
        self.gated = tuple(one for one in self.actors if any(member.task.gated for member in one.members))
        for actor in self.actors:
            fills = any(not self.gates.isdisjoint(member.outputs) for member in actor.members)
            actor.is_gate = fills and bool(self.gated)

    def _add_registers(self, rank: int, program: Program) -> None:
        base = self.bases[rank] = len(self.cells)
        self.filled[rank] = tuple(base + port.register for port in program.inputs)
        self.taken[rank] = tuple(base + port.register for port in program.outputs)
        kept = {port.register for port in program.outputs}
        for register, consumers in zip(program.registers, program.consumers, strict=True):
            is_micro = register.rate is Rate.MICRO
            modulus = min(register.slots, self.micro_batches) if is_micro else 1
            readers = [program.tasks[index] for index in consumers]
            per_message = (
                one.inputs.count(register.index) * (1 if is_micro else self._fires(one)) for one in readers
            )
            self.cells.append(Cells(len(self.reads), modulus))
            self.reads += [sum(per_message) + (register.index in kept)] * modulus

    def _fires(self, task: Task) -> int:
        """How often a task fires; to pull, once more to see that all is given out."""
        return self.micro_batches + task.pulls if task.rate is Rate.MICRO else 1

    def _pulled(self, rank: int) -> tuple[Actor, ...]:
        """A rank's actors that do units of work, or pull them."""
        actors = (self.actors[self._actor_of[rank, task.index]] for task in self.programs[rank].tasks)
        return tuple(actor for actor in actors if actor.is_pulled or actor.task.pulls)

    def _add_actors(self) -> None:
        """Tasks in program order; a move joins those of the other hosted ranks with its number."""
        meetings: dict[int, int] = {}
        members: list[list[Member]] = []
        for rank, program in self.programs.items():
            for task in program.tasks:
                member = self._member(rank, task)
                meets = channel_of(task, self.placement, rank) is not COMPUTE
                number = meetings.get(task.order) if meets else None
                if number is None:
                    number = len(members)
                    members.append([])
                    if meets:
                        meetings[task.order] = number
                members[number].append(member)
                self._actor_of[rank, task.index] = number
        self.actors = [self._hired(number, tuple(found)) for number, found in enumerate(members)]

    def _member(self, rank: int, task: Task) -> Member:
        base = self.bases[rank]
        inputs = tuple(base + register for register in task.inputs)
        outputs = tuple(base + register for register in task.outputs)
        sources, targets = (tuple(self.cells[one] for one in found) for found in (inputs, outputs))
        return Member(rank, task, inputs, outputs, sources, targets)

    def _hired(self, number: int, members: tuple[Member, ...]) -> Actor:
        rank, task = members[0].rank, members[0].task
        folds = task.move is not None and task.move.axis == self.placement.num_axes
        channel = lane_of(task, self.programs[rank])
        is_pulled = task.rate is Rate.MICRO and self.programs[rank].units > 0 and not task.pulls
        actor = Actor(number, members, self._fires(task), folds, channel, channel, is_pulled)
        if channel not in (COMPUTE, HOST):
            self._check_together(actor)
            if self.one_order:
                actor.channel = COMPUTE
            actor.turn = self._edge(Waits.TURN, None, actor)
        return actor

    def _check_together(self, actor: Actor) -> None:
        """All hosted ranks between which a collective goes run it."""
        if actor.channel.ends is not None:
            return
        ranks = {member.rank for member in actor.members}
        for rank in ranks:
            absent = set(self.placement.group(actor.channel.axis, rank)) & set(self.programs) - ranks
            assert not absent, f"{actor.place}, move {actor.task.order}, is not run by ranks {sorted(absent)}"

    def _edge(
        self, waits: Waits, source: int | None, target: Actor, register: int = -1, tokens: int = 0
    ) -> int:
        self.edges.append(Edge(waits, source, target.number, register))
        self.tokens.append(tokens)
        target.takes.append(len(self.edges) - 1)
        return len(self.edges) - 1

    def _connect(self, rank: int, program: Program) -> None:
        base = self.bases[rank]
        writers = {
            register: self.actors[self._actor_of[rank, task.index]]
            for task in program.tasks
            for register in task.outputs
        }
        for register, consumers in enumerate(program.consumers):
            for index in consumers:
                reader = self.actors[self._actor_of[rank, index]]
                self._connect_register(program, base, register, writers.get(register), reader)
        for task in program.tasks:
            waiter = self.actors[self._actor_of[rank, task.index]]
            for earlier in task.after:
                before = self.actors[self._actor_of[rank, earlier]]
                edge = self._edge(Waits.TASK, before.number, waiter)
                before.gives_last.append((edge, waiter.fires))

    def _set_pace(self, rank: int, program: Program) -> None:
        for before, task in paced(program):
            source = self.actors[self._actor_of[rank, before]]
            waiter = self.actors[self._actor_of[rank, task]]
            edge = self._edge(Waits.PACE, source.number, waiter)
            if source.fires == waiter.fires:
                source.gives.append((edge, 1))
            else:
                source.gives_last.append((edge, waiter.fires))
        for task in program.tasks:
            if task.behind and not self.one_order:
                self._set_behind(rank, task, *task.behind)

    def _set_behind(self, rank: int, task: Task, first: int, number: int) -> None:
        """A task waits until another has gone `number` micro-batches on, or has done its last."""
        source, waiter = (self.actors[self._actor_of[rank, index]] for index in (first, task.index))
        edge = self._edge(Waits.PACE, source.number, waiter)
        source.gives_late.append((edge, number))
        source.gives_last.append((edge, min(number, source.fires)))

    def _connect_register(
        self, program: Program, base: int, register: int, writer: Actor | None, reader: Actor
    ) -> None:
        number = base + register
        if writer is None:
            self._edge(Waits.REGISTER, None, reader, number, tokens=reader.fires)
            return
        edge = self._edge(Waits.REGISTER, writer.number, reader, number)
        if (
            program.registers[register].rate is Rate.STEP
        ):  # filled once a step: its slot is free when one starts
            writer.gives_last.append((edge, reader.fires))
            return
        writer.gives.append((edge, 1))
        back = self._edge(Waits.SLOT, reader.number, writer, number, tokens=self.cells[number].modulus)
        reader.gives.append((back, 1))

    @cached_property
    def turns(self) -> Mapping[Channel, tuple[Actor, ...]]:
        """Of every channel whose moves have turns, who goes one after the other in a step."""
        return {
            channel: tuple(turns(actors, self.micro_batches, not self.one_order))
            for channel, actors in self.channels.items()
        }


class Marking:
    """The tokens of one step, and what every actor still waits for.

    Attributes:
        closed: actors that wait for the step before, and how often they were closed.
        is_held_back: whether what is gated does not fire in this step.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.tokens = network.tokens.copy()
        self.missing = network.missing.copy()
        self.fired = [0] * len(network.actors)  # how often each has
        self.num_fired = 0
        self.running: set[int] = set()
        self.closed: dict[int, int] = {}
        self.is_held_back = False
        self._turns = {channel: iter(order) for channel, order in network.turns.items()}
        self.turn: dict[Channel, Actor | None] = {}
        self._given: list[Actor] = []
        for channel in self._turns:
            self._pass_turn(channel)

    def ready(self) -> list[Actor]:
        """Those that can fire at the start of a step."""
        self._given = []
        return [actor for actor in self.network.actors if not self.missing[actor.number]]

    def begin(self, actor: Actor) -> int:
        """An actor that can fire starts to: takes a token of every edge into it. Returns its micro-batch."""
        number = actor.number
        self.running.add(number)
        if actor.fires > 1:  # else nobody looks at its tokens again
            tokens = self.tokens
            for edge in actor.takes:
                tokens[edge] -= 1
                if not tokens[edge]:
                    self.missing[number] += 1
        return self.fired[number]

    def end(self, actor: Actor) -> list[Actor]:
        """It is done: gives its tokens. Returns those that can fire now."""
        number = actor.number
        self.running.discard(number)
        self.num_fired += 1
        fired = self.fired[number] = self.fired[number] + 1
        self._given = []
        if fired < actor.fires and not self.missing[number]:
            self._given.append(actor)
        if actor.gives:
            self._give(actor.gives)
        if actor.gives_late:
            self._give((edge, 1) for edge, late in actor.gives_late if fired > late)
        if actor.gives_last and fired == actor.fires:
            self._give(actor.gives_last)
        if actor.turn >= 0:
            self._pass_turn(actor.channel)
        return self._given

    def close(self, puller: Actor) -> list[Actor]:
        """A rank has pulled all that it gets, and has no work for what it might have. Returns who can fire.

        It asks when all is done that it pulled before, so that its actors have all fired equally often.
        """
        self.running.discard(puller.number)
        self._given = []
        for actor in self.network.pulled[puller.members[0].rank]:
            left = actor.fires - self.fired[actor.number]
            if left:
                self.num_fired += left
                self.fired[actor.number] = actor.fires
                self._give(actor.gives_last)
        return self._given

    def hold_back(self) -> list[Actor]:
        """What is gated does not fire in this step, and nobody waits for it. Returns who can fire now."""
        self._given, self.is_held_back = [], True
        for actor in self.network.gated:
            left = actor.fires - self.fired[actor.number]
            if left:
                self.num_fired += left
                self.fired[actor.number] = actor.fires
                self._give((edge, tokens * left) for edge, tokens in actor.gives)
                self._give(actor.gives_last)
        for channel, actor in list(self.turn.items()):
            if actor is not None and self.fired[actor.number] >= actor.fires:
                self._pass_turn(channel)
        return self._given

    def shut(self, actors: Iterable[int]) -> None:
        """Lets actors wait until each has been opened as often as it is named here."""
        for number in actors:
            self.missing[number] += 1
            self.closed[number] = self.closed.get(number, 0) + 1

    def open(self, actors: Iterable[int]) -> list[Actor]:
        """Opens actors that were shut. Returns those that can fire now."""
        self._given = []
        for number in actors:
            self.closed[number] -= 1
            if not self.closed[number]:
                del self.closed[number]
            self._less(number)
        return self._given

    def _give(self, gifts: Iterable[tuple[int, int]]) -> None:
        """Gives edges some tokens each."""
        held, missing, waiters = self.tokens, self.missing, self.network.waiters
        for edge, tokens in gifts:
            if not held[edge]:
                number = waiters[edge]
                if missing[number] > 1:
                    missing[number] -= 1
                else:
                    self._less(number)
            held[edge] += tokens

    def _less(self, number: int) -> None:
        """An actor waits for one thing less."""
        self.missing[number] -= 1
        if not self.missing[number] and number not in self.running:
            actor = self.network.actors[number]
            if self.fired[number] < actor.fires:
                self._given.append(actor)

    def _pass_turn(self, channel: Channel) -> None:
        actor = next(self._turns[channel], None)
        while actor is not None and self.fired[actor.number] >= actor.fires:  # it is held back
            actor = next(self._turns[channel], None)
        self.turn[channel] = actor
        if actor is not None:
            self._give(((actor.turn, 1),))

    @property
    def is_done(self) -> bool:
        return self.num_fired == self.network.num_firings

    # --- what went wrong ---------------------------------------------------------------------------

    def waiting(self) -> Iterator[tuple[Actor, list[Edge]]]:
        """Actors that have not fired as often as they must, with the edges that they miss a token on."""
        for actor in self.network.actors:
            if self.fired[actor.number] < actor.fires and actor.number not in self.running:
                yield actor, [self.network.edges[edge] for edge in actor.takes if not self.tokens[edge]]

    def source(self, edge: Edge) -> Actor | None:
        """The actor that an edge waits for; None for the outside."""
        if edge.waits is Waits.TURN:
            return self.turn[self.network.actors[edge.target].channel]
        return None if edge.source is None else self.network.actors[edge.source]

    def described(self, actor: Actor, edge: Edge) -> str:
        """What an actor waits for, in words."""
        source = self.source(edge)
        who = "the outside" if source is None else f"{source.place}{self.when(source)}"
        if edge.waits in (Waits.TASK, Waits.PACE):
            return f"waits until {who} is done"
        if edge.waits is Waits.TURN:
            return f"waits for its turn after {who}"
        rank = next(one.rank for one in actor.members if edge.register in (*one.inputs, *one.outputs))
        register = self.network.programs[rank].registers[edge.register - self.network.bases[rank]]
        name = f"register r{register.index} ({register.name})"
        if edge.waits is Waits.SLOT:
            return f"waits until {who} hands back one of {register.slots} slots of {name}"
        return f"waits for {name} from {who}"

    def when(self, actor: Actor) -> str:
        """The micro-batch that an actor is at."""
        return f", micro-batch {min(self.fired[actor.number], actor.fires - 1)}" if actor.fires > 1 else ""

    def wait_for_graph(self) -> Iterator[tuple[Actor, str]]:
        """Every actor that runs or waits, and what it waits for."""
        for number in sorted(self.running):
            actor = self.network.actors[number]
            yield actor, f"{actor.place}{self.when(actor)} runs"
        for actor, edges in self.waiting():
            waits = [self.described(actor, edge) for edge in edges]
            waits += ["waits for the step before"] * (actor.number in self.closed)
            what = "; ".join(waits)
            yield actor, f"{actor.place}{self.when(actor)} {what or 'can fire'}"
