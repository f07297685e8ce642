"""A run's timeline as a file in the trace event format, which Perfetto and chrome://tracing show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A process per
rank, a thread per lane, a slice per firing, an arrow per message, and counters of what registers hold. What
only `monoflow trace` needs lies beside it, under "otherData".
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..errors import FlowError
from ..runtime.messages import Message, crossings, fills, held, messages
from ..runtime.ring import Part, read_part
from ..runtime.signs import NAMES
from ..runtime.trace import Event
from ..runtime.wiring import Wiring

_FORMAT = 1
#: Names of colours that the format knows.
_COLOURS = {
    "source": "rail_load",
    "copy": "rail_response",
    "compute": "thread_state_running",
    "boxing": "thread_state_iowait",
    "accumulate": "rail_animation",
    "optimizer": "thread_state_runnable",
    "sink": "generic_work",
    "writer": "olive",
}


@dataclass(frozen=True)
class Timeline:
    """What all ranks did.

    Attributes:
        hosts: rank -> the host that it ran on.
        num_dropped: rank -> earlier events that were not kept.
        clock_error: nanoseconds that clocks of two hosts may disagree by; None if they were not compared.
    """

    events: tuple[Event, ...]
    wirings: tuple[Wiring, ...]
    hosts: Mapping[int, str] = field(default_factory=dict)
    num_dropped: Mapping[int, int] = field(default_factory=dict)
    clock_error: int | None = 0


def recorded(folder: Path) -> list[Part]:
    """What the ranks of a job recorded, by rank."""
    found = [read_part(path.with_suffix("")) for path in sorted(folder.glob(f"rank*{NAMES}"))]
    return sorted(found, key=lambda part: part.about.get("rank", 0))


def last_life(parts: Sequence[Part]) -> tuple[list[Part], int]:
    """Of a job that re-formed, what its ranks recorded in its last life, and the number of those before.

    Steps of several lives have the same numbers, and ranks may be others. Lives without a step do not count.
    """
    lives = {part.about.get("life", 0) for part in parts if part.events} or {0}
    return [part for part in parts if part.about.get("life", 0) == max(lives)], len(lives) - 1


def join(parts: Sequence[Part]) -> Timeline:
    """What several processes recorded, on the clock of rank 0's host as far as that was compared."""
    events: list[Event] = []
    wirings: list[Wiring] = []
    hosts: dict[int, str] = {}
    num_dropped: dict[int, int] = {}
    errors: list[int | None] = []
    for part in parts:
        offset = part.about.get("clock_offset")
        rank = part.about.get("rank", 0)
        hosts[rank] = part.about.get("host", "")
        errors.append(part.about.get("clock_error"))
        num_dropped[rank] = num_dropped.get(rank, 0) + part.num_dropped
        shift = -(offset or 0)
        events += [one._replace(start=one.start + shift, end=one.end + shift) for one in part.events]
        wirings += part.wirings
    known = [one for one in errors if one is not None]
    error = None if len(known) < len(errors) else max(known, default=0)
    return _sorted(events, wirings, hosts, num_dropped, error)


def merge(timelines: Sequence[Timeline]) -> Timeline:
    """Timelines of different ranks of one job as one."""
    hosts: dict[int, str] = {}
    num_dropped: dict[int, int] = {}
    for one in timelines:
        hosts |= one.hosts
        num_dropped |= one.num_dropped
    errors = [one.clock_error for one in timelines]
    known = [one for one in errors if one is not None]
    return _sorted(
        [event for one in timelines for event in one.events],
        [wiring for one in timelines for wiring in one.wirings],
        hosts,
        num_dropped,
        None if len(known) < len(errors) else max(known, default=0),
    )


def _sorted(
    events: Sequence[Event],
    wirings: Sequence[Wiring],
    hosts: Mapping[int, str],
    num_dropped: Mapping[int, int],
    clock_error: int | None,
) -> Timeline:
    return Timeline(
        tuple(sorted(events, key=lambda one: one.start)),
        tuple(sorted(wirings, key=lambda one: (one.program, one.rank))),
        hosts,
        num_dropped,
        clock_error,
    )


# --- writing -------------------------------------------------------------------------------------------


def write(timeline: Timeline, path: Path) -> None:
    """Writes the file; gzipped if its name ends in .gz, which Perfetto opens too."""
    origin = min((one.start for one in timeline.events), default=0)
    other = {
        "format": _FORMAT,
        "origin_ns": origin,
        "hosts": {str(rank): host for rank, host in timeline.hosts.items()},
        "num_dropped": {str(rank): count for rank, count in timeline.num_dropped.items()},
        "clock_error_ns": timeline.clock_error,
        "wirings": [one.as_data() for one in timeline.wirings],
    }
    with _opened(path, "wt") as file:
        file.write('{"displayTimeUnit": "ms",\n"otherData": {"monoflow": ')
        json.dump(other, file, separators=(",", ":"))
        file.write('},\n"traceEvents": [\n')
        for number, record in enumerate(_records(timeline, origin)):
            file.write(",\n" * bool(number) + json.dumps(record, separators=(",", ":")))
        file.write("\n]}\n")


def write_trace(folder: Path, path: Path) -> None:
    """Joins what the ranks of this host recorded since the job last re-formed, into one file."""
    parts, num_before = last_life(recorded(folder))
    timeline = join(parts)
    if not timeline.events:
        sys.stderr.write(f"monoflow: no step ran, so {path} is not written\n")
        return
    if num_before:
        sys.stderr.write(f"monoflow: the job re-formed; of its {num_before + 1} lives, {path} has the last\n")
    first, last = min(timeline.hosts), max(timeline.hosts)
    if first:  # ranks of another host than the first one's
        path = path.with_stem(f"{path.stem}.rank{first}")
    write(timeline, path)
    sys.stderr.write(
        f"monoflow: {path} has {len(timeline.events):,} firings of ranks {first} to {last}; "
        f"`monoflow trace {path}` sums it up, https://ui.perfetto.dev shows it\n"
    )


def _opened(path: Path, mode: str) -> IO[str]:
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)  # pyright: ignore[reportReturnType]


def _records(timeline: Timeline, origin: int) -> Iterator[dict[str, Any]]:
    lanes = _lanes(timeline.events)
    yield from _titles(timeline, lanes)
    for event in timeline.events:
        yield {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "cname": _COLOURS[event.kind],
            "pid": event.rank,
            "tid": lanes[event.rank][event.lane],
            "ts": _micros(event.start, origin),
            "dur": (event.end - event.start) / 1000,
            "args": {
                "program": event.program,
                "step": event.step,
                "time": event.time,
                "bytes": event.num_bytes,
            },
        }
    sent = messages(timeline.events, timeline.wirings)
    yield from _arrows(timeline, sent, lanes, origin)
    counters = [({**fills(sent)}, "messages"), ({**held(sent)}, "bytes")]
    for tracks, unit in counters:
        for (rank, name), values in tracks.items():
            for moment, value in values:
                yield {
                    "ph": "C",
                    "name": f"{name} ({unit})",
                    "pid": rank,
                    "ts": _micros(moment, origin),
                    "args": {unit: value},
                }


def _lanes(events: Sequence[Event]) -> dict[int, dict[str, int]]:
    """rank -> lane -> its number, compute first."""
    found: dict[int, set[str]] = {}
    for event in events:
        found.setdefault(event.rank, set()).add(event.lane)
    ordered = {rank: sorted(lanes, key=lambda one: (one != "compute", one)) for rank, lanes in found.items()}
    return {rank: {lane: number for number, lane in enumerate(lanes)} for rank, lanes in ordered.items()}


def _titles(timeline: Timeline, lanes: Mapping[int, Mapping[str, int]]) -> Iterator[dict[str, Any]]:
    for rank, own in sorted(lanes.items()):
        host = timeline.hosts.get(rank, "")
        yield _title("process_name", rank, 0, name=f"rank {rank}" + f" on {host}" * bool(host))
        yield _title("process_sort_index", rank, 0, sort_index=rank)
        for lane, number in own.items():
            yield _title("thread_name", rank, number, name=lane)
            yield _title("thread_sort_index", rank, number, sort_index=number)


def _title(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _arrows(
    timeline: Timeline, sent: Sequence[Message], lanes: Mapping[int, Mapping[str, int]], origin: int
) -> Iterator[dict[str, Any]]:
    """From the end of what filled a register to the start of what read it, and across ranks."""
    links = [
        (message.writer, max(message.writer.start, message.writer.end - 1), read, read.start,
         message.wiring.registers[message.register].name)
        for message in sent for read in message.reads
    ]  # fmt: skip
    for source, target in crossings(timeline.events, timeline.wirings):
        links.append((source, source.start, target, max(target.end - 1, source.start), source.name))
    for number, (source, leaves, target, arrives, name) in enumerate(links):
        if arrives < leaves:
            continue  # clocks of two hosts that disagree
        common = {"cat": "message", "name": name, "id": number}
        for phase, event, moment in (("s", source, leaves), ("f", target, arrives)):
            yield {
                "ph": phase,
                **({"bp": "e"} if phase == "f" else {}),
                **common,
                "pid": event.rank,
                "tid": lanes[event.rank][event.lane],
                "ts": _micros(moment, origin),
            }


def _micros(moment: int, origin: int) -> float:
    return (moment - origin) / 1000


# --- reading -------------------------------------------------------------------------------------------


def read(path: Path) -> Timeline:
    """What `write` wrote.

    Raises:
        FlowError: there is no such file, or it is another kind of file.
    """
    try:
        with _opened(path, "rt") as file:
            data = json.load(file)
    except FileNotFoundError:
        raise FlowError(
            f"no trace {str(path)!r}; write one with `monoflow run --trace {path} script.py`"
        ) from None
    except (OSError, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FlowError(f"{path} is not a trace: {error}") from None
    other = data.get("otherData", {}) if isinstance(data, dict) else {}
    ours = other.get("monoflow") if isinstance(other, dict) else None
    if not isinstance(ours, dict):
        raise FlowError(f"{path} is not a trace of monoflow; write one with `monoflow run --trace`")
    if ours.get("format") != _FORMAT:
        raise FlowError(
            f"{path} has format {ours.get('format')!r}, this monoflow reads {_FORMAT}: "
            "read it with the version that wrote it"
        )
    try:
        return _timeline(data["traceEvents"], ours)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FlowError(f"{path} is damaged: {type(error).__name__} {error}; trace the run again") from None


def _timeline(records: Sequence[Mapping[str, Any]], ours: Mapping[str, Any]) -> Timeline:
    lanes = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in records
        if one["ph"] == "M" and one["name"] == "thread_name"
    }
    origin = ours["origin_ns"]
    return Timeline(
        tuple(_event(one, lanes, origin) for one in records if one["ph"] == "X"),
        tuple(map(Wiring.from_data, ours["wirings"])),
        {int(rank): host for rank, host in ours["hosts"].items()},
        {int(rank): count for rank, count in ours["num_dropped"].items()},
        ours["clock_error_ns"],
    )


def _event(one: Mapping[str, Any], lanes: Mapping[tuple[int, int], str], origin: int) -> Event:
    args, start = one["args"], origin + round(1000 * one["ts"])
    return Event(
        args["program"],
        one["pid"],
        lanes[one["pid"], one["tid"]],
        one["cat"],
        one["name"],
        args["step"],
        args["time"],
        start,
        start + round(1000 * one["dur"]),
        args["bytes"],
    )
