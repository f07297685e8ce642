"""`monoflow trace`: what a timeline says, in figures and one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from ..plan.tabulate import duration, size
from ..runtime.messages import Wait, held, messages, most_live, waits, without_waiting
from ..runtime.trace import (
    SCRIPT,
    Breakdown,
    Exposed,
    ahead,
    bottleneck,
    breakdown,
    bubble,
    exposed_communication,
    step_times,
    time_by_kind,
)
from .tables import table
from .timeline import Timeline, merge, read, write

_MOST_WAITS = 5


@dataclass(frozen=True)
class Summary:
    """What a timeline says; times are nanoseconds.

    Attributes:
        num_steps: that were recorded, of all programs.
        step: the median step's time.
        spent: rank -> where its time went.
        by_kind: rank -> kind -> time of its actors.
        bubble: the share of the ranks' time without compute, between first and last compute of a step.
        waits: what compute waited for, longest first.
        live: class of registers -> the most messages in one of them at a time, and its slots.
        peak_bytes: rank -> the most bytes that its registers held, the step's inputs left out.
        ahead: time in which a step fired that had begun before the one before it was over, of all ranks.
        fetching: time that the script waited for batches, of all ranks.
    """

    num_steps: int
    step: int
    spent: dict[int, Breakdown]
    by_kind: dict[int, dict[str, int]]
    bubble: float
    exposed: Exposed
    waits: list[Wait]
    live: dict[str, tuple[int, int]]
    peak_bytes: dict[int, int]
    bottleneck: str
    ahead: int
    fetching: int

    def as_data(self) -> dict[str, Any]:
        """As JSON has it, times in seconds."""
        return {
            "num_steps": self.num_steps,
            "step_seconds": self.step / 1e9,
            "ranks": {
                str(rank): {
                    "seconds": {key: value / 1e9 for key, value in asdict(spent).items()},
                    "seconds_by_kind": {kind: ns / 1e9 for kind, ns in self.by_kind[rank].items()},
                    "peak_register_bytes": self.peak_bytes.get(rank, 0),
                }
                for rank, spent in self.spent.items()
            },
            "bubble": self.bubble,
            "communication_seconds": self.exposed.total / 1e9,
            "exposed_communication_seconds": self.exposed.exposed / 1e9,
            "exposed_communication": self.exposed.share,
            "data_wait_seconds": sum(one.data for one in self.spent.values()) / 1e9,
            "script_waited_for_batches_seconds": self.fetching / 1e9,
            "steps_overlap_seconds": self.ahead / 1e9,
            "starved": [
                {"rank": w.rank, "actor": w.actor, "register": w.register, "from": w.writer,
                 "seconds": w.num_ns / 1e9}
                for w in self.waits
            ],
            "most_live": {key: {"messages": most, "slots": of} for key, (most, of) in self.live.items()},
            "bottleneck": self.bottleneck,
        }  # fmt: skip


def summarize(timeline: Timeline) -> Summary:
    """The figures of a timeline."""
    events, sent = timeline.events, messages(timeline.events, timeline.wirings)
    in_steps = [event for event in events if event.lane != SCRIPT]
    fetching = sum(event.end - event.start for event in events if event.lane == SCRIPT)
    lengths = sorted(span.end - span.start for span in step_times(in_steps).values())
    moved = without_waiting(events, timeline.wirings)
    spent = breakdown(moved)
    wirings = {(one.program, one.rank): one for one in timeline.wirings}
    live: dict[str, tuple[int, int]] = {}
    for (program, rank, register), count in most_live(sent).items():
        wiring = wirings[program, rank]
        key, slots = wiring.register_class(register), wiring.registers[register].slots
        live[key] = max(live.get(key, (0, 0)), (count, slots), key=lambda one: (one[0] > one[1], one))
    return Summary(
        len(lengths),
        lengths[len(lengths) // 2] if lengths else 0,
        spent,
        time_by_kind(events),
        bubble(events),
        exposed_communication(moved),
        waits(events, sent),
        live,
        {rank: max(level for _, level in levels) for (rank, _), levels in held(sent).items()},
        bottleneck(spent),
        sum(ahead(in_steps).values()),
        fetching,
    )


def trace(paths: Sequence[Path], as_json: bool, joined: Path | None, console: Console) -> int:
    """Prints the summary of a trace.

    Args:
        paths: its files, one a host.
        joined: where to write all of it as one file, if anywhere.

    Raises:
        FlowError: a file is no trace.
    """
    timeline = merge([read(path) for path in paths])
    if joined is not None:
        write(timeline, joined)
    summary = summarize(timeline)
    if as_json:
        console.out(json.dumps(summary.as_data(), indent=1), highlight=False)
    else:
        console.print(_report(timeline, summary))
        console.print(f"\n[bold]{summary.bottleneck}", soft_wrap=True)
    return 0


# --- for people ----------------------------------------------------------------------------------------

_COLUMNS = ("compute", "communication", "data", "host", "idle", "outside")


def _report(timeline: Timeline, summary: Summary) -> RenderableType:
    ranks, events = len(summary.spent), len(timeline.events)
    parts: list[RenderableType] = [
        f"{ranks} ranks, {summary.num_steps} steps of {_time(summary.step)} (median), {events:,} firings"
    ]
    if dropped := sum(timeline.num_dropped.values()):
        parts.append(f"[yellow]{dropped:,} earlier firings were not kept (--trace-events keeps more)")
    if len(set(timeline.hosts.values())) > 1 and timeline.clock_error is None:
        parts.append("[yellow]clocks of the hosts were not compared: times across hosts mean little")
    elif timeline.clock_error:
        parts.append(f"clocks of the hosts agree to {_time(timeline.clock_error)}")
    if summary.num_steps:  # events of the script alone are no steps
        parts += ["", _spent(summary), "", _by_kind(summary), "", *_shares(summary)]
        if summary.waits:
            parts += ["", _waits(summary.waits[:_MOST_WAITS], len(summary.waits))]
        peak = max(summary.peak_bytes.values(), default=0)
        parts += ["", _registers(summary), f"at most {size(peak)} at a time, the step's inputs left out"]
    return Group(*parts)


def _spent(summary: Summary) -> Table:
    rows = table(
        "time of a rank", *("exposed communication" if c == "communication" else c for c in _COLUMNS)
    )
    for rank, spent in summary.spent.items():
        shares = (f"{getattr(spent, name) / (spent.total or 1):.1%}" for name in _COLUMNS)
        rows.add_row(f"rank {rank}", *shares)
    return rows


def _by_kind(summary: Summary) -> Table:
    kinds = list(dict.fromkeys(kind for own in summary.by_kind.values() for kind in own))
    rows = table("time of its actors, a step", *kinds)
    for rank, own in summary.by_kind.items():
        rows.add_row(f"rank {rank}", *(_time(own[k] // summary.num_steps) if k in own else "" for k in kinds))
    return rows


def _shares(summary: Summary) -> list[str]:
    exposed, total = summary.exposed
    lines = [f"bubble: {summary.bubble:.1%} of the ranks' time from first to last compute of a step"]
    if total:
        share = f"{summary.exposed.share:.1%} of {_time(total)}"
        lines.append(f"exposed communication: {share}, while the rank computed nothing ({_time(exposed)})")
    if data := sum(one.data for one in summary.spent.values()):
        fetched = f", {_time(summary.fetching)} in all in the script" * bool(summary.fetching)
        lines.append(f"data wait: {_time(data)} without compute or communication{fetched}")
    if summary.ahead:
        each = _time(summary.ahead / summary.num_steps / len(summary.spent))
        lines.append(f"steps overlap: each begins {each} before the one before is over")
    return lines


def _waits(found: Sequence[Wait], num_all: int) -> Table:
    of = f" (top {len(found)} of {num_all})" * (num_all > len(found))
    rows = table(f"compute waited for{of}", "rank", "then ran", "filled by", "waited", left=(0, 2, 3))
    for one in found:
        rows.add_row(one.register, f"{one.rank}", one.actor, one.writer, _time(one.num_ns))
    return rows


def _registers(summary: Summary) -> Table:
    rows = table("registers", "most messages in one", "of slots")
    for key, (most, slots) in sorted(summary.live.items()):
        rows.add_row(key, f"{most}", f"{slots}")
    return rows


def _time(num_ns: float) -> str:
    return duration(num_ns / 1e9)
