"""Plans as files: what was saved comes back whole; what is damaged or not exact does not come back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monoflow.boxing.curve import Curve
from monoflow.boxing.route import LinkCost
from monoflow.errors import PlanError
from monoflow.graph.step_graph import StepGraph
from monoflow.mesh import Placement, placement
from monoflow.plan.cost import Device, Machine
from monoflow.plan.devices import machine_for
from monoflow.plan.exact import require_exact
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.predict import predict
from monoflow.plan.schedule import schedule
from monoflow.sbp.layout import B, Partial, S
from monoflow.sbp.rules import RULES
from monoflow.sbp.signature import Signature

from .test_plan import FOUR, GRID, TWO, Fused, Mlp, captured, mlp_graph, trained


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return mlp_graph(rows=8)


def changed(plan: Plan, path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A file of the plan with a change to its data."""
    data = json.loads(plan.dumps())
    change(data)
    path.write_text(json.dumps(data))
    return path


# --- what comes back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [TWO, placement("cpu", [0, 1, 2]), GRID], ids=str)
@pytest.mark.parametrize("name", ["auto", "zero", "tensor"])
def test_what_was_saved_comes_back(name: str, where: Placement, graph: StepGraph, tmp_path: Path) -> None:
    machine = machine_for(where, "h100")
    plan = plan_step(graph, where, name, machine=machine)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json", graph)
    assert (read.text(), read.dumps()) == (plan.text(), plan.dumps())
    assert (read.machine, read.search, read.placement) == (plan.machine, plan.search, where)
    assert predict(read, machine) == plan.predicted
    assert plan.diff(read).is_equal


def test_a_measured_machine_comes_back(graph: StepGraph) -> None:
    curves = {"product/float32": Curve(((1.0, 1e-5), (1e9, 0.02))), "stream": Curve(((64.0, 1e-6),))}
    link = LinkCost(1e-4, 1e-9, 2e-5, (("all_gather", Curve(((8.0, 1e-4), (1e6, 0.1 / 3)))),))
    machine = Machine(
        Device("measured", {"float32": 1e9 / 3}, 1e9, 1e-5, 1 << 30, curves), (link, LinkCost())
    )
    read = Plan.parse(plan_step(graph, GRID, "zero", machine=machine).dumps(), graph, "a text")
    assert read.machine == machine
    assert read.links is not None and read.links[0].seconds("all_gather", 10**6) == 0.1 / 3
    assert schedule(read).items


def test_fused_projections_come_back_by_blocks(tmp_path: Path) -> None:
    graph = trained(Fused(24, 4), torch.randn(2, 3, 24), torch.randn(2, 3, 24))
    for name in ("tensor", "tensor x data", "zero x tensor"):
        plan = plan_step(graph, GRID if " x " in name else FOUR, name)
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json", graph).text() == plan.text()


# --- another step --------------------------------------------------------------------------------------


def test_a_plan_is_for_its_model_batch_and_optimizer(graph: StepGraph, tmp_path: Path) -> None:
    plan_step(graph, TWO, "data").save(tmp_path / "plan.json")
    model = Mlp()
    updates = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss

    others = {
        "model": trained(Mlp(hidden=24), torch.randn(8, 8), torch.randn(8, 8)),
        "batch": mlp_graph(rows=10),
        "optimizer": captured(model, step, torch.randn(8, 8), torch.randn(8, 8), optimizer=updates),
    }
    for other in others.values():
        with pytest.raises(
            PlanError, match=r"plan\.json was made for graph \w{16}, this step is \w{16}; model"
        ):
            Plan.load(tmp_path / "plan.json", other)
    assert Plan.load(tmp_path / "plan.json", mlp_graph(rows=8)).name == "data"  # captured anew: the same step


# --- damage --------------------------------------------------------------------------------------------

DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another version": (lambda data: data.update(format=99), "has format 99, this version reads"),
    "a part missing": (lambda data: data.pop("inputs"), "is damaged: KeyError 'inputs'"),
    "no such layout": (lambda data: data["inputs"].update(x=[["Q"]]), "is damaged: KeyError 'Q'"),
    "a node missing": (lambda data: data["signatures"].pop("addmm"), "has 0 signatures on a mesh of"),
    "an axis missing": (lambda data: data["signatures"].update(addmm=[]), "has 0 signatures on a mesh of"),
    "an input missing": (
        lambda data: data["inputs"].pop("up.weight"),
        "the plan's inputs are not the graph's",
    ),
    "an output missing": (lambda data: data["outputs"].pop("result"), "the plan's outputs are not"),
    "an unknown rewrite": (lambda data: data["rewrites"].append(["melt", []]), "by 'melt', which this"),
    "a split of no dim": (lambda data: data["inputs"].update({"up.bias": [["S", 3, 1, 1]]}), "does not fit"),
    "another storage": (
        lambda data: data["inputs"].update({"up.bias": [["S", 0, 1, 1]]}),
        "up.bias is stored S(0), its next value B",
    ),
    "fewer ranks": (lambda data: data["placement"].update(ranks=[0]), "is damaged"),
    "a rank twice": (lambda data: data["placement"].update(ranks=[1, 1]), "a rank appears twice"),
    "short of an input": (
        lambda data: data["signatures"].update(addmm=[[[["B"], ["B"]], [["B"]]]]),
        "is damaged: ",
    ),
    "an input too many": (
        lambda data: data["signatures"].update(addmm=[[[["B"]] * 4, [["B"]]]]),
        "which no rule of this version calls exact",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(damage: str, graph: StepGraph, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    path = changed(plan_step(graph, TWO, "data"), tmp_path / "plan.json", change)
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        Plan.load(path, graph)
    assert str(path) in str(caught.value)


def test_files_that_are_no_plans(graph: StepGraph, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    whole = plan_step(graph, TWO, "data").dumps()
    for content in (whole[: len(whole) // 2].encode(), b"[]", b"{}", b"", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(PlanError, match=r"plan\.json is not a saved plan"):
            Plan.load(path, graph)
    with pytest.raises(PlanError, match=r"no plan can be read from .*nowhere\.json \(No such file"):
        Plan.load(tmp_path / "nowhere.json", graph)


# --- exactness -----------------------------------------------------------------------------------------


def test_a_signature_that_is_not_exact_is_refused(graph: StepGraph, tmp_path: Path) -> None:
    """It fits every shape, and would be a wrong number."""
    plan = plan_step(graph, TWO, "data")
    name = next(name for name, axes in plan.signatures.items() if axes == (Signature((S(0),), (Partial(),)),))

    def edit(data: dict[str, Any]) -> None:
        data["signatures"][name] = [[[["S", 0, 1, 1]], [["B"]]]]

    path = changed(plan, tmp_path / "plan.json", edit)
    with pytest.raises(
        PlanError, match=rf"plan\.json runs %{name} = aten\.\S+ along axis axis0 as S\(0\) -> B, which"
    ):
        Plan.load(path, graph)


def with_signature(plan: Plan, name: str, *axes: Signature) -> Plan:
    return replace(plan, signatures={**plan.signatures, name: axes})


def test_every_axis_is_judged_as_the_outer_ones_cut_it() -> None:
    """A product contracted along both axes: even extents nest, others do not."""
    contracted = Signature((S(1), S(0)), (Partial(),))
    for width, fits in ((8, True), (6, False)):
        weight = torch.randn(width, 4)
        graph = captured(torch.nn.Module(), lambda x, w=weight: (x @ w).sum(), torch.randn(4, width))
        plan = plan_step(graph, GRID, "data")
        (name,) = [node.name for node in graph.calls() if "mm" in node.name]
        both = with_signature(plan, name, contracted, contracted)
        assert require_exact(with_signature(plan, name, contracted, replicated(2)), RULES, "x")
        if fits:
            assert require_exact(both, RULES, "x") is both
        else:
            with pytest.raises(PlanError, match=rf"x runs %{name} = .* along axis inner as S\(1\), S\(0\)"):
                require_exact(both, RULES, "x")


def replicated(num_inputs: int) -> Signature:
    return Signature((B,) * num_inputs, (B,))


def test_an_op_without_a_rule_may_only_run_whole(graph: StepGraph) -> None:
    plan = plan_step(graph, TWO, "data")
    name = next(node.name for node in graph.calls() if "tanh.default" in str(node.target))
    rules = {op: rule for op, rule in RULES.items() if op is not torch.ops.aten.tanh.default}
    with pytest.raises(
        PlanError, match=rf"%{name} = aten\.tanh\.default along axis axis0 as S\(0\) -> S\(0\)"
    ):
        require_exact(plan, rules, "x")
    whole = plan_step(graph, TWO, "data", rules=rules)
    assert require_exact(whole, rules, "x") is whole


@torch.library.custom_op("saved_plan_tests::bend", mutates_args=())
def bend(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * x


@bend.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_a_trial_found_is_tried_again_when_it_is_read(tmp_path: Path) -> None:
    """Rules of users' operators are no less part of a plan than ours."""
    graph = captured(torch.nn.Module(), lambda x: bend(x).sum(), torch.randn(8, 3))
    plan = plan_step(graph, TWO, "data")
    (name,) = [node.name for node in graph.calls() if "bend" in str(node.target)]
    assert plan.signatures[name] == (Signature((S(0),), (S(0),)),)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", graph).text() == plan.text()
    (choice,) = plan.explain(name).choices
    assert choice.chosen.axes == ("S(0) -> S(0)",) and choice.num_options > 1
    with pytest.raises(PlanError, match=rf"%{name} = saved_plan_tests\.bend\.default along axis axis0"):
        Plan.load(tmp_path / "plan.json", graph, RULES)  # our table alone has never heard of it
