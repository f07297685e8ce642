"""`monoflow plan --html`: the page of a script's step, true to the data that is written beside it."""

from __future__ import annotations

import json
import re

import pytest

from monoflow.plan.tabulate import duration, size
from tests.conftest import ROOT, RunCli


@pytest.fixture(scope="module")
def written(run_cli: RunCli, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """The page and the data of the click model's step on a cluster."""
    folder = tmp_path_factory.mktemp("page")
    script = ROOT / "examples" / "recsys" / "train.py"
    done = run_cli(
        "plan", script, "--device", "h100", "--mesh", "2x4", "--memory", "80GB", "--plan", "zero x data",
        "--html", folder / "plan.html", "--json", folder / "plan.json", "--no-compare",
        "--", "--batch", "256",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (folder / "plan.html").read_text(), json.loads((folder / "plan.json").read_text())


def test_the_page_stands_alone(written: tuple[str, dict]) -> None:
    text, _ = written
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:", text)


def test_figures_are_those_of_the_data(written: tuple[str, dict]) -> None:
    text, data = written
    predicted = data["predicted"]
    assert f"<b>{duration(predicted['seconds'])}</b>" in text
    assert f"<b>{size(predicted['peak_bytes'])}</b>" in text
    assert f"peak {size(predicted['peak_bytes'])} at " in text
    assert "2 (axis0) x 4 (axis1) of NVIDIA H100 SXM 80 GB" in text
    total = sum(item["seconds"] for item in data["timeline"])
    assert total == pytest.approx(predicted["seconds"] + predicted["hidden"], rel=1e-6)
    assert len(data["timeline"]) == len(predicted["memory"]["held"])
    assert max(map(sum, predicted["memory"]["held"])) == predicted["peak_bytes"]


def test_every_module_is_a_row_with_its_layouts(written: tuple[str, dict]) -> None:
    text, data = written
    rows = text.split("<tr>")
    for module in data["modules"]:
        if module["module"]:
            before, _, last = module["module"].rpartition(".")
            label = f"{before}.</span>{last}</td>" if before else f"</span>{last}</td>"
            found = [row for row in rows if label in row]
            assert found, module
            kinds = ("parameter", "activation", "gradient")
            cells = [axis for kind in kinds if module[kind] for axis in module[kind]["axes"]]
            shown = (re.findall(r"class='sbp[^>]*>([^<]*)</td>", row) for row in found)
            assert cells in list(shown), module
    tables = [row for row in data["modules"] if row["module"] == "tables.*"]
    assert tables and sum(row["count"] for row in tables) > 1
