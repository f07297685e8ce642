"""A readable log per stage: `MONOFLOW_LOG=capture,plan,lower,runtime` (or `all`), on stderr.

Only rank 0 writes, unless MONOFLOW_LOG_RANKS=all; then every line names its rank.
"""

from __future__ import annotations

import logging
import sys

from .config import SETTINGS, STAGES, Settings

ROOT = "monoflow"


def stage_logger(stage: str) -> logging.Logger:
    """The logger of one stage; `info` is what MONOFLOW_LOG shows, `warning` is always shown (on rank 0).

    Build a costly text only under `logger.isEnabledFor(logging.INFO)`.
    """
    assert stage in STAGES, f"{stage!r} is not a stage: {STAGES}"
    return logging.getLogger(f"{ROOT}.{stage}")


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
