"""`monoflow run`: start a script on every local rank, through torch's elastic agent."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import FlowError
from ..runtime.signs import INTERRUPTED, LAUNCHER_VARIABLE
from . import runs

# Before torch is imported, Ctrl-C should end a rank without a traceback from the middle of an import.
_START = (
    f"import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit({INTERRUPTED})); "
    "from monoflow.runtime.launch import main; main()"
)


@dataclass(frozen=True)
class Job:
    """One request to run a script.

    Attributes:
        num_ranks: ranks on this host.
        script, args: the script and its own arguments.
        agent_options: options of torchrun, passed on as they are.
        trace: where to write the timeline of the run, if anywhere.
        trace_events: how many of its last events a rank keeps for it.
        elastic: the least and the most ranks of a job that goes on when some are lost; None if it does not.
    """

    num_ranks: int
    script: str
    args: tuple[str, ...]
    agent_options: tuple[str, ...] = ()
    trace: Path | None = None
    trace_events: int = 1 << 16
    elastic: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise FlowError(f"-n {self.num_ranks}: the number of ranks must be at least 1")
        if not Path(self.script).is_file():
            raise FlowError(f"no script {self.script!r} in {Path.cwd()}")
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise FlowError(f"--trace {self.trace}: there is no folder {self.trace.parent}")
        if self.trace_events < 1:
            raise FlowError(f"--trace-events {self.trace_events}: at least 1 event must be kept")
        if self.elastic is not None:
            self._check_bounds(*self.elastic)
        elif "--max-restarts" in self.agent_options:
            raise FlowError(
                "--max-restarts goes with --elastic MIN:MAX: another job ends when one of its ranks fails"
            )

    def _check_bounds(self, least: int, most: int) -> None:
        """Whether hosts that bring as many ranks as this one make up what an elastic job may have."""
        asked = f"-n {self.num_ranks} --elastic {least}:{most}"
        if self.num_ranks > most:
            raise FlowError(f"{asked}: this host brings more ranks than the job may have; lower -n")
        if not self.meets_others and self.num_ranks < least:
            raise FlowError(
                f"{asked}: the job needs at least {least} ranks, and this host, which is alone, brings "
                f"{self.num_ranks}; raise -n, lower MIN, or say where hosts meet (--rdzv-endpoint)"
            )
        if self.meets_others and self.hosts[0] > self.hosts[1]:
            raise FlowError(
                f"{asked}: no number of hosts of {self.num_ranks} ranks has {least} to {most} ranks; "
                f"a multiple of {self.num_ranks} must lie between them"
            )

    @property
    def meets_others(self) -> bool:
        """Whether the job has other hosts, as far as its options say."""
        meets = any(word.startswith(("--rdzv-", "--master-", "--node-rank")) for word in self.agent_options)
        return meets or (bool(self.agent_options) and self.elastic is None)

    @property
    def hosts(self) -> tuple[int, int]:
        """The least and the most hosts of an elastic job, if all bring as many ranks as this one."""
        assert self.elastic is not None, "a job that is not elastic has the hosts that it begins with"
        least, most = self.elastic
        return (-(-least // self.num_ranks), most // self.num_ranks) if self.meets_others else (1, 1)


def run(job: Job) -> int:
    """Run the job to its end and return the exit status: 0, 130 after Ctrl-C, else that of a failure."""
    command = ("-u", "-c", _START, job.script, *job.args)
    folder = runs.folder_of_job(os.environ)
    os.environ[runs.RUN_DIR] = str(folder)
    is_alone = job.num_ranks == 1 and not job.agent_options and job.elastic is None
    if is_alone and job.trace is None:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *command])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.num_ranks)))
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    if job.trace is not None:
        os.environ[runs.TRACE_EVENTS] = str(job.trace_events)
    from .ranks import run_ranks  # noqa: PLC0415 - with it comes torch: a rank alone starts without it

    try:
        return run_ranks(job, command)
    finally:
        if job.trace is not None:
            from .timeline import write_trace  # noqa: PLC0415 - only a traced job needs it

            write_trace(folder, job.trace)
        runs.clear(folder)


def agent_options(options: Sequence[tuple[str, str | int | None]]) -> tuple[str, ...]:
    """The options that were given, as torchrun's command line wants them."""
    given = [(f"--{name}", str(value)) for name, value in options if value is not None]
    return tuple(word for pair in given for word in pair)


def elastic_bounds(text: str) -> tuple[int, int]:
    """The least and the most ranks of `--elastic MIN:MAX`. Raises FlowError."""
    least, colon, most = text.partition(":")
    if not (colon and least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        raise FlowError(
            f"--elastic {text}: write the least and the most ranks, such as 1:8; the least must be 1 or more "
            "and not above the most"
        )
    return int(least), int(most)


def default_ranks(elastic: tuple[int, int] | None) -> int:
    """How many ranks this host brings: 1, or of an elastic job one a device, as many as it may have."""
    if elastic is None:
        return 1
    import torch  # noqa: PLC0415 - only who leaves the number to us waits for it

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else os.cpu_count() or 1
    return max(1, min(elastic[1], devices))
