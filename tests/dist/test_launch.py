"""Ranks as `monoflow run` starts, watches and ends them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monoflow.cli.ranks import first_failure, report
from monoflow.errors import PlacementError
from monoflow.runtime import launch
from monoflow.runtime.launch import _device_index
from tests.conftest import RunCli, cli_environment

JOIN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from monoflow.runtime.launch import ensure_process_group, stop_on_interrupt
ensure_process_group("cpu")
rank = int(os.environ.get("RANK", 0))
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(body: str) -> Path:
        path = tmp_path / "user_script.py"
        path.write_text(JOIN + body)
        return path

    return write


def test_ranks_join_and_end_cleanly(script, run_cli: RunCli) -> None:
    path = script("""
total = torch.tensor([rank + 1])
dist.all_reduce(total)
print(f"rank {rank} {sys.argv[1:]} {total.item()} {__name__} {os.environ['OMP_NUM_THREADS']}\\n", end="")
""")
    done = run_cli("run", "-n", "2", path, "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} ['--steps', '3'] 3 __main__ 1" for rank in (0, 1)
    ]
    assert done.stderr == ""


def test_what_is_due_at_exit_happens_in_every_rank(script, run_cli: RunCli, tmp_path: Path) -> None:
    path = script("""
import atexit, threading
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 1))  # keeps groups, and their threads, alive
def late():
    time.sleep(0.5)
    print(f"thread of {rank}\\n", end="", flush=True)
threading.Thread(target=late).start()
atexit.register(lambda: print(f"exit of {rank}\\n", end="", flush=True))
sys.stdout = open(sys.argv[1] + f"/out{rank}", "w")
held = open(sys.argv[1] + f"/held{rank}", "w")
held.write("to the end")
sys.stdout.write("buffered")
sys.stdout, out = sys.__stdout__, sys.stdout
""")
    done = run_cli("run", "-n", "2", path, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["exit of 0", "exit of 1", "thread of 0", "thread of 1"]
    assert {(tmp_path / f"held{rank}").read_text() for rank in (0, 1)} == {"to the end"}
    assert {(tmp_path / f"out{rank}").read_text() for rank in (0, 1)} == {"buffered"}


@pytest.mark.parametrize(("code", "status", "said"), [("", 0, ""), ("'no'", 1, "no\n"), ("300", 44, "")])
def test_exit_codes_are_as_pythons_own(script, run_cli: RunCli, code: str, status: int, said: str) -> None:
    done = run_cli("run", script(f"print('buffered', end=''); sys.exit({code})"))
    assert (done.returncode, done.stdout, done.stderr) == (status, "buffered", said)


def test_one_rank_is_a_plain_run(script, run_cli: RunCli) -> None:
    path = script("print(dist.is_initialized(), 'WORLD_SIZE' in os.environ, sys.argv[1:])\nsys.exit(5)")
    done = run_cli("run", path, "a")
    assert (done.returncode, done.stdout) == (5, "False False ['a']\n"), done.stderr


def test_one_rank_prints_the_users_traceback(script, run_cli: RunCli) -> None:
    path = script("def inner():\n    raise ValueError('seven')\ninner()")
    done = run_cli("run", path)
    assert done.returncode == 1
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{path}"')
    assert done.stderr.endswith("ValueError: seven\n")
    assert "runpy" not in done.stderr


def test_only_the_first_failing_rank_is_reported(script, run_cli: RunCli) -> None:
    path = script("""
if rank == 1:
    raise ValueError("rank one's own fault")
dist.all_reduce(torch.ones(1))
""")
    done = run_cli("run", "-n", "2", path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert re.match(r"\nrank 1 on \S+ failed first:\n\nTraceback", done.stderr)
    assert f'File "{path}", line 9, in <module>' in done.stderr
    assert done.stderr.endswith("ValueError: rank one's own fault\n")
    assert "elastic" not in done.stderr


def test_a_killed_rank_takes_the_job_down(script, run_cli: RunCli) -> None:
    path = script("""
if rank == 1:
    print(time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # even then
time.sleep(600)
""")
    done = run_cli("run", "-n", "2", path)
    assert time.time() - float(done.stdout) < 30
    assert done.returncode == 128 + signal.SIGKILL
    assert re.fullmatch(r"\nrank 1 on \S+ died of signal 9 \(SIGKILL\); .*memory\n", done.stderr)


def test_exit_status_of_a_rank_is_reported(script, run_cli: RunCli) -> None:
    done = run_cli("run", "-n", "2", script("sys.exit(3 if rank == 0 else 0)"))
    assert done.returncode == 3
    assert re.fullmatch(r"\nrank 0 on \S+ exited with status 3\n", done.stderr)


def interrupt(path: Path) -> tuple[int, str, str]:
    """Run on two ranks, press Ctrl-C once both are ready, and return status, output and errors."""
    command = [sys.executable, "-m", "monoflow.cli", "run", "-n", "2", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=cli_environment()) as job:
        assert job.stdout is not None
        ready = [job.stdout.readline(), job.stdout.readline()]
        assert sorted(ready) == ["ready 0\n", "ready 1\n"]
        job.send_signal(signal.SIGINT)
        output, errors = job.communicate(timeout=60)
    return job.returncode, output, errors


def test_interrupt_reaches_every_rank_once(script) -> None:
    status, output, errors = interrupt(
        script("""
try:
    print(f"ready {rank}\\n", end="", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(1)
    print(f"saved {rank}\\n", end="", flush=True)
    raise
""")
    )
    assert status == 130
    assert sorted(output.splitlines()) == ["saved 0", "saved 1"]
    assert errors == ""


def test_interrupted_ranks_stop_after_the_same_step(script) -> None:
    status, output, errors = interrupt(
        script("""
step = 0
with stop_on_interrupt() as stop:
    while not stop():
        step += 1
        dist.all_reduce(torch.ones(1000))
        if step == 10:
            print(f"ready {rank}\\n", end="", flush=True)
both = [torch.zeros(1) for _ in range(2)]
dist.all_gather(both, torch.tensor([float(step)]))
print(f"same step: {bool(both[0] == both[1])}\\n", end="", flush=True)
""")
    )
    assert (status, output, errors) == (130, "same step: True\nsame step: True\n", "")


def test_ranks_end_when_the_launcher_is_killed(script) -> None:
    path = script("print(f'{os.getpid()}\\n', end='', flush=True)\ntime.sleep(100)")
    command = [sys.executable, "-m", "monoflow.cli", "run", "-n", "2", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=cli_environment()) as job:
        assert job.stdout is not None
        pids = [int(job.stdout.readline()) for _ in range(2)]
        job.kill()
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"ranks {pids} outlive their launcher"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or ") Z " not in Path(f"/proc/{pid}/stat").read_text()


class Failure:
    """What the agent knows of a failed rank."""

    def __init__(self, exitcode: int, exact_time: float | None = None, found: float = 0) -> None:
        extra = {"exact_time": exact_time, "py_callstack": "", "host": "here"}
        self.exitcode = exitcode
        self.timestamp = int(exact_time or found)
        self.error_file_data = {"message": {"extraInfo": extra} if exact_time else "<NONE>"}

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: Failure(1, 5.2), 1: Failure(1, 5.1)}, 1),
        ({0: Failure(1, 5.0), 1: Failure(-9, found=5)}, 1),
        ({0: Failure(-15, found=5), 1: Failure(1, 5.0)}, 1),
        ({0: Failure(-9, found=15), 1: Failure(1, 5.0)}, 1),
        ({0: Failure(-9, found=15), 1: Failure(-9, found=5)}, 1),
        ({0: Failure(-6, found=5), 1: Failure(1, 5.0)}, 1),
        ({0: Failure(-15, found=5), 1: Failure(3, found=5)}, 1),
    ],
    ids=[
        "earliest exception",
        "killed, and its peer's exception",
        "ended by the agent",
        "killed by the agent",
        "killed, then another by the agent",
        "abort after an exception",
        "status",
    ],
)
def test_first_failure(failures, first: int) -> None:
    assert first_failure(failures)[0] == first
    assert report(first, failures[first]).startswith(f"\nrank {first} on ")


def test_what_is_to_be_called_before_leaving_is_called_once() -> None:
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_BEFORE_LEAVING", {})
        launch.before_leaving(lambda: called.append("a"))

        def fails() -> None:
            called.append("b")
            raise ValueError("no")

        launch.before_leaving(fails)
        with pytest.raises(ValueError, match="no"):
            launch.destroy_process_group()
        launch.destroy_process_group()
    assert called == ["a", "b"]


@pytest.mark.parametrize(("count", "local_rank", "index"), [(4, 3, 3), (1, 3, 0)])
def test_each_rank_gets_a_device(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, index: int
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: count)
    assert _device_index("cuda", local_rank) == index


def test_too_many_ranks_for_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    with pytest.raises(
        PlacementError, match="local rank 2 has no cuda device, this host has 2: start at most 2"
    ):
        _device_index("cuda", 2)
