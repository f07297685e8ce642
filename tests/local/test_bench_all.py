"""bench/all.py: short benches, one table; the benches themselves are run by hand."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest
import typer

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("all")


def test_a_bench_is_run_and_its_figures_are_in_one_table(
    every: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runtime = next(one for one in every.BENCHES if one.name == "runtime")
    short = runtime._replace(command=("runtime.py", "--length", "4", "--repeats", "1"))
    monkeypatch.setattr(every, "BENCHES", (short,))
    out = tmp_path / "runs" / "table.md"
    with pytest.raises(typer.Exit) as done:
        every.main(out=out, only="", minutes=5.0)
    assert done.value.exit_code == 0
    rows = [line.split("|")[1:-1] for line in out.read_text().splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[2:]] == [
        "runtime beside the work, %", "us a message in one thread", "us a message in thread to thread",
    ]  # fmt: skip
    assert all(float(row[2]) > -50 for row in rows[2:])
    assert rows[2][3].strip() == "<= 1" and rows[3][3].strip() == ""
    assert out.read_text() in capsys.readouterr().out


def test_what_fails_takes_too_long_or_prints_nothing_is_told(every: Any, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    (tmp_path / "mute.py").write_text("print('nothing')")
    every.HERE, here = tmp_path, every.HERE
    try:
        now = time.monotonic()
        found = [
            every.run(every.Bench((f"{name}.py",), (every.Told("ratio", r"(?P<value>\d+)", 1.0),)), now + 5)
            for name in ("fails", "mute", "sleeps")
        ]
    finally:
        every.HERE = here
    assert [[(one.what, one.value) for one in own] for own in found] == [
        [("ended with 3", None)], [("ratio: not printed", None)], [("not in time", None)],
    ]  # fmt: skip


def test_figures_are_found_in_what_benches_print(every: Any) -> None:
    told = {one.name: one.told for one in every.BENCHES}
    (following,), (auto,) = told["following"], told["auto"]
    (one,) = following.find("zero: 20.1 ms one after the other, 15.0 ms, ratio 0.75\n")
    assert (one.what, one.value, one.is_met) == ("zero: steps that follow / one by one", 0.75, True)
    row = "\u2502 wide MLP \u2502 auto (= tensor) \u2502 2 \u2502 1.9 \u2502 1.153 (0.75 - 1.35) \u2502\n"
    lines = "\u2502 GPT \u2502 zero \u2502 2 \u2502 8 \u2502 \u2502\n" + row
    (one,) = auto.find(lines)
    assert (one.what, one.value, one.is_met) == ("wide MLP, auto / fastest template", 1.153, False)


def test_step_figures_are_ratios_to_the_fastest_peer(every: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = importlib.import_module("step")
    taken = {"eager": [2.0, 4.0], "torch.compile all": [1.0, 2.0], "monoflow op by op": [0.1, 0.1]}
    (one,) = step.step_figures("gpt", {**taken, "monoflow": [0.9, 1.8]})
    assert one.what == "gpt, step / torch.compile all" and one.value == pytest.approx(0.9) and one.is_met
    cold, warm = step.start_figures(
        "gpt12", {"torch.compile all": [[30.0, 40.0], [9.0, 10.0]], "monoflow": [[15.0, 20.0], [5.0, 6.0]]}
    )
    assert (cold.value, cold.is_met, warm.value, warm.is_met) == (0.5, False, 0.15, False)
