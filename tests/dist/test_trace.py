"""Real jobs that are traced and watched."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from monoflow.cli import runs
from monoflow.cli.timeline import read
from monoflow.cli.top import top
from monoflow.cli.trace import summarize
from monoflow.runtime.clock import Offset, compare_clocks
from tests.conftest import RunCli, RunRanks, cli_environment
from tests.local.test_trace_command import as_perfetto_reads

TRAIN = """
import os, signal, sys, time
import torch, monoflow as flow
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@flow.graph(model, optimizer, plan="data")
def train_step(x):
    loss = (model(x) ** 2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

rank = int(os.environ.get("RANK", 0))
x = torch.randn(6, 8)
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(body: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(TRAIN + body)
        return path

    return write


def test_a_job_is_traced_though_a_rank_dies(script, run_cli: RunCli, tmp_path: Path) -> None:
    path = script("""
for _ in range(5):
    train_step(x)
flow.synchronize()
torch.distributed.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
""")
    done = run_cli("run", "--trace", "out.json", "-n", "2", path, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "monoflow: out.json has " in done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    counts = as_perfetto_reads(data["traceEvents"])
    timeline = read(tmp_path / "out.json")
    assert counts["X"] == len(timeline.events) == sum(len(one.actors) for one in timeline.wirings) * 5
    assert {(one.rank, one.step) for one in timeline.events} == {(r, s) for r in (0, 1) for s in range(5)}
    moves = [one for one in timeline.events if one.kind == "boxing"]
    assert {one.name.split(":")[0] for one in moves} >= {"all_reduce"}
    assert sum(one.num_bytes for one in moves) > 0
    # In every collective an arrow goes from the rank that came last to the other.
    by_id: dict[int, list[int]] = {}
    for one in data["traceEvents"]:
        if one["ph"] in "sf":
            by_id.setdefault(one["id"], []).append(one["pid"])
    assert sum(len(set(pids)) == 2 for pids in by_id.values()) == len(moves) // 2
    summary = summarize(timeline)
    assert summary.num_steps == 5
    assert all(most <= slots for most, slots in summary.live.values())


def test_one_rank_is_traced_too(script, run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("run", "--trace", "out.json.gz", script("train_step(x)\nsys.exit(3)"), cwd=tmp_path)
    assert done.returncode == 3
    assert {one.rank for one in read(tmp_path / "out.json.gz").events} == {0}


def test_top_shows_a_running_job(script, tmp_path: Path) -> None:
    path = script("print('ready', flush=True)\nwhile True:\n    train_step(x)")
    environment = {**cli_environment(), "MONOFLOW_RUN_DIR": str(tmp_path / "job")}
    command = [sys.executable, "-m", "monoflow.cli", "run", "-n", "2", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as job:
        try:
            deadline = time.monotonic() + 120
            while len(list(tmp_path.glob("job/rank*.json"))) < 2:
                assert time.monotonic() < deadline and job.poll() is None
                time.sleep(0.2)
            shown = io.StringIO()
            assert top(runs.find(None, environment), True, Console(file=shown, width=160)) == 0
        finally:
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=60)
    for said in (
        f"{path} on ",
        "2 of 2 ranks",
        "train_step",
        "samples/s",
        "data ",
        "resident",
        "all_reduce:",
    ):
        assert said in shown.getvalue(), shown.getvalue()
    assert not (tmp_path / "job").exists()


def skewed() -> Any:
    """Of a host whose clock is 5 s ahead: what its ranks are told. Ranks 2 and 3 are on it."""
    rank = dist.get_rank()
    ahead = 5 * 10**9 if rank >= 2 else 0
    return compare_clocks(rank % 2, torch.device("cpu"), lambda: time.perf_counter_ns() + ahead)


def test_clocks_of_hosts_are_compared(run_ranks: RunRanks) -> None:
    first, second, third, fourth = run_ranks(4, skewed)
    assert first == second == Offset(0, 0)
    assert third == fourth
    assert 0 < third.error < 10**9
    assert abs(third.num_ns - 5 * 10**9) <= third.error
