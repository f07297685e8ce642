"""Which ranks are taken for hung, and what becomes of them and their job."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext

from monoflow.cli import ranks as launched
from monoflow.cli import watch
from monoflow.cli.agent import Agent, Policy
from monoflow.cli.ranks import FAILURE_GRACE, INTERRUPT_GRACE, first_failure, report
from monoflow.cli.watch import Hung, Process, Stand, Watch, process
from monoflow.runtime.launch import _answer_if_asked
from monoflow.runtime.signs import ASK, LIFE_VARIABLE, PULSE, SNAPSHOTS_VARIABLE, STACKS

PATIENCE = 10


class Ranks:
    """Ranks that a test has do what they do, and the time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, 1000.0
        self.pids = {0: 70, 1: 71}
        self.processes = {pid: Process("S") for pid in self.pids.values()}
        self.stands = {rank: Stand("at a.py:1", rank == 0) for rank in self.pids}
        self.watch = Watch(folder, PATIENCE)
        self.beats = 0
        monkeypatch.setattr(watch, "process", lambda pid: self.processes[pid])
        monkeypatch.setattr(watch, "stands", lambda pids, folder: dict(self.stands))

    def compute(self, rank: int, seconds: float) -> None:
        one = self.processes[self.pids[rank]]
        self.processes[self.pids[rank]] = one._replace(seconds=one.seconds + seconds)

    def beat(self, *ranks: int, steps: int = 0) -> None:
        for rank in ranks:
            path, self.beats = self.folder / f"{self.pids[rank]}{PULSE}", self.beats + 1
            path.write_text(f"{steps:012}")
            os.utime(path, ns=(self.beats, self.beats))

    def look(self, seconds: float = 0) -> Hung | None:
        self.now += seconds
        return self.watch.look(self.pids, self.now)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


def test_a_rank_that_gives_no_sign_of_life_hangs(ranks: Ranks) -> None:
    assert ranks.look(1e6) is None  # it has not begun to
    ranks.beat(0, 1)
    assert ranks.look() is None
    ranks.beat(0)
    assert ranks.look(PATIENCE - 1) is None
    ranks.beat(0)
    assert ranks.look(1) == Hung(frozenset({1}), "gave no sign of life for 10 s", ranks.stands)
    assert ranks.look(1) is None  # said once
    ranks.watch.begin()
    assert ranks.look() is None
    assert ranks.look(PATIENCE) is not None


def test_ranks_that_have_ended_give_no_signs_of_life(ranks: Ranks) -> None:
    ranks.beat(0, 1)
    assert ranks.look() is None
    for state in ("Z", ""):
        ranks.processes[71] = Process(state)
        for _ in range(3):
            ranks.beat(0)
            assert ranks.look(PATIENCE) is None


def test_the_systems_clock_may_be_set(ranks: Ranks) -> None:
    ranks.beat(0, 1)
    for rank in (0, 1):
        os.utime(ranks.folder / f"{ranks.pids[rank]}{PULSE}", (1, 1))  # 1970: it was set ahead since then
    assert ranks.look() is None
    assert ranks.look(PATIENCE - 1) is None


def test_a_rank_for_which_others_wait_hangs(ranks: Ranks) -> None:
    ranks.beat(0, 1)
    for _ in range(5):  # before the first step is over, they may plan and compile
        ranks.beat(0, 1)
        assert ranks.look(PATIENCE) is None
    ranks.beat(0, 1, steps=1)
    assert ranks.look() is None
    ranks.beat(0, 1, steps=1)
    assert ranks.look(PATIENCE - 1) is None
    ranks.beat(0, 1, steps=1)
    assert ranks.look(1) == Hung(frozenset({1}), "kept the others waiting for 10 s", ranks.stands)


def test_nobody_hangs_for_whom_nobody_waits(ranks: Ranks) -> None:
    ranks.stands[0] = Stand("at a.py:1", False)
    for _ in range(4):
        ranks.beat(0, 1, steps=1)
        assert ranks.look(PATIENCE) is None
    ranks.stands = {rank: Stand("at a.py:1", True) for rank in ranks.pids}
    ranks.beat(0, 1, steps=1)
    hung = ranks.look(PATIENCE)
    assert hung is not None and hung.ranks == {0, 1}  # each waits for the other


@pytest.mark.parametrize("beats", [True, False], ids=["lets go of the lock", "holds the lock"])
def test_a_rank_that_computes_does_not_hang(ranks: Ranks, beats: bool) -> None:
    """An evaluation, an export, a save on one rank: for as long as they take."""
    ranks.beat(0, 1, steps=1)
    assert ranks.look() is None
    for _ in range(5):
        ranks.compute(1, 0.3)
        ranks.beat(*((0, 1) if beats else (0,)), steps=1)
        assert ranks.look(PATIENCE) is None
    ranks.compute(1, 0.003)  # as one does that looks for a file now and then
    ranks.beat(*((0, 1) if beats else (0,)), steps=1)
    hung = ranks.look(PATIENCE)
    assert hung is not None and hung.ranks == {1}


def test_no_patience_no_watch(ranks: Ranks) -> None:
    ranks.watch = Watch(ranks.folder, 0)
    ranks.beat(0, 1, steps=1)
    assert ranks.look() is None
    assert ranks.look(1e6) is None


# --- what the system says ------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen]]:
    begun: list[subprocess.Popen] = []

    def run(code: str) -> subprocess.Popen:
        begun.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        return begun[-1]

    yield run
    for one in begun:
        one.kill()
        one.communicate()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_the_system_says_of_a_rank(start: Callable[[str], subprocess.Popen]) -> None:
    busy = start("import time\nwhile time.process_time() < 0.3: pass\nprint()\ntime.sleep(100)")
    assert busy.stdout is not None and busy.stdout.readline()
    assert process(busy.pid).is_there and 0.2 < process(busy.pid).seconds < 5
    os.kill(busy.pid, signal.SIGSTOP)
    until(lambda: process(busy.pid).state == "T")
    busy.kill()
    until(lambda: process(busy.pid).state == "Z")
    assert not process(busy.pid).is_there
    busy.wait()
    assert process(busy.pid) == Process("")
    assert process(os.getppid()) == Process("")  # a number that is another's now


def test_where_ranks_stand(start: Callable[[str], subprocess.Popen], tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("import time\ndef work():\n    time.sleep(100)\nwork()\n")
    child = start(
        "import faulthandler, os, signal, runpy\n"
        f"own = open(f'{tmp_path}/{{os.getpid()}}{STACKS}', 'a')\n"
        "faulthandler.register(signal.SIGUSR2, own)\n"
        f"print(flush=True)\nrunpy.run_path('{tmp_path}/user.py')"
    )
    assert child.stdout is not None and child.stdout.readline()
    place = f"at {tmp_path}/user.py:3 in work"
    until(lambda: watch.stands({4: child.pid}, tmp_path) == {4: Stand(place, False)})
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: process(child.pid).state == "T")
    found = watch.stands({4: child.pid, 5: 1}, tmp_path)  # the other is none of ours
    assert found == {4: Stand(f"was stopped by a signal, {place}", False)}


def test_a_script_may_take_the_signal_by_which_ranks_are_asked(
    start: Callable[[str], subprocess.Popen], tmp_path: Path
) -> None:
    stacks, before = tmp_path / f"1{STACKS}", signal.getsignal(ASK)
    stacks.touch()
    _answer_if_asked(str(stacks), before)
    assert stacks.exists()
    try:
        signal.signal(ASK, lambda *_: None)
        for _ in range(2):
            _answer_if_asked(str(stacks), before)
            assert not stacks.exists()
    finally:
        signal.signal(ASK, before)
    child = start("import time\ntime.sleep(100)")  # whom it would end
    assert watch.stands({0: child.pid}, tmp_path) == {0: Stand("did not say where it stands", False)}
    assert child.poll() is None


STACK = """Current thread 0x1 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 7 in barrier
  File "/home/me/train.py", line 3 in evaluate
  File "/home/me/train.py", line 9 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_a_rank_in_a_collective_waits(tmp_path: Path) -> None:
    (tmp_path / f"9{STACKS}").write_text(
        "Thread 0x2 (most recent call first):\n  <no Python frame>\n\n" + STACK
    )
    place = "at /home/me/train.py:3 in evaluate, inside distributed_c10d.py:7 barrier"
    assert watch._place(9, tmp_path) == (place, True)
    assert watch._place(8, tmp_path) == ("did not say where it stands", False)


# --- the agent -----------------------------------------------------------------------------------------


class Failure:
    """What torch's agent knows of a rank that failed."""

    def __init__(self, exitcode: int, message: str = "") -> None:
        self.exitcode, self.timestamp = exitcode, 1
        told = {"message": message, "extraInfo": {"py_callstack": message, "host": "here"}}
        self.error_file_data: dict[str, Any] = {"message": told if message else "<NONE>"}

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


def agent_of(folder: Path, num_ranks: int, least: int, restarts: int = 9) -> tuple[Agent, Any]:
    """An agent without processes, and its group."""
    policy = Policy(folder, PATIENCE, least, first_failure, report, [], {})
    agent: Any = type("Made", (Agent,), {"policy": policy, "__init__": lambda self: None})()
    workers = [SimpleNamespace(local_rank=one, global_rank=one) for one in range(num_ranks)]
    group = SimpleNamespace(workers=workers, spec=SimpleNamespace(local_world_size=num_ranks))
    agent._slots, agent._last, agent._remaining_restarts = list(range(num_ranks)), None, restarts
    agent._worker_group, agent._life, agent._watch = group, -1, Watch(folder, PATIENCE)
    return agent, group


def failed(rank: int, exitcode: int = -9, message: str = "") -> RunResult:
    failures: Any = {rank: Failure(exitcode, message)}
    return RunResult(state=WorkerState.FAILED, failures=failures)


def test_ranks_that_hang_are_killed_once_and_said_why(
    start: Callable[[str], subprocess.Popen], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, _ = agent_of(tmp_path, 3, 1)
    ended, hangs = start(""), start("import time\ntime.sleep(100)")
    ended.wait()
    stands = {0: Stand("at a.py:1", True), 1: Stand("at a.py:2", False)}
    agent._end(Hung(frozenset({1, 2}), "did nothing", stands), {1: hangs.pid, 2: ended.pid})
    assert hangs.wait(60) == -signal.SIGKILL
    told = "\nrank 1, 2 did nothing; this is where the ranks stand:\nrank 0 at a.py:1\nrank 1 at a.py:2\n"
    assert capsys.readouterr().err == told
    assert agent.policy.hung == {1: "did nothing", 2: "did nothing"}


def test_a_rank_that_the_watch_killed_is_reported_as_that() -> None:
    failure: Any = Failure(-9)
    assert report(3, failure).endswith("died of signal 9 (SIGKILL); the system may have run out of memory\n")
    why = "gave no sign of life for 9 s"
    assert report(3, failure, why).endswith(f" {why} and was killed\n") and "rank 3 on " in report(3, failure)


def test_a_rank_that_dies_twice_before_its_first_step_loses_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, group = agent_of(tmp_path, 3, least=2)
    agent._decide(group, failed(1), took_a_step=False)
    agent._decide(group, failed(1), took_a_step=True)  # it works after all
    agent._decide(group, failed(1), took_a_step=False)
    agent._decide(group, failed(2), took_a_step=False)  # another one
    assert (agent._slots, agent._remaining_restarts) == ([0, 1, 2], 9)
    agent._decide(group, failed(2), took_a_step=False)
    assert (agent._slots, group.spec.local_world_size) == ([0, 1], 2)
    assert "with 2 ranks of this host, without local rank 2, which failed twice" in capsys.readouterr().err
    agent._decide(group, failed(0), took_a_step=False)
    assert agent._remaining_restarts == 9
    agent._decide(group, failed(0), took_a_step=False)
    assert agent._remaining_restarts == 0  # the job needs two ranks


def test_the_same_error_twice_before_the_first_step_ends_the_job(tmp_path: Path) -> None:
    agent, group = agent_of(tmp_path, 2, least=1)
    agent._decide(group, failed(0, 1, "KeyError: a"), took_a_step=False)
    agent._decide(group, failed(1, 1, "KeyError: b"), took_a_step=False)
    assert agent._remaining_restarts == 9
    agent._decide(group, failed(0, 1, "KeyError: b"), took_a_step=False)  # whichever rank meets it
    assert agent._remaining_restarts == 0


# --- the memory of snapshots ---------------------------------------------------------------------------


def test_the_memory_of_snapshots_is_for_this_user_and_this_job(
    start: Callable[[str], subprocess.Popen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = start("")
    ended.wait()
    prefix = f"monoflow-{socket.gethostname()}-"
    left = [
        f"{prefix}{ended.pid}",
        f"{prefix}{ended.pid}-ab_c1",
        f"{prefix}{os.getpid()}-x",
        f"{prefix}x",
        "other",
    ]
    for name in left:
        (tmp_path / name / "step-1").mkdir(parents=True)
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, "")
    with launched._snapshots(tmp_path):
        folder = Path(os.environ[SNAPSHOTS_VARIABLE])
        assert folder.parent == tmp_path and folder.name.startswith(f"{prefix}{os.getpid()}-")
        assert folder.name not in left and folder.stat().st_mode & 0o777 == 0o700
        (folder / "step-2").mkdir()
        assert {one.name for one in tmp_path.iterdir()} == {folder.name, *left[2:]}
    assert {one.name for one in tmp_path.iterdir()} == set(left[2:])
    with launched._snapshots(tmp_path / "none"):
        assert SNAPSHOTS_VARIABLE not in os.environ


def test_ranks_are_told_which_life_they_are_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after others joined, of which torch counts no restart."""
    agent, group = agent_of(tmp_path, 2, 1)
    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", lambda *args: None)
    group.spec.rdzv_handler, group.spec.virtual_local_rank = None, False
    lives = []
    for _ in range(2):
        agent._rendezvous(group)
        env: dict[str, Any] = {}
        agent._set_local_rank_env(env, 1, group.spec)
        lives.append((env[LIFE_VARIABLE], env["LOCAL_RANK"]))
    assert lives == [("0", "1"), ("1", "1")]


# --- how ranks are ended -------------------------------------------------------------------------------


def test_ranks_have_time_to_save_after_a_signal_and_little_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[tuple[signal.Signals | None, int]] = []
    asked: list[dict[int, int]] = []

    def stands(pids: dict[int, int], folder: Path) -> dict[int, Stand]:
        asked.append(pids)
        return {0: Stand("at a.py:1", True)}

    monkeypatch.setattr(
        PContext, "close", lambda self, death_sig, timeout: closed.append((death_sig, timeout))
    )
    monkeypatch.setattr(launched.watch, "stands", stands)
    well: Any = SimpleNamespace(pids=lambda: {0: 7})
    bad: Any = SimpleNamespace(pids=lambda: {0: 8})
    with launched._bounded_shutdown(tmp_path) as stood:
        for one in (signal.SIGTERM, signal.SIGINT):
            PContext.close(well, one, 30)
        assert (asked, stood) == ([], [])
        PContext.close(bad)
        assert (asked, stood) == ([{0: 8}], ["local rank 0 at a.py:1\n"])
        PContext.close(bad, signal.SIGTERM, 30)  # what the agent does with all its ranks then
    assert closed == [
        (signal.SIGTERM, INTERRUPT_GRACE),
        (signal.SIGINT, INTERRUPT_GRACE),
        (None, FAILURE_GRACE),
        (signal.SIGTERM, FAILURE_GRACE),
    ]
