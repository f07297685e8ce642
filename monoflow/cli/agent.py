"""The agent of a host: torch's elastic one, which also ends hung ranks and may go on with fewer.

Private parts of torch used here: the methods of `LocalElasticAgent` that begin with an underscore.
tests/dist/test_elastic.py fails when they move.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ..runtime.signs import HANG, LIFE_VARIABLE
from . import watch


class Policy(NamedTuple):
    """What an agent does about failures.

    Attributes:
        watch: the folder in which ranks give signs of life.
        patience: seconds without one after which a rank is taken for hung; 0 for no end.
        least: ranks of this host without which the job ends; None if a failure ends it.
        first: of several failures, the (rank, failure) that came first.
        report: what to say of one.
        stood: where ranks stood when others failed, lines.
        hung: of ranks that were killed in this round, what they did.
    """

    watch: Path
    patience: float
    least: int | None
    first: Callable[[dict[int, ProcessFailure]], tuple[int, ProcessFailure]]
    report: Callable[[int, ProcessFailure], str]
    stood: Sequence[str]
    hung: dict[int, str]


class Agent(LocalElasticAgent):
    """Starts, watches and ends the ranks of one host.

    A job that may re-form starts all its ranks again when one fails. If the same one dies twice before the
    first step is over, its place is given up; if one raises the same error twice before that, so is the job.
    """

    policy: Policy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = list(range(self._worker_group.spec.local_world_size))
        self._last: tuple[int, str] | None = None
        self._life = -1
        self._watch = watch.Watch(self.policy.watch, self.policy.patience)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = dict(self._pcontext.pids()) if self._pcontext is not None else {}
        if (hung := self._watch.look(pids, time.monotonic())) is not None:
            self._end(hung, pids)
        parent: Any = super()  # its decorator hides its arguments from type checkers
        result: RunResult = parent._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and self.policy.least is not None:
            took_a_step = any(watch.steps(pid, self.policy.watch) for pid in pids.values())
            self._decide(worker_group, result, took_a_step)
        return result

    def _end(self, hung: watch.Hung, pids: dict[int, int]) -> None:
        """Kills ranks that hang."""
        rank_of = {one.local_rank: one.global_rank for one in self._worker_group.workers}
        names = ", ".join(str(rank_of[local]) for local in sorted(hung.ranks))
        lines = [f"rank {rank_of[local]} {one.text}\n" for local, one in sorted(hung.stands.items())]
        sys.stderr.write(f"\nrank {names} {hung.why}; this is where the ranks stand:\n{''.join(lines)}")
        for local in hung.ranks:
            self.policy.hung[rank_of[local]] = hung.why
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pids[local], signal.SIGKILL)

    def _decide(self, group: WorkerGroup, result: RunResult, took_a_step: bool) -> None:
        """Whether the job goes on, and with which ranks."""
        least = self.policy.least
        assert least is not None
        rank, failure = self.policy.first(result.failures)
        local = next(one.local_rank for one in group.workers if one.global_rank == rank)
        message = failure.error_file_data.get("message")
        told = message.get("message", "") if isinstance(message, dict) else ""
        this = -1 if told else self._slots[local], told  # any rank may be the first to meet a bug
        again = not took_a_step and this == self._last
        self._last = None if took_a_step else this
        if self._remaining_restarts <= 0:
            return
        if again and (told or len(self._slots) <= least):
            self._remaining_restarts = 0
            return
        said = self.policy.report(rank, failure) if rank not in self.policy.hung else ""
        said += "".join(self.policy.stood) if HANG in told else ""
        if again:
            del self._slots[local]
            group.spec.local_world_size = len(self._slots)
            self._last = None
        count = len(self._slots)
        sys.stderr.write(
            f"{said}\nthe job re-forms with {count} rank{'s' * (count > 1)} of this host"
            + f", without local rank {this[0]}, which failed twice before its first step" * again
            + f" ({self._remaining_restarts - 1} restarts left)\n"
        )

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._life += 1
        self.policy.hung.clear()
        self._watch.begin()
        handler: Any = worker_group.spec.rdzv_handler
        if hasattr(handler, "_shared_tcp_store_server"):
            # Ranks join through a store that torch keeps over rounds: in it they would find the addresses of
            # those before them. So each round gets a new one.
            handler._shared_tcp_store_server = handler._bootstrap_store_info = None
        parent: Any = super()
        parent._rendezvous(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY and self._pcontext is not None:  # others want to join
            sys.stderr.write("\nother hosts join or leave: the job saves and re-forms\n")
            self._pcontext.close(signal.SIGTERM)
        parent: Any = super()
        parent._restart_workers(worker_group)

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env[LIFE_VARIABLE] = str(self._life)
        worker_env["LOCAL_RANK"] = str(self._slots[local_rank])  # of the devices that are left
