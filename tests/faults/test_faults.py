"""A slice of `make test-faults`: some faults to one job of two ranks; and a host that comes and goes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from monoflow.checkpoint import checkpoints

from .drive import check, endured, finish
from .faults import FAULTS, drawn
from .job import Job, Line, without_faults

STEPS = 100


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Line]:
    """The curve that nothing happens to."""
    return without_faults(tmp_path_factory.mktemp("expected"), "--steps", str(STEPS))


def test_a_job_endures_faults(expected: dict[int, Line], tmp_path: Path) -> None:
    by_name = {fault.name: fault for fault in FAULTS}
    faults = [by_name["kill a rank"], by_name["damaged newest checkpoint"]]
    outcomes, num_steps = endured(tmp_path / "job", 2, faults, 0, expected)
    assert [one.fault for one in outcomes] == [one.name for one in faults]
    damaged = outcomes[1]
    assert damaged.again <= damaged.at  # from what was saved before the newest
    assert num_steps > damaged.at


def test_a_host_joins_and_is_lost(expected: dict[int, Line], tmp_path: Path) -> None:
    """Two launchers stand for two hosts. What is in one's memory from before they met is not gone back to."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "hosts"]
    meeting += ["--local-addr", "localhost"]
    options = ("--pause", "0.2", "--steps", str(STEPS))

    def lives(job: Job) -> list[list[Line]]:
        """The lines of each life of the job."""
        lines = job.lines()
        return [
            [line for line in lines if line.pid == pid] for pid in dict.fromkeys(one.pid for one in lines)
        ]

    first = Job(tmp_path, 1, *options, meeting=meeting)
    try:
        first.wait(lambda: len(first.lines()) >= 3, "steps of one host")
        first.ask("hold")  # else it might be done before the other is there
        second = Job(tmp_path, 1, *options, meeting=meeting)
        try:
            first.wait(lambda: "hosts join" in first.errors.read_text(), "host that joins")
            (tmp_path / "hold").unlink()
            second.wait(lambda: len(lives(first)) == 2 and len(lives(first)[1]) >= 7, "steps of two hosts")
            kept = [number for folder in first.snapshots() for number, _ in checkpoints(folder)]
        finally:
            second.close()
        first.wait(
            lambda: len(lives(first)) == 3 and len(lives(first)[2]) >= 2, "steps of the host that is left"
        )
        finish(first)
    finally:
        first.close()
    alone, joined, left = lives(first)
    assert [{line.num_ranks for line in life} for life in (alone, joined, left)] == [{1}, {2}, {1}]
    check(first.lines(), expected, [])
    assert joined[0].step == alone[-1].step + 1  # a host that comes costs no step
    assert len(kept) == 1 and kept[0] <= alone[-1].step  # with another host there were no snapshots
    assert left[0].step % 5 == 1 and left[0].step > joined[0].step  # it went on from the newest on disk


def test_faults_are_drawn_from_a_seed() -> None:
    assert drawn(3, 30) == drawn(3, 30) != drawn(4, 30)
    assert {one.name for one in drawn(0, 7)} == {one.name for one in FAULTS}
