"""The report says what was found: a line an op, a line a reason, and the totals."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from tests.rules.core_aten import Coverage
from tests.rules.prove import Proof
from tests.rules.report import show, totals

PROOFS = {
    one.name: one
    for one in (
        Proof("aten.mm.default", 3, 30, 2, ["mm [P -> P] is wrong: 1 of 6"], Counter({"S(0), B -> S(0)": 2})),
        Proof(
            "aten.empty_like.default", 2, 8, 2, [], Counter({"B -> P(sum)": 2, "S(0) -> P(sum)": 2, "x": 1})
        ),
        Proof("aten.nothing.default"),
    )
}
COVERAGE = Coverage(("mm.default",), {"nonzero.default": "size depends on data"}, ("relu.default",))


def test_totals() -> None:
    assert totals(PROOFS, COVERAGE) == (
        "3 ops, 5 samples, 38 signatures proven, 1 wrong, 1 missing (2 more left out for a reason); "
        "core ATen: 1 of 2 that can have a rule"
    )


def test_the_whole_report() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        show(PROOFS, ["aten.pool.default"], COVERAGE, console)
    lines = capture.get().splitlines()

    def cells(word: str) -> list[str]:
        return [
            cell.strip() for cell in next(line for line in lines if word in line).strip()[1:-1].split("│")
        ]

    assert cells("aten.mm.default") == ["aten.mm.default", "3", "30", "1", "1", "0", ""]
    assert cells("aten.empty_like.default")[:6] == ["aten.empty_like.default", "2", "8", "0", "0", "2"]
    assert "NOT PROVEN" in cells("aten.nothing.default")[-1]
    assert cells("B -> P(sum)")[1:] == ["2", "B -> P(sum)", "the values mean nothing"]
    assert cells("nonzero.default") == ["nonzero.default", "size depends on data"]
    assert cells("relu.default")[-1] == "MISSING"
    assert any("not searched" in line and "aten.pool.default" in line for line in lines)
    assert any(line.startswith("WRONG mm [P -> P] is wrong") for line in lines)
    assert lines[-1] == totals(PROOFS, COVERAGE)
