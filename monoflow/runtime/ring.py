"""The last N events of a process, in a file that outlives it however it ends.

Two files beside each other: NAME.events is a ring of records of one size, mapped into memory, and NAME.names
has JSON lines: what the process is, and the texts that records refer to by number. Nothing grows with time.
"""

from __future__ import annotations

import itertools
import json
import mmap
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .signs import EVENTS, NAMES
from .trace import Event
from .wiring import Wiring

#: The number of the record, from 1; the number of who fired; micro-batch; step, start, end, bytes.
_RECORD = struct.Struct("<QIIQQQQ")

Who = tuple[str, int, str, str, str]  # program, rank, lane, kind, name


@dataclass(frozen=True)
class Part:
    """What one process recorded.

    Attributes:
        about: what the process said of itself.
        events: in the order in which they were recorded.
        num_dropped: earlier events that are not among them.
    """

    about: Mapping[str, Any]
    wirings: tuple[Wiring, ...]
    events: tuple[Event, ...]
    num_dropped: int


class Ring:
    """Takes events, from any thread.

    Args:
        path: of the files, without their suffixes.
        capacity: how many events are kept.
        about: what is to be known of the process; must be JSON.
    """

    def __init__(self, path: Path, capacity: int, about: Mapping[str, Any]) -> None:
        assert capacity > 0, f"a ring of {capacity} events"
        self.capacity = capacity
        size = capacity * _RECORD.size
        with path.with_suffix(EVENTS).open("w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._names = path.with_suffix(NAMES)
        self._names.write_text("")
        self._numbers: dict[Who, int] = {}
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._line({"about": dict(about)})

    def add(self, who: Who, step: int, time: int, start: int, end: int, num_bytes: int) -> None:
        """Records that an actor fired."""
        number = self._numbers.get(who)
        if number is None:
            number = self._number(who)
        count = next(self._count)
        place = (count % self.capacity) * _RECORD.size
        _RECORD.pack_into(self._memory, place, count + 1, number, time, step, start, end, num_bytes)

    def tell(self, about: Mapping[str, Any]) -> None:
        """Records more of what is to be known of the process."""
        with self._lock:
            self._line({"about": dict(about)})

    def add_wiring(self, wiring: Wiring) -> None:
        """Records what a program's events will mean."""
        with self._lock:
            self._line({"wiring": wiring.as_data()})

    def _number(self, who: Who) -> int:
        with self._lock:
            if who not in self._numbers:
                self._line({"who": who})
                self._numbers[who] = len(self._numbers)
            return self._numbers[who]

    def _line(self, data: Mapping[str, Any]) -> None:
        with self._names.open("a") as file:  # seldom: there are as many lines as actors
            file.write(json.dumps(data) + "\n")


def read_part(path: Path, most: int | None = None) -> Part:
    """What a process recorded, whether it is still running, has ended, or was killed.

    Args:
        path: of the files, without their suffixes.
        most: how many events to read, the last ones; all when left out.
    """
    about: dict[str, Any] = {}
    names: list[Who] = []
    wirings: list[Wiring] = []
    for line in path.with_suffix(NAMES).read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # the process was killed while it wrote
        data = json.loads(line)
        about |= data.get("about", {})
        if "who" in data:
            program, rank, lane, kind, name = data["who"]
            names.append((program, rank, lane, kind, name))
        elif "wiring" in data:
            wirings.append(Wiring.from_data(data["wiring"]))
    records = sorted(_RECORD.iter_unpack(path.with_suffix(EVENTS).read_bytes()))
    events, last = [], 0
    for count, who, time, step, start, end, num_bytes in records[-most if most else 0 :]:
        if count and who < len(names) and 0 < start <= end:
            program, rank, lane, kind, name = names[who]
            events.append(Event(program, rank, lane, kind, name, step, time, start, end, num_bytes))
            last = count
    return Part(about, tuple(wirings), tuple(events), last - len(events))
