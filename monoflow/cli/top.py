"""`monoflow top`: what the ranks of a running job do, live."""

from __future__ import annotations

import json
import math
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import FlowError
from ..plan.tabulate import duration, size
from ..runtime.messages import messages, most_live
from ..runtime.observe import INTERVAL
from ..runtime.ring import Part, read_part
from ..runtime.signs import SNAPSHOT
from ..runtime.trace import SCRIPT, Event, breakdown
from .runs import is_alive
from .tables import table

_STALE = 5 * INTERVAL  # seconds without a snapshot: the rank is busy without letting go of Python, or gone
_MOST = 12  # rows of a table
_EVENTS = 4096  # of a rank that are read


@dataclass(frozen=True)
class Rank:
    """A rank's latest snapshot, and the last events that it recorded."""

    snapshot: Mapping[str, Any]
    part: Part

    @property
    def events(self) -> tuple[Event, ...]:
        """Those of the last whole step that was recorded, or of what there is of one."""
        return last_step(self.part.events)


def last_step(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events of the newest step that is over and was recorded from its beginning.

    Every step of a program fires the same actors: one with fewer firings still runs, or had begun before it
    was recorded.
    """
    counts = Counter((one.program, one.step) for one in events if one.lane != SCRIPT)
    most = {program: 0 for program, _ in counts}
    for (program, _), count in counts.items():
        most[program] = max(most[program], count)
    whole = {key for key, count in counts.items() if count == most[key[0]]}
    newest = max(whole, key=lambda key: _begin(events, key), default=None)
    return tuple(one for one in events if (one.program, one.step) == newest and one.lane != SCRIPT)


def _begin(events: Sequence[Event], key: tuple[str, int]) -> int:
    return min(one.start for one in events if (one.program, one.step) == key)


def read_job(folder: Path) -> list[Rank]:
    """What the ranks of a job tell, by rank. Those that have not told anything yet are left out.

    Of a rank that was started again, the process that told something last counts.
    """
    found: dict[int, Rank] = {}
    for path in folder.glob(f"rank*{SNAPSHOT}"):
        try:
            snapshot = json.loads(path.read_text())
            part = read_part(path.with_suffix(""), _EVENTS)
        except FileNotFoundError:  # it has just ended
            continue
        rank = snapshot["rank"]
        if rank not in found or found[rank].snapshot["at"] < snapshot["at"]:
            found[rank] = Rank(snapshot, part)
    return [found[rank] for rank in sorted(found)]


def _has_ended(folder: Path, ranks: Sequence[Rank]) -> bool:
    """Whether the job has ended, or was killed and left its folder."""
    here = socket.gethostname()
    dead = [one.snapshot["host"] == here and not is_alive(one.snapshot["pid"]) for one in ranks]
    return not folder.is_dir() or (bool(ranks) and all(dead))


def top(folder: Path, once: bool, console: Console) -> int:
    """Shows a job until it ends, or once.

    Raises:
        FlowError: there is nothing to show, and `once`.
    """
    if once:
        ranks = read_job(folder)
        if not ranks:
            raise FlowError(f"no rank has told anything yet in {folder}: its first step is not done")
        console.print(frame(ranks, time.time()))
        return 0
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while not _has_ended(folder, ranks := read_job(folder)):
                shown = frame(ranks, time.time()) if ranks else Text("no rank has told anything yet")
                live.update(shown, refresh=True)
                time.sleep(INTERVAL)
    except KeyboardInterrupt:
        return 0
    console.print("the job has ended")
    return 0


# --- one frame -----------------------------------------------------------------------------------------


def frame(ranks: Sequence[Rank], now: float) -> RenderableType:
    """What is shown at a time.

    Args:
        now: seconds, as `time.time`.
    """
    first = ranks[0].snapshot
    hosts = ", ".join(dict.fromkeys(one.snapshot["host"] for one in ranks))
    head = f"[bold]{first['script']}[/] on {hosts}: {len(ranks)} of {first['world_size']} ranks"
    parts = [head, "", _programs(ranks), "", _ranks(ranks, now), "", _actors(ranks), "", _registers(ranks)]
    return Group(*parts)


def _programs(ranks: Sequence[Rank]) -> Table:
    """Rates are those of the first rank: the step is global, and so is its batch."""
    rows = table(
        "step", "done", "steps/s", "samples/s", "tokens/s", "sent by rank 0, per second", left=(0, 5)
    )
    for one in ranks[0].snapshot["programs"]:
        sent = ", ".join(f"{axis} {size(count)}" for axis, count in one["sent_per_second"].items())
        rates = (_rate(one[f"{what}_per_second"]) for what in ("steps", "samples", "tokens"))
        rows.add_row(one["name"], f"{one['num_steps']:,}", *rates, sent or "nothing")
    return rows


def _ranks(ranks: Sequence[Rank], now: float) -> Table:
    columns = (
        "compute", "exposed comm.", "data", "idle", "script waits for data", "last step", "memory",
        "plan's peak", "",
    )  # fmt: skip
    rows = table("rank, in a step", *columns, left=(0, 9))
    for one in ranks[:_MOST]:
        snapshot = one.snapshot
        spent = breakdown(one.events).get(snapshot["rank"])
        shares = ["", "", "", ""]
        if spent is not None and spent.total:
            parts = (spent.compute, spent.communication, spent.data + spent.host, spent.idle)
            shares = [f"{part / spent.total:.0%}" for part in parts]
        ends = [program["last_step_ns"] for program in snapshot["programs"]]
        ago = now - snapshot["at"] + (snapshot["at_ns"] - max(ends)) / 1e9 if ends else math.nan
        predicted = sum(program["predicted_bytes"] for program in snapshot["programs"])
        rows.add_row(
            str(snapshot["rank"]),
            *shares,
            f"{snapshot['waited']:.0%}",
            f"{duration(ago)} ago",
            f"{size(snapshot['memory'])} {snapshot['memory_of']}",
            size(predicted) if predicted else "-",
            f"[red]silent for {duration(now - snapshot['at'])}" if now - snapshot["at"] > _STALE else "",
        )
    if len(ranks) > _MOST:
        rows.add_row(f"and {len(ranks) - _MOST} more")
    return rows


def _actors(ranks: Sequence[Rank]) -> Table:
    """What fires on every lane now, and its latest firing of those that were recorded."""
    columns = ("rank", "fires now", "micro-batch", "fired last", "kind", "micro-batch", "took")
    rows = table("lane", *columns, left=(0, 2, 4, 5))
    latest = {(event.rank, event.lane): event for one in ranks for event in one.part.events}
    now: dict[tuple[int, str], tuple[str, str]] = {}
    for one in ranks:
        for program in one.snapshot["programs"]:
            now |= {(rank, lane): (name, str(time)) for rank, lane, name, time in program["running"]}
    for rank, lane in sorted(latest.keys() | now.keys())[: 2 * _MOST]:
        last = ["", "", "", ""]
        if (event := latest.get((rank, lane))) is not None:
            took = duration((event.end - event.start) / 1e9)
            last = [event.name, event.kind, str(event.time), took]
        rows.add_row(lane, str(rank), *now.get((rank, lane), ("-", "")), *last)
    return rows


@dataclass
class _Fill:
    """Of one class of registers, on all ranks together; `most` and `slots` of the fullest one."""

    filled: int = 0
    most: int = 0
    slots: int = 0
    num_bytes: int = 0


def _registers(ranks: Sequence[Rank]) -> Table:
    """How full registers were in the step that was recorded, by class."""
    rows = table("registers", "filled in a step", "most messages in one", "of slots", "bytes of all slots")
    found: dict[str, _Fill] = {}
    for one in ranks:
        sent = messages(one.events, one.part.wirings)
        wirings = {(wiring.program, wiring.rank): wiring for wiring in one.part.wirings}
        times = Counter((message.wiring.program, message.wiring.rank, message.register) for message in sent)
        for (program, rank, register), most in most_live(sent).items():
            wiring = wirings[program, rank]
            info = wiring.registers[register]
            fill = found.setdefault(wiring.register_class(register), _Fill())
            fill.filled += times[program, rank, register]
            fill.most, fill.slots = max((fill.most, fill.slots), (most, info.slots))
            fill.num_bytes += info.num_bytes * info.slots
    for name, fill in sorted(found.items()):
        rows.add_row(name, f"{fill.filled}", f"{fill.most}", f"{fill.slots}", size(fill.num_bytes))
    return rows


def _rate(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
