"""A readable log per stage: `MONOFLOW_LOG=capture,plan,lower,runtime` (or `all`), on stderr.

Only rank 0 writes, unless MONOFLOW_LOG_RANKS=all; then every line names its rank.

What a script waits for outside of its steps, and for how long nothing ran before a step, is told here too, to
whoever listens for a trace or a progress line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import NamedTuple

from .config import SETTINGS, STAGES, Settings

ROOT = "monoflow"


def stage_logger(stage: str) -> logging.Logger:
    """The logger of one stage; `info` is what MONOFLOW_LOG shows, `warning` is always shown (on rank 0).

    Build a costly text only under `logger.isEnabledFor(logging.INFO)`.
    """
    assert stage in STAGES, f"{stage!r} is not a stage: {STAGES}"
    return logging.getLogger(f"{ROOT}.{stage}")


#: Kinds of waits: of a script for a batch; of an engine for its next step, while which nothing ran on it.
SOURCE, IDLE = "source", "idle"


class Wait(NamedTuple):
    """A script waited for something outside of its steps, or an engine for a step.

    Attributes:
        kind: SOURCE or IDLE.
        number: of times that it waited for this before.
        start, end: `time.perf_counter_ns`.
    """

    kind: str
    name: str
    number: int
    start: int
    end: int


_LISTENERS: list[Callable[[Wait], None]] = []


def listen(listener: Callable[[Wait], None]) -> Callable[[], None]:
    """Tells `listener` of every wait from now on, in the thread that waited or started the step.

    Returns what ends that.
    """
    _LISTENERS.append(listener)
    return lambda: _LISTENERS.remove(listener)


def tell(wait: Wait) -> None:
    """Tells those who listen."""
    for listener in _LISTENERS:
        listener(wait)


class _Stderr(logging.Handler):
    """Writes to whatever sys.stderr is now, with the stage before every line of a message.

    Silent where the program has set up logging of its own: the records reach that instead.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.addFilter(lambda record: not logging.getLogger().handlers)

    def emit(self, record: logging.LogRecord) -> None:
        stage = record.name.removeprefix(f"{ROOT}.")
        lines = self.format(record).splitlines() or [""]
        sys.stderr.write("".join(f"[{self.prefix}{stage}] {line}\n" for line in lines))


def configure(settings: Settings) -> None:
    """Set the level of every stage's logger and the one handler that prints them."""
    root = logging.getLogger(ROOT)
    for handler in [h for h in root.handlers if isinstance(h, _Stderr)]:
        root.removeHandler(handler)
    writes = settings.rank == 0 or settings.log_all_ranks
    root.setLevel(logging.WARNING if writes else logging.ERROR)
    for stage in STAGES:
        chosen = writes and stage in settings.log_stages
        logging.getLogger(f"{ROOT}.{stage}").setLevel(logging.INFO if chosen else logging.NOTSET)
    root.addHandler(_Stderr(f"rank {settings.rank} " if settings.log_all_ranks else ""))


configure(SETTINGS)
