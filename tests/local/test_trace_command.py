"""Timelines as files, `monoflow trace`, and `monoflow top` on what ranks left in a folder."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import monoflow as flow
from monoflow.cli import runs
from monoflow.cli.run import Job
from monoflow.cli.timeline import Timeline, join, merge, read, recorded, write, write_trace
from monoflow.cli.top import frame, last_step, read_job, top
from monoflow.cli.trace import summarize, trace
from monoflow.config import Settings
from monoflow.errors import FlowError
from monoflow.runtime.observe import About, Observer
from monoflow.runtime.program import Program
from monoflow.runtime.recorder import Fired, Recorder
from monoflow.runtime.ring import Part, Ring
from monoflow.runtime.signs import EVENTS, NAMES, SNAPSHOT
from monoflow.runtime.trace import SCRIPT, Event
from monoflow.runtime.wiring import ActorInfo, RegisterInfo, Wiring
from tests.conftest import RunCli


def wiring(rank: int) -> Wiring:
    """forward -> backward twice, on two ranks that then reduce the gradient."""
    return Wiring(
        "train",
        rank,
        2,
        (
            ActorInfo("mm", "forward", (0,), (1,), True),
            ActorInfo("mm_1", "backward", (1,), (2,), True),
            ActorInfo("add", "backward", (2,), (3,), True, order=0),
            ActorInfo("all_reduce:grad", "update", (3,), (4,), False, order=1, group=(0, 1)),
            ActorInfo("adamw", "update", (4,), (5,), False),
        ),
        (
            RegisterInfo("weight", 100, 1, False),
            RegisterInfo("activation", 10, 1, True),
            RegisterInfo("grad_t", 20, 1, True),
            RegisterInfo("grad", 30, 1, False),
            RegisterInfo("grad_all", 40, 1, False),
            RegisterInfo("new", 100, 1, False),
        ),
    )


def events(rank: int, step: int, shift: int = 0) -> list[Event]:
    """100 microseconds of a rank: 70 of compute, 20 of communication that nothing hides, an update."""
    rows = [
        ("mm", "compute", "compute", 0, 0, 10),
        ("mm_1", "compute", "compute", 0, 10, 33),
        ("add", "accumulate", "compute", 0, 33, 35),
        ("mm", "compute", "compute", 1, 35, 45),
        ("mm_1", "compute", "compute", 1, 45, 68),
        ("add", "accumulate", "compute", 1, 68, 70),
        ("all_reduce:grad", "boxing", "collectives on axis 0", 0, 70, 90),
        ("adamw", "optimizer", "compute", 0, 90, 100),
    ]
    begin = 10**9 + step * 200_000 + shift
    return [
        Event("train", rank, lane, kind, name, step, time, begin + 1000 * start, begin + 1000 * end, 8)
        for name, kind, lane, time, start, end in rows
    ]


def part(rank: int, shift: int = 0, **about: Any) -> Part:
    found = [*events(rank, 0, shift), *events(rank, 1, shift)]
    told = {"rank": rank, "host": "here", **about}
    return Part(told, (wiring(rank),), tuple(found), 3 * rank)


@pytest.fixture
def timeline() -> Timeline:
    return join([part(0), part(1, shift=1500)])


# --- the file ------------------------------------------------------------------------------------------


def as_perfetto_reads(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Checks what a viewer relies on; returns how many records there are of each phase."""
    counts: dict[str, int] = {}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    ends: dict[str, dict[int, tuple[int, int, float]]] = {"s": {}, "f": {}}
    counters: dict[tuple[int, str], float] = {}
    titled: set[tuple[str, int, int]] = set()
    for one in records:
        counts[one["ph"]] = counts.get(one["ph"], 0) + 1
        key = one["pid"], one.get("tid", 0)
        if one["ph"] == "M":
            titled.add((one["name"], *key))
            continue
        assert one["ts"] >= 0
        if one["ph"] == "X":
            assert one["dur"] >= 0
            slices.setdefault(key, []).append((one["ts"], one["ts"] + one["dur"]))
        elif one["ph"] in ends:
            assert one["id"] not in ends[one["ph"]], "an arrow has one start and one end"
            ends[one["ph"]][one["id"]] = (*key, one["ts"])
        else:
            assert one["ph"] == "C"
            (value,) = one["args"].values()
            assert value >= 0
            assert one["ts"] > counters.get((one["pid"], one["name"]), -1.0), "a counter goes forward in time"
            counters[one["pid"], one["name"]] = one["ts"]
    for lane in slices:
        assert ("thread_name", *lane) in titled and ("process_name", lane[0], 0) in titled
    assert ends["s"].keys() == ends["f"].keys(), "every arrow that starts ends"
    for number, (pid, tid, leaves) in ends["s"].items():
        other = ends["f"][number]
        assert leaves <= other[2]
        for lane, moment in (((pid, tid), leaves), (other[:2], other[2])):
            assert any(start <= moment <= end for start, end in slices[lane]), "an arrow is tied to a slice"
    return counts


def test_a_timeline_is_what_perfetto_reads(timeline: Timeline, tmp_path: Path) -> None:
    write(timeline, tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    counts = as_perfetto_reads(data["traceEvents"])
    # 5 messages of a step with a reader on each rank twice, and rank 0 waits for rank 1 in each step
    assert counts == {"M": 12, "X": 32, "s": 26, "f": 26, "C": counts["C"]}
    names = {one["name"] for one in data["traceEvents"] if one["ph"] == "C"}
    assert "forward -> backward (messages)" in names and "registers (bytes)" in names
    first = next(one for one in data["traceEvents"] if one["ph"] == "X")
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == ("mm", "compute", 0, 10)
    assert first["args"] == {"program": "train", "step": 0, "time": 0, "bytes": 8}
    late = [one for one in data["traceEvents"] if one["ph"] == "X" and one["pid"] == 1]
    assert min(one["ts"] for one in late) == 1.5


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_a_timeline_comes_back_as_it_was(timeline: Timeline, tmp_path: Path, name: str) -> None:
    write(timeline, tmp_path / name)
    assert read(tmp_path / name) == timeline
    if name.endswith("gz"):
        with gzip.open(tmp_path / name) as file:
            assert json.load(file)["displayTimeUnit"] == "ms"


def test_hosts_are_brought_to_one_clock(tmp_path: Path) -> None:
    far = part(1, shift=7_000_000, host="there", clock_offset=7_000_000, clock_error=300)
    joined = join([part(0, clock_offset=0, clock_error=0), far])
    assert joined.clock_error == 300
    assert {one.start for one in joined.events if one.rank == 1} == {
        one.start for one in joined.events if one.rank == 0
    }
    assert join([part(0), part(1, host="there")]).clock_error is None
    one, two = join([part(0, clock_error=0)]), join([far])
    assert merge([one, two]) == joined


# --- monoflow trace ------------------------------------------------------------------------------------


def shown(*paths: Path, as_json: bool = False) -> str:
    output = io.StringIO()
    assert trace(paths, as_json, None, Console(file=output, width=160)) == 0
    return output.getvalue()


def test_waits_of_the_script_are_no_steps(tmp_path: Path) -> None:
    """A job that ends before its first step is over leaves these alone."""
    waits = [one._replace(lane=SCRIPT, kind="source", name="flow.stream") for one in events(0, 0)]
    write(join([Part({"rank": 0}, (), tuple(waits), 0)]), tmp_path / "out.json")
    assert "1 ranks, 0 steps of " in shown(tmp_path / "out.json")
    assert json.loads(shown(tmp_path / "out.json", as_json=True))["num_steps"] == 0


def test_the_summary(timeline: Timeline, tmp_path: Path) -> None:
    write(timeline, tmp_path / "out.json")
    data = json.loads(shown(tmp_path / "out.json", as_json=True))
    assert data["num_steps"] == 2
    assert data["step_seconds"] == pytest.approx(101.5e-6)
    assert data["communication_seconds"] == data["exposed_communication_seconds"] == pytest.approx(77e-6)
    assert data["exposed_communication"] == 1.0
    assert data["bubble"] == pytest.approx((20 + 1.5) / 101.5)
    assert data["data_wait_seconds"] == 0
    assert data["ranks"]["1"]["seconds"] == pytest.approx(
        {"compute": 160e-6, "communication": 40e-6, "data": 0, "host": 0, "idle": 3e-6, "outside": 98.5e-6}
    )
    assert data["ranks"]["0"]["seconds_by_kind"] == pytest.approx(
        {"compute": 132e-6, "boxing": 40e-6, "accumulate": 8e-6, "optimizer": 20e-6}
    )
    assert data["ranks"]["0"]["peak_register_bytes"] == 100
    assert data["most_live"]["forward -> backward"] == {"messages": 1, "slots": 1}
    worst = data["starved"][0]
    assert (worst["actor"], worst["register"], worst["from"]) == ("adamw", "grad_all", "all_reduce:grad")
    assert worst["seconds"] == pytest.approx(40e-6)
    assert data["bottleneck"].startswith(
        "What the script does between the steps, such as fetching a batch, is the bottleneck (33%"
    )


def test_the_summary_for_people(timeline: Timeline, tmp_path: Path) -> None:
    write(timeline, tmp_path / "out.json")
    text = shown(tmp_path / "out.json")
    for said in (
        "2 ranks, 2 steps of 102 us (median), 32 firings",
        "3 earlier firings were not kept",
        "bubble: 21.2%",
        "exposed communication: 100.0% of 77 us",
        "all_reduce:grad",
        "What the script does between the steps, such as fetching a batch, is the bottleneck",
    ):
        assert said in text, text
    assert "hosts" not in text


def test_files_that_are_no_trace(tmp_path: Path, run_cli: RunCli) -> None:
    missing = run_cli("trace", "out.json", cwd=tmp_path)
    assert missing.returncode == 1
    assert missing.stderr == (
        "monoflow: no trace 'out.json'; write one with `monoflow run --trace out.json script.py`\n"
    )
    for content, said in [
        ('{"traceEvents": [', "is not a trace: Expecting value"),
        ("[]", "is not a trace of monoflow"),
        ('{"otherData": {"monoflow": {"format": 99}}}', "has format 99, this monoflow reads 1"),
        ('{"otherData": {"monoflow": {"format": 1}}}', "is damaged: KeyError 'traceEvents'"),
    ]:
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(FlowError, match=said):
            read(tmp_path / "bad.json")
    (tmp_path / "bad.json.gz").write_text("no")
    with pytest.raises(FlowError, match="is not a trace"):
        read(tmp_path / "bad.json.gz")
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(FlowError, match="is not a trace"):
        read(tmp_path / "bad.json")


def test_a_trace_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(FlowError, match=r"--trace no/out\.json: there is no folder no"):
        Job(1, str(script), (), (), Path("no/out.json"))
    with pytest.raises(FlowError, match="--trace-events 0: at least 1"):
        Job(1, str(script), (), (), tmp_path / "out.json", 0)
    write_trace(tmp_path, tmp_path / "out.json")
    assert capsys.readouterr().err == f"monoflow: no step ran, so {tmp_path}/out.json is not written\n"


def test_ranks_of_another_host_have_a_file_of_their_own(tmp_path: Path) -> None:
    watching, engine = Observer(tmp_path, Settings(rank=8, life=2, trace_events=10)), Engine()
    watching.attach(engine, About("train"), dict)
    engine.run()
    watching.close()
    assert [one.about["life"] for one in recorded(tmp_path)] == [2]
    write_trace(tmp_path, tmp_path / "out.json")
    assert read(tmp_path / "out.rank8.json").hosts == {8: socket.gethostname()}


def test_a_job_that_re_formed_leaves_its_last_life(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {0: 3, 1: 2, 2: 0}  # by life: it was interrupted before its last one's first step
    for life, rank in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1)):
        ring = Ring(tmp_path / f"rank{rank:05}-{life}", 100, {"rank": rank, "life": life, "host": "here"})
        for step in range(steps[life]):
            for one in events(rank, step):
                who = one.program, rank, one.lane, one.kind, one.name
                ring.add(who, step, one.time, one.start + life, one.end + life, 0)
    write_trace(tmp_path, tmp_path / "out.json")
    joined = read(tmp_path / "out.json")
    assert joined.hosts == {0: "here"}
    assert sorted(one.start for one in joined.events) == [
        one.start + 1 for step in (0, 1) for one in events(0, step)
    ]
    said = f"monoflow: the job re-formed; of its 2 lives, {tmp_path}/out.json has the last\n"
    assert capsys.readouterr().err.startswith(said)


# --- monoflow top --------------------------------------------------------------------------------------


class Engine:
    """Fires as a real one does: each step, all of `events`."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.num_steps = self.num_over = 0
        self.programs: Mapping[int, Program] = {}

    def running(self) -> list[tuple[int, str, str, int]]:
        return [(0, "compute", "bmm_7", 1)] if self.num_steps else []

    def run(self) -> None:
        for one in events(0, self.num_steps):
            recorder = self.recorder
            if recorder is not None:
                recorder.record(Fired(*one[2:5], one.rank, *one[5:]))
        self.num_steps += 1
        self.num_over += 1


def observer(folder: Path, trace_events: int = 0) -> Observer:
    return Observer(folder, Settings(trace_events=trace_events))


def ended_process() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_the_script_that_waits_for_batches_is_seen(tmp_path: Path) -> None:
    def slow(sample: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return sample

    watching, engine = observer(tmp_path / "job", trace_events=100), Engine()
    watching.attach(engine, About("train", 8, 64, 1000), dict)
    batches = flow.stream(torch.arange(6), 2, transform=slow)
    for _ in batches:
        engine.run()
    watching.publish()
    (rank,) = read_job(tmp_path / "job")
    assert 0 < rank.snapshot["waited"] <= 1
    assert all(one.program == "train" for one in rank.events)
    watching.close()
    for _ in batches:
        pass  # nobody is told any more
    parts = recorded(tmp_path / "job")
    waits = [one for one in parts[0].events if one.lane == "script"]
    assert [(one.kind, one.name, one.step) for one in waits] == [
        ("source", "flow.stream", number) for number in range(3)
    ]
    assert all(one.end - one.start >= 20e6 for one in waits)
    write(join(parts), tmp_path / "out.json")
    data = json.loads(shown(tmp_path / "out.json", as_json=True))
    assert data["num_steps"] == 3
    assert data["script_waited_for_batches_seconds"] >= 0.06
    assert data["data_wait_seconds"] > 0


def test_watching_records_a_step_a_snapshot(tmp_path: Path) -> None:
    watching, engine = observer(tmp_path / "job"), Engine()
    watching.attach(engine, About("train", 8, 64, 1000), lambda: {"data": 500 * engine.num_steps})
    for _ in range(50):
        engine.run()
    assert engine.recorder is None  # costs nothing until the next snapshot
    (part,) = recorded(tmp_path / "job")
    assert {one.step for one in part.events} == {0, 1, 2}
    watching.publish()
    for _ in range(50):
        engine.run()
    (part,) = recorded(tmp_path / "job")
    assert {one.step for one in part.events if one.step > 2} == {50, 51, 52}
    watching.publish()
    (rank,) = read_job(tmp_path / "job")
    (program,) = rank.snapshot["programs"]
    assert (program["name"], program["num_steps"]) == ("train", 100)
    assert program["tokens_per_second"] == pytest.approx(64 * program["steps_per_second"])
    assert program["samples_per_second"] == pytest.approx(8 * program["steps_per_second"])
    assert program["sent_per_second"]["data"] == pytest.approx(500 * program["steps_per_second"])
    assert program["predicted_bytes"] == 1000
    assert rank.snapshot["memory"] > 1e6
    engine.num_steps += 1  # one has begun
    assert watching.num_over == 100
    watching.close()
    assert not (tmp_path / "job").exists() and engine.recorder is None


def test_a_traced_engine_is_recorded_all_the_time(tmp_path: Path) -> None:
    watching, engine = observer(tmp_path, trace_events=100), Engine()
    watching.attach(engine, About("train"), dict)
    for _ in range(50):
        engine.run()
    watching.publish()
    (part,) = recorded(tmp_path)
    assert (len(part.events), part.num_dropped) == (100, 300)
    again = Engine()
    watching.attach(again, About("train"), dict)
    again.run()
    watching.close()
    (part,) = recorded(tmp_path)  # what a trace is made of stays
    assert [one.program for one in part.events][-1] == "train#2"
    assert not list(tmp_path.glob("*.json"))


def test_an_engine_that_is_gone_is_not_watched(tmp_path: Path) -> None:
    watching, engine = observer(tmp_path), Engine()
    watching.attach(engine, About("train"), dict)
    del engine
    watching.publish()
    assert read_job(tmp_path)[0].snapshot["programs"] == []
    watching.close()


def test_one_frame(tmp_path: Path) -> None:
    watching, engine = observer(tmp_path / "job"), Engine()
    watching.attach(engine, About("train", 8, 0, 10**9), lambda: {"data": 10**6 * engine.num_steps})
    for _ in range(3):
        engine.run()
    watching.publish()
    output = io.StringIO()
    assert top(tmp_path / "job", True, Console(file=output, width=160)) == 0
    text = output.getvalue()
    for said in (
        "1 of 1 ranks",
        "train",
        "samples/s",
        "1 GB",
        "all_reduce:grad",
        "collectives on axis 0",
        "bmm_7",
        "80%",
        "20%",
    ):
        assert said in text, text
    snapshot = read_job(tmp_path / "job")[0].snapshot
    quiet = io.StringIO()
    Console(file=quiet, width=160).print(frame(read_job(tmp_path / "job"), snapshot["at"] + 60))
    assert "silent for 60 s" in quiet.getvalue()
    watching.close()
    with pytest.raises(FlowError, match="no rank has told anything yet"):
        top(tmp_path / "job", True, Console(file=io.StringIO()))


def test_top_ends_with_the_job(tmp_path: Path) -> None:
    watching = observer(tmp_path)
    watching.publish()
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    watching.close()
    text = json.loads(left[f"{watching.path.name}{SNAPSHOT}"])
    tmp_path.mkdir()
    for name, content in left.items():  # as a killed process leaves them
        (tmp_path / name).write_bytes(content)
    (tmp_path / f"{watching.path.name}{SNAPSHOT}").write_text(json.dumps({**text, "pid": ended_process()}))
    for folder in (tmp_path, tmp_path / "gone"):
        output = io.StringIO()
        assert top(folder, False, Console(file=output)) == 0
        assert output.getvalue() == "the job has ended\n"


def test_a_rank_that_was_started_again_shows_once(tmp_path: Path) -> None:
    watching = observer(tmp_path)
    watching.publish()
    (snapshot,) = tmp_path.glob(f"*{SNAPSHOT}")
    text = json.loads(snapshot.read_text())
    for path in list(tmp_path.iterdir()):
        (tmp_path / f"rank00000-1{path.suffix}").write_bytes(path.read_bytes())
    (tmp_path / f"rank00000-1{SNAPSHOT}").write_text(json.dumps({**text, "pid": 1, "at": text["at"] - 5}))
    assert [one.snapshot["pid"] for one in read_job(tmp_path)] == [os.getpid()]
    watching.close()


def test_the_step_that_is_shown_is_whole() -> None:
    three, four, five = (events(0, step) for step in (3, 4, 5))
    assert last_step([*three, *four]) == tuple(four)
    assert last_step([*three[5:], *four, *five[:6]]) == tuple(four)  # three was recorded from its middle on
    assert last_step([*three, *four[5:], *five[:3]]) == tuple(three)
    assert last_step(four[:2]) == tuple(four[:2])
    other = [one._replace(program="evaluate", start=one.start + 10**9) for one in three[:2]]
    assert last_step([*three, *four, *other]) == tuple(other)
    wait = [one._replace(program="script", lane=SCRIPT, step=9) for one in five]
    assert last_step([*four, *wait]) == tuple(four)
    assert last_step([]) == ()


def test_jobs_are_found_by_process_or_folder(tmp_path: Path) -> None:
    env = {"MONOFLOW_CACHE": str(tmp_path)}
    with pytest.raises(FlowError, match=r"no job runs on this host \(running: none\)"):
        runs.find(None, env)
    own = runs.folder_of_job(env)
    assert own == tmp_path / "runs" / f"{socket.gethostname()}-{os.getpid()}"
    own.mkdir(parents=True)
    assert runs.find(None, env) == runs.find(str(os.getpid()), env) == runs.find(str(own), env) == own
    with pytest.raises(FlowError, match=rf"no job of process 1 .*running: {os.getpid()}"):
        runs.find("1", env)
    with pytest.raises(FlowError, match="no folder 'nowhere'"):
        runs.find("nowhere", env)
    assert runs.find(None, {**env, "MONOFLOW_RUN_DIR": "/x"}) == Path("/x")


def test_what_killed_jobs_left_is_removed(tmp_path: Path) -> None:
    env = {"MONOFLOW_CACHE": str(tmp_path)}
    gone = ended_process()
    left = tmp_path / "runs" / f"{socket.gethostname()}-{gone}"
    left.mkdir(parents=True)
    other = tmp_path / "runs" / f"another-host-{gone}"
    other.mkdir()
    for suffix in (EVENTS, NAMES, ".json"):
        (left / f"rank00000-1{suffix}").write_text("")
    runs.folder_of_job(env)
    assert not left.exists() and other.exists()


def test_summaries_of_nothing() -> None:
    empty = summarize(Timeline((), ()))
    assert (empty.num_steps, empty.bubble, empty.bottleneck) == (0, 0.0, "Nothing fired.")
