"""The page of a plan: well-formed, escaped, true to its data; time as columns that lose no peak."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.tabulate import duration, size
from monoflow.viz import page, report
from monoflow.viz.svg import areas, bars, lanes, strip
from monoflow.viz.timescale import Timescale

from .test_plan import GRID, mlp_graph

VOID = {"meta", "rect", "line", "polygon", "circle"}


class Reader(HTMLParser):
    """Sees to it that tags are closed in order; collects table cells, charts' shapes and hover titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[tuple[str, str]] = []
        self.shapes: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.texts: list[str] = []
        self.feed(text.removeprefix("<!doctype html>"))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            self.shapes.append((tag, dict(attrs)))
            if tag != "rect":
                return
        if tag == "meta":
            return
        self.open.append(tag)
        if tag == "td":
            self.cells.append((dict(attrs).get("class") or "", ""))
        if tag in ("title", "text"):
            (self.titles if tag == "title" else self.texts).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shapes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            kind, text = self.cells[-1]
            self.cells[-1] = kind, text + data
        if self.open and self.open[-1] == "title":
            self.titles[-1] += data
        if self.open and self.open[-1] == "text":
            self.texts[-1] += data

    def points(self, kind: str) -> list[tuple[float, float]]:
        """The corners of the polygon of a class."""
        (found,) = [
            one["points"] or "" for tag, one in self.shapes if tag == "polygon" and one["class"] == kind
        ]
        return [(float(x), float(y)) for x, y in (point.split(",") for point in found.split())]


def cell(name: str, *axes: str) -> dict[str, Any]:
    return {"name": name, "meta": "float32[4, 4]", "axes": list(axes)}


def data(peak: int = 60, limit: int | None = 100) -> dict[str, Any]:
    return {
        "step": "train<step>",
        "plan": "zero",
        "mesh": {"outer": 2, "inner": 4},
        "device": "a & b",
        "limit_bytes": limit,
        "parameters": [
            {
                "pattern": "h.*.w", "count": 12, "meta": "float32[4, 4]", "axes": ["B", "S(1)"],
                "layout": "(B, S(1))", "state": "(S(0), S(1))", "num_bytes": 4096,
            }
        ],
        "modules": [
            {
                "module": "h.*", "count": 3, "parameter": cell("w", "B", "S(1,3)"),
                "activation": cell("m<m", "P(sum)", "S(0)"), "gradient": None,
            }
        ],
        "predicted": {
            "seconds": 2e-3,
            "seconds_by": {"forward": {"compute": 1e-3}, "backward": {"compute": 5e-4, "outer": 5e-4}},
            "peak_bytes": peak,
            "peak_item": "mm (backward)",
            "sent": {"outer": 1000, "inner": 3000},
            "collectives": {"all_gather": 2},
            "memory": {"categories": ["parameters", "activations"], "held": [[10, 0], [10, 50], [10, 20]]},
        },
        "timeline": [
            {"lane": "compute", "phase": "forward", "seconds": 1e-3, "name": "mm"},
            {"lane": "compute", "phase": "backward", "seconds": 5e-4, "name": "mm_1"},
            {"lane": "outer", "phase": "backward", "seconds": 5e-4, "name": "all_gather of w"},
        ],
        "compared": {
            "zero": {"seconds": 2e-3, "peak_bytes": peak},
            "data": {"seconds": 1e-3, "peak_bytes": 200},
        },
        "search": {"bound": 1.5e-3, "gap": 0.25},
        "unruled": {"my_op": 4096},
    }  # fmt: skip


# --- the page ------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_says_what_the_data_says() -> None:
    text = page(data())
    reader = Reader(text)
    assert "train&lt;step&gt;" in text and "a &amp; b" in text and "m&lt;m" in text
    cells = [(kind, said) for kind, said in reader.cells if "sbp" in kind]
    assert cells[:4] == [
        ("sbp b", "B"),
        ("sbp s1", "S(1,3)"),
        ("sbp p", "P(sum)"),
        ("sbp s0", "S(0)"),
    ]
    assert cells[4:] == [("sbp b", "B"), ("sbp s1", "S(1)")]  # of the parameters' own table
    assert ("n", "x 3") in reader.cells and ("", "h.*") in reader.cells
    assert ("", "(S(0), S(1))") in reader.cells and ("n", "4.1 kB") in reader.cells
    assert "2 ms" in text and "of 100 B" in text and "collectives: 2 all_gather" in text
    assert "none saves more than 25.0 % of this one&#x27;s time" in text and ("n", "0.50 x") in reader.cells
    assert ("", "does not fit") in reader.cells and "my_op" in text


def test_the_page_needs_nothing_else() -> None:
    text = page(data())
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_layers_are_columns_of_every_axis() -> None:
    rows = page(data()).split("<tr>")
    (row,) = [row for row in rows if "x 3" in row]
    assert row.count("class='sbp") == 4  # two kinds of two axes; there is no gradient
    assert row.count("class='gap'") == 3 and "title='w float32[4, 4]'" in row


def test_a_plan_over_its_limit_says_by_how_much() -> None:
    assert "50 B too much" in page(data(peak=150)) and "too much" not in page(data())


def test_no_limit_and_no_search_are_said() -> None:
    text = page({**data(limit=None), "search": None, "unruled": {}})
    Reader(text)
    assert "without a limit" in text and "does not fit" not in text and "a template: " in text
    assert "Ops without a rule" not in text


def test_a_far_limit_is_said_not_drawn() -> None:
    text = page(data(limit=10**9))
    assert "the limit, 1 GB, is far above" in text and "limit 1 GB" not in text
    assert "limit 80 B" in page(data(limit=80))


def test_a_step_of_nothing_is_a_page_too() -> None:
    empty = data()
    empty["timeline"], empty["predicted"]["memory"]["held"] = [], []
    assert Reader(page(empty)) and "nothing runs" in page(empty)


def test_a_plan_is_reported_to_a_file(tmp_path: Path) -> None:
    plan = plan_step(mlp_graph(), GRID, "data x tensor")
    report(plan, tmp_path / "plan.html", {"other": (1.0, 10**6)})
    text = (tmp_path / "plan.html").read_text()
    reader = Reader(text)
    assert [said for kind, said in reader.cells if kind.startswith("sbp")][:2] == ["B", "S(0)"]
    assert ("", "other") in reader.cells and "step: plan &#x27;data x tensor&#x27;" in text
    assert plan.predicted is not None and size(plan.predicted.peak_bytes) in text
    assert any(said.startswith("compute: ") for said in reader.titles)


def test_a_plan_that_was_read_back_is_predicted_for_its_report(tmp_path: Path) -> None:
    graph = mlp_graph()
    plan = plan_step(graph, GRID, "zero")
    plan.save(tmp_path / "plan.json")
    report(plan, tmp_path / "a.html")
    report(Plan.load(tmp_path / "plan.json", graph), tmp_path / "b.html")
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()


# --- charts --------------------------------------------------------------------------------------------


def test_areas_are_stacked_over_time_to_the_peak() -> None:
    scale = Timescale([2.0, 1.0, 1.0], num_columns=4)
    parts, names = ["kept", "made"], ["one", "two", "three"]
    reader = Reader(areas(scale, [[10, 0], [10, 50], [10, 20]], parts, names, None, size))
    tops = [y for _, y in reader.points("c1")[:8]]
    base = [y for _, y in reader.points("c0")[:8]]
    unit = 260 / (60 * 1.08)
    assert base == pytest.approx([260 - 10 * unit] * 8, abs=0.1)
    shown = [260 - total * unit for total in (10, 10, 60, 30)]  # the first item takes half of the time
    assert tops == pytest.approx([y for y in shown for _ in range(2)], abs=0.1)
    assert "peak 60 B at two" in reader.texts
    assert "two\n60 B\nkept: 10 B\nmade: 50 B" in reader.titles


def test_a_near_limit_is_drawn_where_it_is() -> None:
    reader = Reader(areas(Timescale([1.0]), [[60.0]], ["all"], ["op"], 80.0, size))
    (line,) = [one for tag, one in reader.shapes if tag == "line" and one["class"] == "over"]
    assert float(line["y1"] or "") == pytest.approx(260 * (1 - 1 / 1.08), abs=0.1)
    far = Reader(areas(Timescale([1.0]), [[60.0]], ["all"], ["op"], 91.0, size))
    assert not [one for tag, one in far.shapes if tag == "line" and one["class"] == "over"]


def test_lanes_are_as_full_as_they_are_busy() -> None:
    scale = Timescale([1.0, 1.0, 2.0], num_columns=2)
    busy = {"compute": [(0, 1.0), (2, 2.0)], "axis": [(1, 1.0)]}
    reader = Reader(lanes(scale, busy, ["a", "b", "c"], duration))
    full = [(34 - y) / 34 for _, y in reader.points("l0")[1:5]]
    assert full == pytest.approx([0.5, 0.5, 1.0, 1.0], abs=0.01)
    half = [(44 + 34 - y) / 34 for _, y in reader.points("l1")[1:5]]
    assert half == pytest.approx([0.5, 0.5, 0.0, 0.0], abs=0.01)
    assert reader.titles == ["compute: 50 % busy\na", "compute: 100 % busy\nc", "axis: 50 % busy\nb"]
    assert "3 s" in reader.texts and reader.texts[-1] == "4 s"


def test_phases_are_a_strip_of_what_most_time_goes_to() -> None:
    reader = Reader(strip(Timescale([1.0, 0.4, 0.6, 2.0], num_columns=4), [0, 0, 1, 1], ["f", "b"]))
    assert [one["class"] for tag, one in reader.shapes if tag == "rect"] == ["f0", "f1"]
    assert reader.titles == ["f", "b"]


def test_bars_are_as_long_as_their_parts() -> None:
    reader = Reader(bars({"a": [1.0, 3.0], "b": [2.0, 0.0]}, ["x", "y"], duration))
    widths = [float(attrs["width"] or "") for tag, attrs in reader.shapes if tag == "rect"]
    assert [w / widths[0] for w in widths] == pytest.approx([1, 3, 2, 0], rel=1e-2)
    assert reader.titles[1] == "y: 3 s" and "4 s" in reader.texts
    assert Reader(bars({"none": [0.0]}, ["x"], size)).shapes


# --- time ----------------------------------------------------------------------------------------------


def test_long_steps_keep_their_peak() -> None:
    amounts = [1.0] * 10_000
    amounts[7777] = 3.0
    scale = Timescale([1e-6] * 10_000)
    shown = scale.highest(amounts)
    assert len(shown) == scale.num_columns and shown.count(7777) == 1


@example([5e-324], 2)
@example([1e-322], 40)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.integers(1, 40))
def test_columns_hold_all_items_and_all_time(seconds: list[float], num_columns: int) -> None:
    scale = Timescale(seconds, num_columns)
    taken = scale.starts[-1]
    covered = set()
    for item in range(len(seconds)):
        columns = scale.columns(item)
        assert len(columns) >= 1 and columns[0] >= 0 and columns[-1] < num_columns
        covered |= set(columns)
        assert scale.highest([float(one == item) for one in range(len(seconds))])[columns[0]] == item
    assert covered == set(range(num_columns))
    if sum(seconds) > 0:
        share, longest = scale.busy(list(enumerate(seconds)))
        assert sum(share) * taken / num_columns == pytest.approx(taken, rel=1e-6)
        assert longest.keys() == set(range(num_columns))
    assert [start for _, start, _ in scale.runs([0] * len(seconds))] == [0]
