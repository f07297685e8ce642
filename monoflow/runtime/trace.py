"""What actors did and when, and what that says of a run: pure functions on events.

Times are nanoseconds of one clock. Compute is what runs ops (an accumulation and an optimizer too),
communication is boxing, data is sources and copies, and host work is sinks and writers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .recorder import Fired

#: Kinds of actors, by the resource that they take.
COMPUTE = frozenset({"compute", "accumulate", "optimizer"})
COMMUNICATION = frozenset({"boxing"})
DATA = frozenset({"source", "copy"})
HOST = frozenset({"sink", "writer"})

#: The lane, and the program, of what a script waits for outside of its steps.
SCRIPT = "script"

KINDS = ("source", "copy", "compute", "boxing", "accumulate", "optimizer", "sink", "writer")


class Event(NamedTuple):
    """An actor fired.

    Attributes:
        program: of which compiled step, when a job has several.
        lane: the thread or stream that it ran on.
        kind: one of KINDS.
        time: the number of the micro-batch.
        start, end: in nanoseconds.
        num_bytes: of what it wrote.
    """

    program: str
    rank: int
    lane: str
    kind: str
    name: str
    step: int
    time: int
    start: int
    end: int
    num_bytes: int

    @classmethod
    def of(cls, program: str, fired: Fired) -> Event:
        """What a recorder was told, of one of the job's programs."""
        lane, kind, name, rank, *moment = fired
        return cls(program, rank, lane, kind, name, *moment)


class Interval(NamedTuple):
    """From `start` until before `end`, in nanoseconds."""

    start: int
    end: int


# --- sets of moments -----------------------------------------------------------------------------------


def union(intervals: Iterable[tuple[int, int]]) -> list[Interval]:
    """The same moments as sorted intervals that neither overlap nor touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if found and start <= found[-1].end:
            found[-1] = Interval(found[-1].start, max(found[-1].end, end))
        else:
            found.append(Interval(start, end))
    return found


def minus(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The moments of `left` that are not in `right`; both as `union` makes them."""
    found, first = [], 0
    for start, end in left:
        while first < len(right) and right[first].end <= start:
            first += 1
        position = first
        while position < len(right) and right[position].start < end:
            if right[position].start > start:
                found.append(Interval(start, right[position].start))
            start = max(start, right[position].end)
            position += 1
        if start < end:
            found.append(Interval(start, end))
    return found


def length(intervals: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def intervals_of(events: Iterable[Event], kinds: frozenset[str]) -> list[Interval]:
    """When at least one event of some kinds ran."""
    return union((event.start, event.end) for event in events if event.kind in kinds)


def by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Events of every rank, ranks in order."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        found[event.rank].append(event)
    return dict(sorted(found.items()))


# --- figures -------------------------------------------------------------------------------------------


def bubble(events: Sequence[Event]) -> float:
    """The share of the ranks' time without compute, from the first compute of a step to its last on any rank.

    With S stages, k micro-batches and nothing else that takes time, 1F1B has (S - 1) / (k + S - 1) (Narayanan
    et al., PipeDream-Flush, 2021). Ranks that never compute do not count; of steps that overlap, each one's
    time counts for both.

    Returns:
        Between 0 and 1; 0 without compute.
    """
    ranks = by_rank(event for event in events if event.kind in COMPUTE)
    spans = step_times(event for event in events if event.kind in COMPUTE)
    total = idle = 0
    for own in ranks.values():
        busy = intervals_of(own, COMPUTE)
        for span in spans.values():
            total += span.end - span.start
            idle += length(minus([span], busy))
    return idle / total if total else 0.0


class Exposed(NamedTuple):
    """Nanoseconds of communication, summed over ranks.

    Attributes:
        exposed: while the rank computed nothing.
        total: all of it.
    """

    exposed: int
    total: int

    @property
    def share(self) -> float:
        """Of communication, what nothing hides; 0 without communication."""
        return self.exposed / self.total if self.total else 0.0


def exposed_communication(events: Sequence[Event]) -> Exposed:
    """How much of the communication runs while its rank computes nothing.

    A move starts when its rank is ready for it: waiting for other ranks is part of it, unless events went
    through `messages.without_waiting`.
    """
    exposed = total = 0
    for own in by_rank(events).values():
        moving = intervals_of(own, COMMUNICATION)
        total += length(moving)
        exposed += length(minus(moving, intervals_of(own, COMPUTE)))
    return Exposed(exposed, total)


@dataclass(frozen=True)
class Breakdown:
    """Where a rank's time went, every moment counted once: for the first of these that applies.

    Attributes:
        compute: it computed.
        communication: it communicated and did not compute.
        data: it fetched or copied data and did neither.
        host: it did other work of the host alone.
        idle: a step was running, here or on another rank, and no actor of this rank was.
        outside: between the steps.
    """

    compute: int
    communication: int
    data: int
    host: int
    idle: int
    outside: int

    @property
    def total(self) -> int:
        """From the rank's first event to the end of its last one."""
        return self.compute + self.communication + self.data + self.host + self.idle + self.outside


def breakdown(events: Sequence[Event]) -> dict[int, Breakdown]:
    """Where each rank's time went, from the first event of all ranks to the end of the last one."""
    running = union(step_times(events).values())
    return {rank: _breakdown(own, running) for rank, own in by_rank(events).items()}


def _breakdown(events: Sequence[Event], running: Sequence[Interval]) -> Breakdown:
    """Of one rank.

    Args:
        running: when a step was running on any rank.
    """
    seen: list[Interval] = []
    parts = []
    for kinds in (COMPUTE, COMMUNICATION, DATA, HOST):
        now = intervals_of(events, kinds)
        parts.append(length(minus(now, seen)))
        seen = union([*seen, *now])
    compute, communication, data, host = parts
    idle = length(running) - length(seen)
    whole = running[-1].end - running[0].start if running else 0
    return Breakdown(compute, communication, data, host, idle, whole - length(running))


def time_by_kind(events: Iterable[Event]) -> dict[int, dict[str, int]]:
    """Nanoseconds that each rank's actors of every kind ran; those of several lanes add up."""
    found: dict[int, dict[str, int]] = {}
    for rank, own in by_rank(events).items():
        spent: dict[str, int] = defaultdict(int)
        for event in own:
            spent[event.kind] += event.end - event.start
        found[rank] = {kind: spent[kind] for kind in KINDS if kind in spent}
    return found


def step_times(events: Iterable[Event]) -> dict[tuple[str, int], Interval]:
    """Per program and step, from its first event to its last, on any rank."""
    found: dict[tuple[str, int], Interval] = {}
    for event in events:
        key = event.program, event.step
        known = found.get(key, Interval(event.start, event.end))
        found[key] = Interval(min(known.start, event.start), max(known.end, event.end))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def ahead(events: Iterable[Event]) -> dict[int, int]:
    """Per rank, nanoseconds in which a step fired that had begun before the one before it was over."""
    spans: dict[tuple[int, str], dict[int, Interval]] = defaultdict(dict)
    for rank, own in by_rank(events).items():
        for (program, step), span in step_times(own).items():
            spans[rank, program][step] = span
    found: dict[int, int] = defaultdict(int)
    for (rank, _), steps in spans.items():
        for step, span in steps.items():
            if step - 1 in steps:
                found[rank] += max(0, steps[step - 1].end - span.start)
    return dict(found)


# --- the sentence --------------------------------------------------------------------------------------

_BUSY = 0.75  # of the time in compute: nothing else is worth a remedy
_UNEVEN = 1.15  # times the mean that the slowest rank computes


def bottleneck(parts: Mapping[int, Breakdown]) -> str:
    """What takes the most time besides compute, and what could be done, in one sentence."""
    if not parts:
        return "Nothing fired."
    whole = sum(one.total for one in parts.values()) or 1
    share = {
        name: sum(getattr(one, name) for one in parts.values()) / whole
        for name in ("compute", "communication", "data", "host", "idle", "outside")
    }
    name = max(list(share)[1:], key=lambda one: share[one])
    if share["compute"] >= _BUSY:
        return f"Compute is the bottleneck: the ranks compute {share['compute']:.0%} of the time."
    if name in ("communication", "idle") and (late := _late(parts)) is not None:
        rank, times = late
        return (
            f"Rank {rank} is the bottleneck: it computes {times:.2f} times as long as the mean rank, and the "
            f"others wait for it."
        )
    return f"{_SENTENCES[name]} ({share[name]:.0%} of the time; compute has {share['compute']:.0%})."


_SENTENCES = {
    "communication": "Communication that no compute hides is the bottleneck",
    "data": "Data is the bottleneck: compute waits for sources and copies",
    "host": "Host work is the bottleneck: compute waits for sinks and writers",
    "idle": "Waiting is the bottleneck: within steps, ranks have nothing that could run (the bubble)",
    "outside": "What the script does between the steps, such as fetching a batch, is the bottleneck",
}


def _late(parts: Mapping[int, Breakdown]) -> tuple[int, float] | None:
    """The rank that computes for much longer than the mean, and how many times as long."""
    mean = sum(one.compute for one in parts.values()) / len(parts)
    rank = max(parts, key=lambda one: parts[one].compute)
    if len(parts) < 2 or not mean or parts[rank].compute < _UNEVEN * mean:
        return None
    return rank, parts[rank].compute / mean
