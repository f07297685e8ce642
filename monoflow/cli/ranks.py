"""The ranks of this host under torch's elastic agent: how they are started, and what is said of a failure."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from ..config import Settings
from ..errors import FlowError
from ..runtime.signs import HANG, SNAPSHOTS_VARIABLE, WATCH_VARIABLE
from . import runs, watch
from .agent import Agent, Policy
from .run import Job

#: Seconds that ranks get to end by themselves: after another failed; after a signal, or when hosts join.
FAILURE_GRACE = 10
INTERRUPT_GRACE = 60
#: Of a job that re-forms: how often it may, and the seconds in which further hosts may join it.
_RESTARTS, _LAST_CALL = 100, 5


def run_ranks(job: Job, command: Sequence[str]) -> int:
    """Runs a command on every rank to the end of the job; returns the exit status, that of the first failure.

    Raises:
        FlowError: the hosts did not find each other.
    """
    logging.disable(logging.CRITICAL)  # the agent's own log; what failed is said below, once
    with tempfile.TemporaryDirectory(prefix="monoflow-") as folder, ExitStack() as stack:
        os.environ[WATCH_VARIABLE] = folder
        if job.elastic is not None:
            stack.enter_context(_snapshots())
        stood = stack.enter_context(_bounded_shutdown(Path(folder)))
        patience, killed = Settings.from_env(os.environ).watchdog, dict[int, str]()
        policy = Policy(Path(folder), patience, _least(job), first_failure, report, stood, killed)
        own = type("HostAgent", (Agent,), {"policy": policy})
        stack.enter_context(mock.patch.object(launcher, "LocalElasticAgent", own))
        try:
            config, _, _ = config_from_args(parse_args(_agent_arguments(job, folder)))
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            rank, failure = first_failure(error.failures)
            hung = HANG in str(failure.error_file_data.get("message"))
            sys.stderr.write(report(rank, failure, killed.get(rank)) + "".join(stood if hung else ()))
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as stopped:
            return 128 + stopped.sigval
        except (ValueError, RendezvousError) as error:
            raise FlowError(f"the hosts did not find each other: {error}") from None
    return 0


def _agent_arguments(job: Job, folder: str) -> list[str]:
    single_host = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    several_hosts = ["--master-port", "29500", *job.agent_options]
    meeting = several_hosts if job.meets_others else [*single_host, "--rdzv-id", str(os.getpid())]
    if job.elastic is not None:
        own = "{}:{}".format(*job.hosts)
        wait = f"last_call_timeout={_LAST_CALL}"
        defaults = ["--nnodes", own, "--rdzv-conf", wait, "--max-restarts", str(_RESTARTS)]
        meeting = [*defaults, *meeting, *(() if job.meets_others else job.agent_options)]
    return [*meeting, "--nproc-per-node", str(job.num_ranks), "--log-dir", folder, job.script]


def _least(job: Job) -> int | None:
    """How many ranks of this host the job needs at least; None if it needs all."""
    if job.elastic is None:
        return None
    return 1 if job.meets_others else job.elastic[0]


@contextmanager
def _bounded_shutdown(folder: Path) -> Iterator[list[str]]:
    """Bound the time that the agent waits for ranks to end before it kills them.

    Its own bound (30 s, not an option) is too long after a failure, and too short for ranks that are asked to
    save and end, by a signal to this process or because others join. Yields where ranks stood at the last
    failure that had not ended by themselves: lines.
    """
    close = PContext.close
    stood: list[str] = []
    failed: list[PContext] = []

    def bounded(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        if death_sig is None:  # the agent names none when a rank failed
            failed[:] = [self]
            stands = watch.stands(self.pids(), folder)
            if stands:
                stood[:] = [f"local rank {rank} {one.text}\n" for rank, one in sorted(stands.items())]
        close(self, death_sig, FAILURE_GRACE if self in failed else INTERRUPT_GRACE)

    with mock.patch.object(PContext, "close", bounded):
        yield stood


@contextmanager
def _snapshots(root: Path = Path("/dev/shm")) -> Iterator[None]:
    """Within: ranks have a folder in memory for snapshots, which outlives them and not this process.

    It is for this user alone: a checkpoint is in it. Where there is no such memory, there is none.
    """
    if not root.is_dir():
        yield
        return
    prefix = f"monoflow-{socket.gethostname()}-"
    for left in root.glob(f"{prefix}*"):  # of launchers that were killed
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not runs.is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root)
    os.environ[SNAPSHOTS_VARIABLE] = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(SNAPSHOTS_VARIABLE, None)


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The (rank, failure) that came first; the others are most often its consequence.

    A rank that was killed is found a moment later than the exceptions that its peers then raise.
    """
    start = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        failure = item[1]
        time_of_death = _extra(failure).get("exact_time", failure.timestamp + 1)  # to the second: its end
        if _ended_by_agent(failure, start):
            return 2, time_of_death
        # SIGABRT is how a communication library gives up on a peer that is gone.
        was_killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT
        return (0 if was_killed else 1), time_of_death

    return min(failures.items(), key=order)


def _ended_by_agent(failure: ProcessFailure, start: float) -> bool:
    """Whether the agent ended this rank because another had failed at `start`."""
    if failure.exitcode == -signal.SIGKILL:
        return failure.timestamp - start >= FAILURE_GRACE - 1
    return failure.exitcode == -signal.SIGTERM


def _extra(failure: ProcessFailure) -> dict:
    """What the rank recorded beside its message (nothing, if it died without a word)."""
    message = failure.error_file_data.get("message")
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def report(rank: int, failure: ProcessFailure, why: str | None = None) -> str:
    """What the user reads about a failed job: rank, host and the rank's own traceback, or how it died.

    Args:
        why: what it had done if this launcher killed it.
    """
    extra = _extra(failure)
    where = f"rank {rank} on {extra.get('host', socket.gethostname())}"
    if extra:
        return f"\n{where} failed first:\n\n{extra['py_callstack']}"
    if why is not None:
        return f"\n{where} {why} and was killed\n"
    if failure.exitcode < 0:
        signal_text = f"signal {-failure.exitcode} ({failure.signal_name()})"
        hint = "; the system may have run out of memory" if failure.exitcode == -signal.SIGKILL else ""
        return f"\n{where} died of {signal_text}{hint}\n"
    return f"\n{where} exited with status {failure.exitcode}\n"
