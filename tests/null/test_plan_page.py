"""The page of a plan: well-formed, escaped, and true to its data."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from monoflow.viz.plan_page import duration, page, size
from monoflow.viz.svg import area, bars

VOID = {"meta", "rect", "line", "polygon"}


class Reader(HTMLParser):
    """Sees to it that tags are closed in order; collects table cells, and the shapes of charts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[tuple[str, str]] = []
        self.shapes: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            self.shapes.append((tag, dict(attrs)))
            return
        self.open.append(tag)
        if tag == "td":
            self.cells.append((dict(attrs).get("class") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            kind, text = self.cells[-1]
            self.cells[-1] = kind, text + data


def data(peak: int = 60, limit: int = 100) -> dict[str, Any]:
    return {
        "step": "train<step>",
        "plan": "zero",
        "mesh": {"outer": 2, "inner": 4},
        "device": "a & b",
        "limit_bytes": limit,
        "parameters": [{"pattern": "h.*.w", "count": 12, "meta": "float32[4, 4]", "axes": ["B", "S(1)"]}],
        "layers": [
            {"module": "h.*", "op": "mm", "meta": "float32[4]", "axes": ["P(sum)", "S(0)"], "count": 3}
        ],
        "predicted": {
            "seconds": 2e-3,
            "seconds_by": {"forward": {"compute": 1e-3}, "backward": {"compute": 5e-4, "outer": 5e-4}},
            "peak_bytes": peak,
            "peak_item": "mm (forward)",
            "sent": {"outer": 1000, "inner": 3000},
            "collectives": {"all_gather": 2},
            "memory": {"categories": ["parameters", "activations"], "held": [[10, 0], [10, 50], [10, 20]]},
        },
        "compared": {
            "zero": {"seconds": 2e-3, "peak_bytes": peak},
            "data": {"seconds": 1e-3, "peak_bytes": 200},
        },
        "unruled": {"my_op": 4096},
    }


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text.removeprefix("<!doctype html>"))
    assert reader.open == []
    return reader


def test_the_page_is_well_formed_and_says_what_the_data_says() -> None:
    text = page(data())
    reader = read(text)
    assert "train&lt;step&gt;" in text and "a &amp; b" in text and "<script" not in text
    cells = reader.cells
    assert [cell for cell in cells if cell[0].split(" ")[0] in ("b", "s", "p")] == [
        ("b", "B"),
        ("s s1", "S(1)"),
        ("p", "P(sum)"),
        ("s", "S(0)"),
    ]
    assert ("n", "12") in cells and ("", "h.*.w") in cells and ("n", "4.1 kB") in cells
    assert ("", "60 B of 100 B") in cells and ("", "does not fit") in cells and ("", "2 all_gather") in cells


def test_a_plan_over_its_limit_says_by_how_much() -> None:
    assert ("", "150 B of 100 B 50 B too much") in read(page(data(peak=150))).cells


def test_areas_are_stacked_to_the_peak() -> None:
    reader = read(area([[10, 0], [10, 50], [10, 20]], limit=1e9, label=size))
    polygons = [attrs["points"] or "" for tag, attrs in reader.shapes if tag == "polygon"]
    assert len(polygons) == 2
    heights = [float(point.split(",")[1]) for point in polygons[1].split()[:3]]
    assert heights == pytest.approx([260 * 50 / 60, 0.0, 260 * 30 / 60], abs=0.1)
    assert sum(tag == "line" for tag, _ in reader.shapes) == 1  # the limit is far above


def test_a_near_limit_is_drawn() -> None:
    reader = read(area([[60]], limit=80, label=size))
    lines = [float(attrs["y1"] or "") for tag, attrs in reader.shapes if tag == "line"]
    assert lines == pytest.approx([260 * 0.25, 0.0], abs=0.1)


def test_long_schedules_keep_their_peak() -> None:
    rows = [[1.0]] * 10_000
    rows[7777] = [3.0]
    reader = read(area(rows, limit=1e9, label=size))
    (points,) = [attrs["points"] or "" for tag, attrs in reader.shapes if tag == "polygon"]
    assert len(points.split()) < 1000 and min(float(p.split(",")[1]) for p in points.split()) == 0.0


def test_bars_are_as_long_as_their_parts() -> None:
    reader = read(bars({"a": [1.0, 3.0], "b": [2.0]}, label=duration))
    widths = [float(attrs["width"] or "") for tag, attrs in reader.shapes if tag == "rect"]
    assert [w / widths[0] for w in widths] == pytest.approx([1, 3, 2], rel=1e-2)
    assert read(bars({"none": [0.0]}, label=size)).shapes


def test_figures_for_people() -> None:
    assert [size(x) for x in (0, 999, 1500, 2.5e6, 8e10, 3e12)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "80 GB", "3 TB",
    ]  # fmt: skip
    assert [duration(x) for x in (1.5, 2e-3, 3e-6)] == ["1.5 s", "2 ms", "3 us"]
