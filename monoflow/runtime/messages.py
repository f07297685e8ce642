"""Messages between actors, worked out from events and the wiring of their programs: pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .trace import COMPUTE, Event, by_rank, step_times
from .wiring import Wiring


class Message(NamedTuple):
    """A register that was filled once, and those who read it.

    Attributes:
        register: its number in the program of the rank.
        reads: of every reader, its first firing that reads the message, as far as they were recorded.
        emptied: when its last reader was done (without readers: the step); None if that was not recorded.
    """

    wiring: Wiring
    register: int
    writer: Event
    reads: tuple[Event, ...]
    emptied: int | None


class Wait(NamedTuple):
    """Compute of a rank that had nothing to do until a register was filled.

    Attributes:
        actor: what then ran; `register`: what it had waited for; `writer`: the actor that filled that.
        num_ns: how long, over all times.
    """

    rank: int
    actor: str
    register: str
    writer: str
    num_ns: int


#: (index of the actor, step, micro-batch; 0 for an actor that fires once a step) -> its firing.
Firings = Mapping[tuple[int, int, int], Event]


def firings(events: Sequence[Event], wiring: Wiring) -> Firings:
    """Which actor of a program each event is a firing of; other programs' and ranks' are left out."""
    named: dict[str, list[int]] = defaultdict(list)
    for index, actor in enumerate(wiring.actors):
        named[actor.name].append(index)
    found: dict[tuple[int, int, int], Event] = {}
    seen: dict[tuple[str, int, int], int] = defaultdict(int)
    mine = (one for one in events if one.program == wiring.program and one.rank == wiring.rank)
    for event in sorted(mine, key=lambda one: one.start):
        same = named.get(event.name, ())
        if not same:
            continue
        time = event.time if wiring.actors[same[0]].micro else 0
        key = event.name, event.step, time
        if seen[key] < len(same):  # actors of one name fire in the order of the program
            found[same[seen[key]], event.step, time] = event
            seen[key] += 1
    return found


def messages(events: Sequence[Event], wirings: Sequence[Wiring]) -> list[Message]:
    """What actors filled and who read it, in the order of filling; not what the outside fills."""
    ends = {key: span.end for key, span in step_times(events).items()}
    found: list[Message] = []
    for wiring in wirings:
        fired = firings(events, wiring)
        for (index, step, time), event in fired.items():
            for register in wiring.actors[index].outputs:
                made = _message(wiring, fired, register, index, step, time)
                if made is None:
                    continue
                reads, last = made
                if not wiring.readers[register]:  # a result, or of no use
                    last = event.end if wiring.registers[register].micro else ends[wiring.program, step]
                found.append(Message(wiring, register, event, reads, last))
    return sorted(found, key=lambda one: one.writer.end)


def _message(
    wiring: Wiring, fired: Firings, register: int, writer: int, step: int, time: int
) -> tuple[tuple[Event, ...], int | None] | None:
    """The reads of a message and when it was emptied; None if this firing did not fill the register."""
    micro, count = wiring.registers[register].micro, wiring.micro_batches
    if wiring.is_pulled and wiring.actors[writer].micro:
        count = _count(fired, writer, step)
    if wiring.actors[writer].micro and not micro and time != count - 1:
        return None  # a move along time that has not seen every micro-batch
    reads: list[Event] = []
    last: int | None = 0
    for reader in wiring.readers[register]:
        repeats = wiring.actors[reader].micro and not micro
        if repeats and wiring.is_pulled:
            count = max(1, _count(fired, reader, step))
        times = range(count) if repeats else (time if micro else 0,)
        events = [fired.get((reader, step, one)) for one in times]
        if (first := events[0]) is not None:
            reads.append(first)
        end = events[-1]
        last = None if last is None or end is None else max(last, end.end)
    return tuple(reads), last if reads else None


def _count(fired: Firings, actor: int, step: int) -> int:
    """How often an actor fired in a step."""
    count = 0
    while (actor, step, count) in fired:
        count += 1
    return count


# --- what follows from messages ------------------------------------------------------------------------


def most_live(found: Sequence[Message]) -> dict[tuple[str, int, int], int]:
    """The most messages that were in a register at a time: (program, rank, register) -> count.

    A message is in its register from when it is written until its last reader has taken it.
    """
    changes: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    for one in found:
        key = one.wiring.program, one.wiring.rank, one.register
        changes[key].append((one.writer.end, 1))
        if one.emptied is not None:
            changes[key].append((max(one.writer.end, one.emptied), -1))
    return {key: max(1, *(level for _, level in levels(own))) for key, own in changes.items()}


def levels(changes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(moment, level) after every moment with a change; moments in order."""
    level = 0
    ordered = sorted(changes)
    for position, (moment, change) in enumerate(ordered):
        level += change
        if position + 1 == len(ordered) or ordered[position + 1][0] != moment:
            yield moment, level


def fills(found: Sequence[Message]) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """How many messages the registers of a class hold over time: (rank, class) -> (moment, count)."""
    return _over_time(found, lambda one: one.wiring.register_class(one.register), lambda one: 1)


def held(found: Sequence[Message]) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Bytes of what registers hold, the step's inputs left out: (rank, "registers") -> (moment, bytes)."""
    return _over_time(
        found, lambda one: "registers", lambda one: one.wiring.registers[one.register].num_bytes
    )


def _over_time(
    found: Sequence[Message], name: Callable[[Message], str], amount: Callable[[Message], int]
) -> dict[tuple[int, str], list[tuple[int, int]]]:
    changes: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for one in found:
        own = changes[one.wiring.rank, name(one)]
        own.append((one.writer.end, amount(one)))
        if one.emptied is not None:
            own.append((max(one.writer.end, one.emptied), -amount(one)))
    return {key: list(levels(own)) for key, own in sorted(changes.items())}


class Crossing(NamedTuple):
    """Firings of one move on two ranks: the second waited for the first one's data, or its arrival."""

    source: Event
    target: Event


def crossings(events: Sequence[Event], wirings: Sequence[Wiring]) -> list[Crossing]:
    """Who waited for whom: a receiver for its sender; in a collective, all for the rank that came last."""
    meetings: dict[tuple, list[tuple[Event, bool, bool]]] = defaultdict(list)
    for wiring in wirings:
        for (index, step, time), event in firings(events, wiring).items():
            actor = wiring.actors[index]
            if len(actor.group) > 1:
                key = wiring.program, actor.order, actor.group, step, time
                meetings[key].append((event, bool(actor.inputs), bool(actor.outputs)))
    found: list[Crossing] = []
    for met in meetings.values():
        senders = [event for event, sends, receives in met if sends and not receives]
        source = senders[0] if senders else max((event for event, _, _ in met), key=lambda one: one.start)
        found += [
            Crossing(source, event)
            for event, _, receives in met
            if event is not source and receives and event.end >= source.start
        ]
    return sorted(found, key=lambda one: one.target.start)


def without_waiting(events: Sequence[Event], wirings: Sequence[Wiring]) -> list[Event]:
    """The events with moves that begin when the last of their ranks was there: before that they only waited.

    A sender does not wait for its receiver. Where a rank's part was not recorded, nothing is known to wait.
    """
    arrived = {target: source.start for source, target in crossings(events, wirings)}
    return [
        one._replace(start=min(one.end, max(one.start, arrived[one]))) if one in arrived else one
        for one in events
    ]


def waits(events: Sequence[Event], found: Sequence[Message]) -> list[Wait]:
    """What compute waited for, longest first: the register that was filled last before it went on.

    Waiting counts from when a rank's compute had nothing to do within the step until that register was full.
    """
    needed: dict[Event, Message] = {}
    for message in found:
        for event in message.reads:
            known = needed.get(event)
            if known is None or known.writer.end < message.writer.end:
                needed[event] = message
    begins = {key: span.start for key, span in step_times(events).items()}
    total: dict[tuple[int, str, str, str], int] = defaultdict(int)
    for rank, own in by_rank(events).items():
        free = 0
        for event in sorted((one for one in own if one.kind in COMPUTE), key=lambda one: one.start):
            since = max(free, begins[event.program, event.step])
            free = max(free, event.end)
            if event in needed:
                last = needed[event]
                waited = min(event.start, last.writer.end) - since
                if waited > 0:
                    register = last.wiring.registers[last.register].name
                    total[rank, event.name, register, last.writer.name] += waited
    return sorted((Wait(*key, num_ns) for key, num_ns in total.items()), key=lambda one: -one.num_ns)
