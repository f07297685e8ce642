"""Jobs that re-form: ranks that die, hang or give up for good; `tests/faults` has hosts that join and leave."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monoflow.cli.run import Job, elastic_bounds
from monoflow.errors import FlowError
from tests.conftest import RunCli, cli_environment

#: Ranks that meet again and again until a file says that it is enough.
MEET = """
import os, signal, sys, time
import torch, torch.distributed as dist
from monoflow.runtime.launch import ensure_process_group
folder = sys.argv[1]
local = int(os.environ["LOCAL_RANK"])
def once(name):
    try:
        os.unlink(os.path.join(folder, name))
    except FileNotFoundError:
        return False
    return True
def meet():
    done = torch.tensor(float(os.path.exists(os.path.join(folder, "enough"))))
    if dist.is_initialized():
        dist.all_reduce(done, dist.ReduceOp.MAX)
    return bool(done)
"""
LOOP = """
ensure_process_group("cpu")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print(f"rank {rank} of {size} at {local}, process {os.getpid()}\\n", end="", flush=True)
while not meet():
    time.sleep(0.1)  # here
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(body: str) -> Path:
        path = tmp_path / "user_script.py"
        path.write_text(MEET + body)
        return path

    return write


@contextmanager
def started(folder: Path, *arguments: object, name: str = "job", **env: str) -> Iterator[subprocess.Popen]:
    """A `monoflow run` whose output goes to `name`.txt in a folder."""
    command = [sys.executable, "-m", "monoflow.cli", "run", *map(str, arguments)]
    with (folder / f"{name}.txt").open("w") as out:
        job = subprocess.Popen(command, stdout=out, stderr=out, env=cli_environment() | env)
    try:
        yield job
    finally:
        job.kill()
        job.wait()


def until(folder: Path, pattern: str, count: int = 1, name: str = "job") -> list:
    """Waits until a job has said something so often; what matched."""
    deadline = time.monotonic() + 120
    while True:
        text = (folder / f"{name}.txt").read_text()
        found = re.findall(pattern, text)
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, f"{pattern!r} is not in\n{text}"
        time.sleep(0.1)


def test_a_stopped_rank_is_found_told_of_and_started_again(script, tmp_path: Path) -> None:
    path = script(LOOP)
    with started(tmp_path, "-n", 2, "--elastic", "1:2", path, tmp_path, MONOFLOW_WATCHDOG="8") as job:
        pids = dict(until(tmp_path, r"rank (\d) of 2 at \d, process (\d+)", 2))
        os.kill(int(pids["1"]), signal.SIGSTOP)
        until(tmp_path, r"rank \d of 2", 4)
        (tmp_path / "enough").touch()
        assert job.wait(60) == 0
    text = (tmp_path / "job.txt").read_text()
    assert re.search(r"\nrank 1 gave no sign of life for \d+ s; this is where the ranks stand:\n", text)
    assert re.search(rf"\nrank 1 was stopped by a signal, at {path}:\d+ in ", text), text
    assert re.search(rf"\nrank 0 at {path}:\d+ in (meet|<module>)", text)
    assert "\nthe job re-forms with 2 ranks of this host (99 restarts left)\n" in text


def test_a_rank_that_cannot_come_back_is_done_without(script, tmp_path: Path) -> None:
    path = script('if local == 0 and not once("spare"):\n    os.kill(os.getpid(), signal.SIGKILL)\n' + LOOP)
    (tmp_path / "spare").touch()
    with started(tmp_path, "-n", 2, "--elastic", "1:2", path, tmp_path) as job:
        pids = dict(until(tmp_path, r"rank (\d) of 2 at \d, process (\d+)", 2))
        os.kill(int(pids["0"]), signal.SIGKILL)
        assert until(tmp_path, r"rank 0 of 1 at (\d)") == ["1"]  # it keeps its device
        (tmp_path / "enough").touch()
        assert job.wait(60) == 0
    text = (tmp_path / "job.txt").read_text()
    assert "re-forms with 1 rank of this host, without local rank 0, which failed twice before its first" in text


def test_a_bug_ends_the_job(script, run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("run", "-n", "2", "--elastic", "1:2", script("raise ValueError('a bug')\n"), tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: a bug") == 2 and done.stderr.count("the job re-forms") == 1


def test_bounds_are_checked(tmp_path: Path) -> None:
    assert elastic_bounds("1:8") == (1, 8)
    for text in ("8", "2:1", "0:4", "a:b"):
        with pytest.raises(FlowError, match=f"--elastic {text}: write the least and the most"):
            elastic_bounds(text)
    (tmp_path / "a.py").touch()
    script, meeting = str(tmp_path / "a.py"), ("--rdzv-endpoint", "host:1")
    with pytest.raises(FlowError, match=r"-n 4 --elastic 1:2: this host brings more ranks than"):
        Job(4, script, (), elastic=(1, 2))
    with pytest.raises(
        FlowError, match=r"-n 2 --elastic 4:8: the job needs at least 4 .* brings 2; raise -n, lower MIN, or say"
    ):
        Job(2, script, (), elastic=(4, 8))
    assert Job(2, script, (), meeting, elastic=(4, 8)).hosts == (2, 4)
    assert Job(4, script, (), elastic=(4, 8)).hosts == (1, 1)
    with pytest.raises(FlowError, match=r"-n 8 --elastic 9:15: no number of hosts of 8 ranks has 9 to 15 ranks"):
        Job(8, script, (), meeting, elastic=(9, 15))
    with pytest.raises(FlowError, match=r"--max-restarts goes with --elastic MIN:MAX"):
        Job(2, script, (), ("--max-restarts", "3"))
