"""What plans do differently: by pattern with counts, figures side by side; plans of other steps refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from monoflow.errors import PlanError
from monoflow.graph.step_graph import StepGraph
from monoflow.plan.cost import REFERENCE
from monoflow.plan.diff import Change
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.search import Space
from monoflow.plan.tabulate import aligned, brief, duration, pattern_of, size
from monoflow.sbp.rules import RULES

from .test_plan import FOUR, GRID, TWO, Mlp, mlp_graph, trained


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    return trained(model, torch.randn(6, 8), torch.randn(6, 8))


@pytest.fixture(scope="module")
def data(graph: StepGraph) -> Plan:
    return plan_step(graph, TWO, "data")


@pytest.fixture(scope="module")
def zero(graph: StepGraph) -> Plan:
    return plan_step(graph, TWO, "zero")


def test_storage_is_counted_by_pattern(data: Plan, zero: Plan) -> None:
    found = data.diff(zero)
    stored = {(one.name, one.what): one for one in found.stored}
    assert stored["*.up.weight", "param float32[16, 8]"] == Change(
        "*.up.weight", "param float32[16, 8]", 3, "B", "S(0)"
    )
    assert stored["*.up.weight:exp_avg", "state float32[16, 8]"].count == 3
    assert not any(name.startswith("batch") for name, _ in stored)  # cut alike
    changed = [name for name in data.inputs if data.inputs[name] != zero.inputs[name]]
    assert sum(one.count for one in found.stored) == len(changed)
    assert not found.is_equal


def test_signatures_are_those_that_differ(data: Plan, zero: Plan) -> None:
    found = data.diff(zero)
    differ = [name for name in data.signatures if data.signatures[name] != zero.signatures.get(name)]
    only = zero.signatures.keys() - data.signatures.keys()
    assert sum(one.count for one in found.run) == len(differ) + len(only) > 0
    updates = [one for one in found.run if one.what.startswith("update _fused_adamw")]
    assert sum(one.count for one in updates) == 12
    assert all("S(0) x4, B, B -> S(0) x4" in one.theirs for one in updates)


def test_figures_stand_side_by_side(data: Plan, zero: Plan) -> None:
    assert data.predicted is not None and zero.predicted is not None
    found = {one.name: one for one in data.diff(zero).figures}
    seconds, peak = found["a step"], found["memory at its peak"]
    assert (seconds.ours, seconds.theirs) == (data.predicted.seconds, zero.predicted.seconds)
    assert (peak.ours, peak.theirs) == (data.predicted.peak_bytes, zero.predicted.peak_bytes)
    sent = found["sent along axis0"]
    assert (sent.ours, sent.theirs) == (data.predicted.sent["axis0"], zero.predicted.sent["axis0"])
    gathered = found["all_gather"]
    assert gathered.ours is None and gathered.theirs == zero.predicted.collectives["all_gather"]


def test_what_one_plan_computes_again_is_listed(graph: StepGraph) -> None:
    space = Space(graph, (), TWO, REFERENCE, {}, RULES)
    choice = space.problem.choice(space.fastest.choices)
    names = frozenset(node.name for node in graph.calls() if "tanh.default" in str(node.target))
    kept = space.candidate(choice, "kept").plan
    again = space.candidate(choice, "again", names).plan
    found = kept.diff(again)
    assert (found.stored, found.run) == ((), ())
    assert found.again == (Change("*", "recompute tanh float32[6, 16]", 3, "kept", "again"),)
    assert again.diff(kept).again[0].ours == "again"
    assert not found.is_equal and "computed again otherwise: 3" in found.text()


def test_equal_plans_say_so(graph: StepGraph, data: Plan, tmp_path: Path) -> None:
    found = data.diff(data)
    assert found.is_equal and "they are equal" in found.text()
    data.save(tmp_path / "plan.json")
    read = data.diff(Plan.load(tmp_path / "plan.json", graph))
    assert read.is_equal and {one.theirs for one in read.figures} == {None}  # a file holds no prediction


def test_other_ranks_are_not_equal(graph: StepGraph, data: Plan) -> None:
    found = data.diff(plan_step(graph, FOUR, "data"))
    assert (found.stored, found.run, found.is_equal) == ((), (), False)
    assert "ranks [0, 1, 2, 3]" in found.text() and "they are equal" not in found.text()
    grid = data.diff(plan_step(graph, GRID, "data"))
    assert {"(B, B)"} == {one.theirs for one in grid.stored if one.what.startswith("param")}
    assert {one.name for one in grid.figures} >= {"sent along axis0", "sent along outer", "sent along inner"}


def test_plans_of_other_steps_are_refused(data: Plan) -> None:
    with pytest.raises(
        PlanError, match=r"different graphs, \w+ and \w+: input 0\.up\.weight is .* and absent"
    ):
        data.diff(plan_step(mlp_graph(), TWO, "data"))
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    longer = trained(model, torch.randn(8, 8), torch.randn(8, 8))
    with pytest.raises(PlanError, match=r"input batch\.0 is float32\[6, 8\] and float32\[8, 8\]"):
        data.diff(plan_step(longer, TWO, "data"))


def test_text_and_data_say_the_same(data: Plan, zero: Plan) -> None:
    found = data.diff(zero)
    text = found.text()
    assert text.startswith("plans of step: 'data' (ours) and 'zero' (theirs)")
    row = next(line for line in text.splitlines() if "  *.up.weight  " in line)
    assert row.split() == ["*.up.weight", "param", "float32[16,", "8]", "x", "3", "B", "S(0)"]
    assert f"stored otherwise: {sum(one.count for one in found.stored)}" in text
    read = json.loads(json.dumps(found.as_data()))
    assert read["is_equal"] is False and len(read["run"]) == len(found.run)
    assert read["stored"][0]["count"] == found.stored[0].count


def test_a_long_list_is_cut_in_the_text_alone(data: Plan, zero: Plan) -> None:
    found = data.diff(zero)
    many = tuple(Change(f"m{i}", "op", 2, "B", "S(0)") for i in range(100))
    long = replace(found, run=many)
    assert "and 120 more (as_data has all)" in long.text() and "m40" not in long.text()
    assert len(long.as_data()["run"]) == 100


# --- plain text ----------------------------------------------------------------------------------------


def test_names_and_signatures_are_shortened() -> None:
    assert pattern_of("layers.3.mlp.0.weight") == "layers.*.mlp.*.weight"
    assert pattern_of("conv1.weight") == "conv1.weight" and pattern_of("") == ""
    assert brief("B, B, B, S(0,3) -> S(0), S(0)") == "B x3, S(0,3) -> S(0), S(0)"
    assert brief("S(0,3), S(0,3), S(0,3) -> P(sum)") == "S(0,3) x3 -> P(sum)"
    assert brief(" -> B") == " -> B" and brief("S(1)") == "S(1)"


def test_columns_are_as_wide_as_their_widest() -> None:
    rows = [("a", "", "1"), "as it is", ("long", "", "200")]
    assert aligned(rows, right=(2,)) == ["a       1", "as it is", "long  200"]


def test_figures_for_people() -> None:
    assert [size(x) for x in (0, 999, 1500, 2.5e6, 8e10, 3e12)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "80 GB", "3 TB",
    ]  # fmt: skip
    assert [duration(x) for x in (1.5, 2e-3, 3e-6, 1e-12)] == ["1.5 s", "2 ms", "3 us", "0 us"]
