"""What several tests need: ranks as real processes, and the command line as a real program."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist

_JOINED = "joined"

ROOT = Path(__file__).parents[1]
#: Tests plan for no machine in particular: a calibration of this one must not change what they see.
os.environ["MONOFLOW_CACHE"] = tempfile.mkdtemp(prefix="monoflow-no-cache-")


class RunRanks(Protocol):
    """Calls a module-level function on n ranks joined by gloo; returns what each returned, in rank order."""

    def __call__(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]: ...


class RunCli(Protocol):
    """Runs `python -m monoflow.cli ...` to its end."""

    def __call__(
        self, *arguments: str | Path, cwd: Path | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session")
def run_ranks() -> RunRanks:
    return _run_ranks


@pytest.fixture(scope="session")
def run_cli() -> RunCli:
    def run(
        *arguments: str | Path, cwd: Path | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "monoflow.cli", *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=cwd,
            env=cli_environment(),
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def cli_environment() -> dict[str, str]:
    """This environment without one that a launcher left, and with the package to import from anywhere.

    Programs keep the bytecode of what they import: to compile it takes each a tenth of its start.
    """
    ours = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MONOFLOW_CACHE": os.environ["MONOFLOW_CACHE"],
    }
    left = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_",
        "TORCHELASTIC_",
        "MONOFLOW_",
        "PYTHONDONTWRITEBYTECODE",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(left)} | ours


def _run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    results = _results_of_ranks(num_ranks, function, args)
    if any(
        isinstance(answer, _NotJoined) for _, answer in results
    ):  # Gloo may lose a rank while the ranks connect
        results = _results_of_ranks(num_ranks, function, args)
    failures = [str(text) for ok, text in results if not ok]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def _results_of_ranks(
    num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[tuple[bool, Any]]:
    """Of every rank: whether it did well, and what it returned or why not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "monoflow.face"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, num_ranks, f"{folder}/store", there, function, args)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            pairs = zip(pipes, processes, strict=True)
            return [_receive(rank, pipe, process) for rank, (pipe, process) in enumerate(pairs)]
        finally:
            for process in processes:
                process.join(10)
                process.kill()


class _NotJoined(str):
    """Why a rank did not join the others."""


def _receive(rank: int, pipe: Connection, process: BaseProcess) -> tuple[bool, Any]:
    joined = False
    while pipe.poll(120):
        try:
            answer = pipe.recv()
        except EOFError:
            process.join(10)
            text = f"rank {rank} ended with exit code {process.exitcode} and without a word"
            return False, text if joined else _NotJoined(text)
        if answer != _JOINED:
            return answer
        joined = True
    return False, f"rank {rank} gave no answer in 120 s"


def _rank_main(
    rank: int,
    num_ranks: int,
    store: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    faulthandler.enable()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    pipe.send(_JOINED)
    try:
        answer = (True, function(*args))
    except Exception:
        answer = (False, f"rank {rank}: {traceback.format_exc()}")
    pipe.send(answer)
    dist.destroy_process_group()
