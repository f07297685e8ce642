"""A slice of `make test-faults`: three faults to one job of two ranks."""

from __future__ import annotations

from pathlib import Path

from .drive import endured
from .faults import FAULTS, drawn
from .job import without_faults


def test_a_job_endures_faults(tmp_path: Path) -> None:
    (tmp_path / "expected").mkdir()
    expected = without_faults(tmp_path / "expected", "--steps", "60")
    by_name = {fault.name: fault for fault in FAULTS}
    faults = [by_name["kill a rank"], by_name["damaged newest checkpoint"]]
    outcomes, num_steps = endured(tmp_path / "job", 2, faults, 0, expected)
    assert [one.fault for one in outcomes] == [one.name for one in faults]
    damaged = outcomes[1]
    assert damaged.again <= damaged.at  # from what was saved before the newest
    assert num_steps > damaged.at


def test_faults_are_drawn_from_a_seed() -> None:
    assert drawn(3, 30) == drawn(3, 30) != drawn(4, 30)
    assert {one.name for one in drawn(0, 7)} == {one.name for one in FAULTS}
