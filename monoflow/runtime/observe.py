"""What a rank tells of itself while it runs under `monoflow run`, for `monoflow top` and for a trace.

A rank keeps three files in the folder of its job: the last events and their names (`ring`), and a snapshot of
a few numbers that it writes each second. Under `--trace` every firing is an event; otherwise those of a step
or two each second are, so that watching costs next to nothing however short the steps are.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config import SETTINGS, Settings
from ..log import SOURCE, Wait, listen
from .clock import Offset
from .program import Program
from .recorder import Fired, Recorder
from .ring import Ring
from .signs import EVENTS, NAMES, SNAPSHOT
from .trace import SCRIPT
from .wiring import Wiring

INTERVAL = 1.0  # seconds between snapshots
_SAMPLED = 4096  # events that are kept without --trace
_WINDOW = 10  # snapshots that a rate is the mean of


class Observed(Protocol):
    """An engine, as far as it is observed."""

    num_steps: int
    programs: Mapping[int, Program]

    @property
    def num_over(self) -> int:
        """How many steps are over, of `num_steps` that began."""
        ...

    @property
    def recorder(self) -> Recorder | None:
        """Who is told of every firing."""
        ...

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None: ...

    def running(self) -> list[tuple[int, str, str, int]]:
        """What fires at this moment: (rank, lane, name, micro-batch)."""
        ...


@dataclass(frozen=True)
class About:
    """What is known of a compiled step before it runs.

    Attributes:
        name: the step function's.
        samples, tokens: of a global batch; 0 if its tensors do not say.
        predicted_bytes: a rank's peak memory by the plan; 0 if the plan predicts nothing.
    """

    name: str
    samples: int = 0
    tokens: int = 0
    predicted_bytes: int = 0


@dataclass(eq=False)
class _Watched:
    """An engine, and what it had done at the last few snapshots at which it had done more."""

    name: str
    about: About
    engine: weakref.ref[Observed]
    sent: Callable[[], Mapping[str, int]]
    recording: _Recording
    seen: deque[tuple[int, int, Mapping[str, int]]] = field(default_factory=lambda: deque(maxlen=_WINDOW))


class _Recording:
    """Passes one engine's firings on to the ring; for good, or until a step."""

    def __init__(self, ring: Ring, program: str, engine: weakref.ref[Observed]) -> None:
        self.ring, self.program, self.engine = ring, program, engine
        self.until: int | None = None

    def record(self, fired: Fired) -> None:
        lane, kind, name, rank, *moment = fired
        self.ring.add((self.program, rank, lane, kind, name), *moment)
        if self.until is not None and fired.step >= self.until and (engine := self.engine()) is not None:
            engine.recorder = None


class Observer:
    """Of one process.

    Args:
        folder: of the job; it need not exist.
        settings: which rank this is, and how many events are kept.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank{settings.rank:05}-{os.getpid()}"
        self._traces = settings.trace_events > 0
        self._about: dict[str, Any] = {
            "rank": settings.rank,
            "world_size": settings.world_size,
            "life": settings.life,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "script": sys.argv[0],
        }
        self._ring = Ring(self.path, settings.trace_events or _SAMPLED, self._about)
        self._watched: list[_Watched] = []
        self._num_named: dict[str, int] = {}
        self._lock = threading.Lock()
        self._rank, self._waited, self._published = settings.rank, 0, time.perf_counter_ns()
        self._stop_listening = listen(self._wait)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="snapshots", daemon=True)
        self._thread.start()

    def tell_offset(self, offset: Offset) -> None:
        """Notes how far this host's clock is from rank 0's."""
        self._ring.tell({"clock_offset": offset.num_ns, "clock_error": offset.error})

    def attach(self, engine: Observed, about: About, sent: Callable[[], Mapping[str, int]]) -> None:
        """Watches an engine for as long as it lives.

        Args:
            sent: the bytes that this rank has sent so far, by axis; must not keep the engine alive.
        """
        with self._lock:
            count = self._num_named[about.name] = self._num_named.get(about.name, 0) + 1
            name = about.name if count == 1 else f"{about.name}#{count}"
            for program in engine.programs.values():
                self._ring.add_wiring(Wiring.of(name, program))
            alive = weakref.ref(engine)
            recording = _Recording(self._ring, name, alive)
            watched = _Watched(name, about, alive, sent, recording)
            watched.seen.append((engine.num_steps, time.perf_counter_ns(), sent()))
            self._watched.append(watched)
            engine.recorder = recording
            if not self._traces:
                recording.until = engine.num_steps + 2

    @property
    def num_over(self) -> int:
        """How many steps are over of the engines that are watched."""
        with self._lock:
            return sum(engine.num_over for one in self._watched if (engine := one.engine()) is not None)

    def _wait(self, wait: Wait) -> None:
        """The script waited for something."""
        if wait.kind != SOURCE:
            return
        with self._lock:
            self._waited += wait.end - wait.start
        if self._traces:
            who = SCRIPT, self._rank, SCRIPT, wait.kind, wait.name
            self._ring.add(who, wait.number, 0, wait.start, wait.end, 0)

    def close(self) -> None:
        """Writes no more; the files go, but for the events of a trace."""
        self._stop_listening()
        self._ended.set()
        self._thread.join()
        for watched in self._watched:
            if (engine := watched.engine()) is not None:
                engine.recorder = None
        left = (SNAPSHOT,) if self._traces else (SNAPSHOT, EVENTS, NAMES)
        for suffix in left:
            self.path.with_suffix(suffix).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks have files in it
            self.path.parent.rmdir()

    # --- snapshots ---------------------------------------------------------------------------------

    def _publish(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end a job
            while not self._ended.wait(INTERVAL):
                self.publish()

    def publish(self) -> None:
        """Writes a snapshot, and records the next step."""
        with self._lock:
            self._watched = [one for one in self._watched if one.engine() is not None]
            programs = [_seen(one, engine) for one in self._watched if (engine := one.engine()) is not None]
            waited, self._waited = self._waited, 0
        memory, of = _memory()
        now = time.perf_counter_ns()
        since, self._published = now - self._published, now
        snapshot = {
            **self._about,
            "at": time.time(),
            "at_ns": now,
            "waited": min(1.0, waited / since) if since else 0.0,
            "memory": memory,
            "memory_of": of,
            "programs": programs,
        }
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(snapshot))
        temporary.replace(self.path.with_suffix(SNAPSHOT))
        if not self._traces:
            self._sample()

    def _sample(self) -> None:
        """Lets the events of what is left of this step, and of the next, be recorded."""
        for watched in self._watched:
            if (engine := watched.engine()) is not None and engine.recorder is None:
                watched.recording.until = engine.num_steps + 2
                engine.recorder = watched.recording


def _seen(watched: _Watched, engine: Observed) -> dict[str, Any]:
    """Rates are means over the last snapshots at which steps had been done: slow steps count too."""
    seen, about = watched.seen, watched.about
    if engine.num_steps != seen[-1][0]:
        seen.append((engine.num_steps, time.perf_counter_ns(), watched.sent()))
    (first, begin, before), (last, end, after) = seen[0], seen[-1]
    seconds = (end - begin) / 1e9
    rate = (last - first) / seconds if seconds else 0.0
    return {
        "name": watched.name,
        "running": engine.running(),
        "num_steps": last,
        "last_step_ns": end,
        "steps_per_second": rate,
        "samples_per_second": rate * about.samples,
        "tokens_per_second": rate * about.tokens,
        "sent_per_second": {
            axis: (count - before.get(axis, 0)) / seconds if seconds else 0.0 for axis, count in after.items()
        },
        "predicted_bytes": about.predicted_bytes,
    }


def _memory() -> tuple[int, str]:
    """Bytes that this process has now, and what that counts."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        return torch.accelerator.memory_allocated(), f"allocated on {accelerator.type}"
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize(), "resident"
    except OSError:
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale, "resident at most"


@functools.cache
def observing() -> Observer | None:
    """Who observes this process; under `monoflow run`, from the first compiled step to the exit."""
    if not SETTINGS.run_dir:
        return None
    try:
        observer = Observer(Path(SETTINGS.run_dir).expanduser(), SETTINGS)
    except OSError:  # nowhere to write to: the job goes on unseen
        return None
    atexit.register(observer.close)
    return observer
