"""What benches say of what they measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def standings(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("standings")


def entry(standings: Any, plan: str, *seconds: float, like: str = "", model: str = "GPT", n: int = 2) -> Any:
    return standings.Entry(
        model, n, plan, like or plan, (n,), 0.0125, {"compute": 0.0125}, 3, 1_500_000, seconds, seconds, 1.0
    )


def test_auto_is_judged_by_medians_against_the_fastest_template(standings: Any) -> None:
    contest = [
        entry(standings, "data", 3.0, 3.0, 3.0),
        entry(standings, "tensor", 2.0, 4.0, 1.0),
        entry(standings, "auto", 2.1, 2.0, 9.0),
    ]
    assert standings.fastest_template(contest).plan == "tensor"
    assert standings.ratio(contest) == pytest.approx(1.05)
    assert standings.spread(contest) == pytest.approx((0.775, 5.025))  # of 1.05, 0.5 and 9
    assert standings.is_met(contest)
    assert not standings.is_met([*contest[:2], entry(standings, "auto", 2.11, 2.0, 9.0)])


def test_an_equal_plan_is_met_and_said(standings: Any) -> None:
    slow = entry(standings, "auto", 9.0, like="tensor")
    contest = [entry(standings, "data", 3.0), entry(standings, "tensor", 2.0), slow]
    assert standings.is_met(contest)
    assert standings.cells(slow, contest)[1] == "auto (= tensor)"
    contest[2] = entry(standings, "auto", 9.0, like="data")  # not the fastest one
    assert not standings.is_met(contest)


def test_every_model_and_number_of_ranks_is_a_contest(standings: Any) -> None:
    entries = [
        entry(standings, plan, seconds, model=model, n=n)
        for n in (2, 4)
        for model in ("GPT", "DLRM")
        for plan, seconds in (("data", 0.2), ("auto", 0.1))
    ]
    contests = standings.grouped(entries)
    assert [(one[0].model, one[0].num_ranks, len(one)) for one in contests] == [
        ("GPT", 2, 2), ("DLRM", 2, 2), ("GPT", 4, 2), ("DLRM", 4, 2),
    ]  # fmt: skip
    rows = [
        line.split(" | ") for line in standings.markdown(entries).splitlines() if line.startswith("| GPT")
    ]
    assert [row[2:8] for row in rows[:2]] == [
        ["2", "12.5", "200.0", "200.0", "3", "1.50"],
        ["2", "12.5", "100.0", "100.0", "3", "1.50"],
    ]
    assert rows[0][-1].strip(" |") == "best" and rows[1][-1].strip(" |") == "0.500 (0.50 - 0.50)"
    assert standings.table(entries).row_count == 8


def test_entries_come_back_from_json(standings: Any) -> None:
    made = entry(standings, "data", 1.0, 2.0)
    data = {**vars(made), "grid": [2], "seconds": [1.0, 2.0], "cpu_seconds": [1.0, 2.0]}
    assert standings.Entry.of(data) == made
