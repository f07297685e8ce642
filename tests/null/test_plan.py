"""Plans of small steps: optimal, saved and read back, refused where they do not fit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monoflow.boxing.route import axis_price
from monoflow.capture.subject import subject_of
from monoflow.capture.trace import capture
from monoflow.errors import LayoutError, PlanError
from monoflow.graph.passes import PASSES
from monoflow.graph.step_graph import StepGraph, source_of, tensor_args
from monoflow.graph.verify import verify
from monoflow.mesh import Placement, placement
from monoflow.plan.axis import AxisGoal, AxisProblem
from monoflow.plan.cost import DeviceCost, fraction, work
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.verify import verify_plan
from monoflow.sbp.layout import B, Partial, S, Sbp, Split
from monoflow.sbp.rules import RULES

TWO = placement("cpu", [0, 1])
FOUR = placement("cpu", [0, 1, 2, 3])
GRID = placement("cpu", [[0, 1], [2, 3]], axes=("outer", "inner"))


class Mlp(nn.Module):
    """Two layers with a nonlinearity between; `heads` splits the hidden dim by a view."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Fused(nn.Module):
    """One projection for three tensors of several heads, as in attention."""

    def __init__(self, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = self.qkv(x).chunk(3, -1)
        q, k, v = (one.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for one in split)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Tagger(nn.Module):
    """A look-up table and a classifier over the same vocabulary."""

    def __init__(self, vocabulary: int = 14, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def captured(model: nn.Module, step: Callable, *args: Any, optimizer: Any = None) -> StepGraph:
    things = [model] if optimizer is None else [model, optimizer]
    graph = capture(step, subject_of(things), args, {}, name="step", source="here").graph
    for name, one in PASSES.items():
        graph = verify(one(graph), name)
    return graph


def trained(model: nn.Module, *batch: torch.Tensor, loss: Callable = F.mse_loss) -> StepGraph:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = loss(model(x), y)
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        return result

    return captured(model, step, *batch, optimizer=optimizer)


def mlp_graph(rows: int = 6) -> StepGraph:
    return trained(Mlp(), torch.randn(rows, 8), torch.randn(rows, 8))


def moves(plan: Plan) -> list[str]:
    """The collectives of a plan, as the lowering will make them, by an independent walk over its edges."""
    found: set[tuple[str, int, str, str, str]] = set()
    pairs = zip(plan.graph.outputs, plan.graph.results, strict=True)
    observed = {node.name for one, node in pairs if one.observed}
    for node in plan.graph.calls():
        if node.name not in plan.signatures or node.name in observed:
            continue
        phase = str(node.meta["info"].phase)
        for argument, wanted in zip(tensor_args(node), plan.wanted(node), strict=True):
            source, index = source_of(argument)
            given = plan.layouts(source)[index]
            for axis, (a, b) in enumerate(zip(given, wanted, strict=True)):
                kind = collective(a, b)
                if kind:
                    key = phase if source.op == "placeholder" else ""
                    found.add((f"{source.name}.{index}", axis, str(b), kind, key))
    return sorted(kind for *_, kind, _ in found)


def collective(a: Sbp, b: Sbp) -> str:
    if a in (b, B):
        return ""
    if isinstance(a, Partial):
        return "all_reduce" if b == B else "reduce_scatter"
    return "all_gather" if b == B else "all_to_all"


def test_data_reduces_every_gradient_once_and_gathers_nothing() -> None:
    plan = plan_step(mlp_graph(), TWO, "data")
    assert plan.inputs["batch.0"] == (S(0),) and plan.inputs["up.weight"] == (B,)
    assert moves(plan) == ["all_reduce"] * 5  # four gradients and the loss
    assert plan.outputs["result"] == (B,)


def test_zero_stores_the_state_split_and_scatters_gradients() -> None:
    plan = plan_step(mlp_graph(), TWO, "zero")
    for name in ("up.weight", "up.weight:exp_avg", "up.bias", "down.weight:exp_avg_sq"):
        assert plan.inputs[name] == (S(0),), name
    assert plan.inputs["up.weight:step"] == (B,)
    kinds = moves(plan)
    assert kinds.count("reduce_scatter") == 4 and kinds.count("all_reduce") == 1  # the loss
    assert kinds.count("all_gather") == 5  # all four for forward, the one weight that backward needs again


def test_tensor_splits_columns_then_rows() -> None:
    plan = plan_step(mlp_graph(), TWO, "tensor")
    assert plan.inputs["up.weight"] == (S(0),) and plan.inputs["up.bias"] == (S(0),)
    assert plan.inputs["down.weight"] == (S(1),) and plan.inputs["down.bias"] == (B,)
    assert plan.inputs["down.weight:exp_avg"] == (S(1),)
    assert moves(plan) == ["all_reduce"]  # after the rows; nothing in backward reads the batch's gradient


def test_tensor_splits_a_fused_projection_by_blocks_and_heads() -> None:
    plan = plan_step(trained(Fused(), torch.randn(2, 5, 12), torch.randn(2, 5, 12)), TWO, "tensor")
    assert plan.inputs["qkv.weight"] == (S(0, 3),) and plan.inputs["qkv.bias"] == (S(0, 3),)
    assert plan.inputs["out.weight"] == (S(1),)
    assert moves(plan) == ["all_reduce"]


def test_heads_that_do_not_divide_are_not_split() -> None:
    plan = plan_step(trained(Fused(12, 3), torch.randn(2, 5, 12), torch.randn(2, 5, 12)), TWO, "tensor")
    bmms = [node for node in plan.graph.calls() if "bmm" in str(node.target)]
    assert bmms
    for node in bmms:
        for layout in (*plan.wanted(node), *plan.layouts(node)):
            for one in layout:
                assert not isinstance(one, Split) or one.blocks == 1, (node, layout)


def test_tensor_splits_the_vocabulary_of_table_and_loss() -> None:
    graph = trained(Tagger(), torch.randint(0, 14, (6,)), torch.randint(0, 14, (6,)), loss=F.cross_entropy)
    plan = plan_step(graph, TWO, "tensor")
    assert plan.inputs["table.weight"] == (S(0),) and plan.inputs["head.weight"] == (S(0),)
    assert "all_gather" not in moves(plan)
    assert not any("log_softmax" in str(node.target) for node in plan.graph.calls()), "expanded into sums"


def test_product_of_templates_gives_each_axis_its_own() -> None:
    plan = plan_step(mlp_graph(8), GRID, "data x tensor")
    assert plan.inputs["batch.0"] == (S(0), B)
    assert plan.inputs["up.weight"] == (B, S(0)) and plan.inputs["down.weight"] == (B, S(1))
    plan = plan_step(mlp_graph(8), GRID, "zero x tensor")
    assert plan.inputs["up.weight"] == (S(1), S(0)), "the state takes the dim that the tensor axis leaves"
    assert plan.inputs["down.weight"] == (S(0), S(1))


def test_one_name_stands_for_every_axis() -> None:
    plan = plan_step(mlp_graph(8), GRID, "data")
    assert plan.inputs["batch.0"] == (S(0), S(0))


def test_one_rank_moves_nothing() -> None:
    plan = plan_step(mlp_graph(), placement("cpu", [0]), "tensor")
    assert moves(plan) == [] or all(size == 1 for size in plan.placement.shape)


@pytest.mark.parametrize("size", [2, 3])
def test_axis_is_the_best_of_all_choices(size: int) -> None:
    """On a graph small enough to enumerate: every combination of signatures, priced by hand."""
    model = Mlp(4, 6)
    graph = captured(model, lambda x: model(x), torch.randn(5, 4))
    goal = AxisGoal(size, {"batch.0": S(0), "up.weight": S(0)}, keep_splits=False)
    device = DeviceCost()
    problem = AxisProblem(graph, goal, RULES, device)
    found = problem.solve()
    options = problem.options
    nodes = options.nodes
    assert all(len(users) == 1 for value, users in problem.uses.items() if value[0] in nodes), "a chain"

    def price(value: Any, a: Sbp, b: Sbp) -> float:
        if isinstance(a, Split) and isinstance(b, Partial):
            return float("inf")
        meta = options.metas[value]
        assert meta is not None
        return axis_price(a, b, meta, size, device.link)

    def cost(chosen: dict) -> float:
        total = 0.0
        for node in nodes:
            total += work(node, device) * fraction(chosen[node], size)
            for value, wanted in zip(options.sources[node], chosen[node].inputs, strict=True):
                source, index = value
                if source.op == "placeholder":
                    name = options.names[source]
                    given = goal.stored.get(name, B)
                else:
                    given = chosen[source].outputs[index]
                if value in problem.as_used and given not in (B, wanted):
                    total += 1e3
                total += price(value, given, wanted)
        last = problem.graph.results[0]
        given = chosen[last].outputs[0]
        return total + (price((last, 0), given, B) if isinstance(given, Partial) else 0.0)

    choices = itertools.product(*(options.of[node] for node in nodes))
    best = min(cost(dict(zip(nodes, one, strict=True))) for one in choices)
    assert abs(cost(dict(found.signatures)) - best) < 1e-9
    assert found.exact


def test_pins_are_kept_and_the_rest_follows() -> None:
    plan = plan_step(mlp_graph(), TWO, "data", {"*.weight": (S(1),), "result": (B,)})
    assert plan.inputs["up.weight"] == (S(1),) and plan.inputs["up.weight:exp_avg"] == (S(1),)
    assert plan.inputs["up.bias"] == (B,)


@pytest.mark.parametrize(
    ("pattern", "layout", "facts"),
    [
        ("nothing.*", S(0), ("nothing.*", "matches no parameter", "up.weight")),
        ("up.weight", S(2), ("up.weight", "dim 2", "(16, 8)")),
        ("up.weight", S(0, 3), ("up.weight", "16 elements", "multiple of 6")),
        ("up.weight", Partial(), ("up.weight", "P(sum)")),
        ("result", Partial(), ("result", "handed out as P(sum)")),
    ],
)
def test_pins_that_do_not_fit_are_refused(pattern: str, layout: Sbp, facts: tuple[str, ...]) -> None:
    with pytest.raises(LayoutError) as caught:
        plan_step(mlp_graph(), TWO, "data", {pattern: (layout,)})
    for fact in facts:
        assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("name", "where", "facts"),
    [
        ("fast", TWO, ("'fast'", "data, zero, tensor")),
        ("data x tensor", TWO, ("2 axes", "has 1")),
        ("data x zero x tensor", GRID, ("3 axes", "has 2")),
    ],
)
def test_unknown_plans_are_refused(name: str, where: Placement, facts: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        plan_step(mlp_graph(), where, name)
    for fact in facts:
        assert fact in str(caught.value)


def test_plan_is_saved_and_read_back(tmp_path: Path) -> None:
    graph = mlp_graph()
    plan = plan_step(graph, FOUR, "tensor")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", plan.graph)
    assert again.text() == plan.text()
    assert json.loads((tmp_path / "plan.json").read_text())["placement"]["ranks"] == [0, 1, 2, 3]


def test_plan_of_another_graph_is_refused(tmp_path: Path) -> None:
    plan_step(mlp_graph(), TWO, "data").save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="made for graph"):
        Plan.load(tmp_path / "plan.json", mlp_graph(rows=10))
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(PlanError, match="not a saved plan"):
        Plan.load(tmp_path / "other.json", mlp_graph())


def test_same_plan_every_time() -> None:
    first, second = (plan_step(mlp_graph(), TWO, "tensor").text() for _ in range(2))
    assert first == second


def test_text_names_storage_and_signatures() -> None:
    text = plan_step(mlp_graph(), TWO, "tensor").text()
    assert "param up.weight float32[16, 8]: S(0)" in text
    assert "return result: B" in text


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda p: replace(p, inputs={**p.inputs, "up.weight": (S(5),)}), "S\\(5\\) does not fit"),
        (lambda p: replace(p, inputs={**p.inputs, "up.bias": (S(0, 3),)}), "S\\(0,3\\) does not fit"),
        (lambda p: replace(p, inputs={**p.inputs, "up.bias": (B, B)}), "on a mesh of \\(2,\\)"),
        (lambda p: replace(p, inputs={}), "inputs are not the graph's"),
        (lambda p: replace(p, outputs={**p.outputs, "up.bias:next": (S(0),)}), "its next value S\\(0\\)"),
        (lambda p: replace(p, outputs={**p.outputs, "result": (Partial(),)}), "handed out as P"),
        (lambda p: replace(p, signatures={**p.signatures, "addmm": ()}), "has 0 signatures"),
    ],
)
def test_verifier_notices(broken: Callable[[Plan], Plan], message: str) -> None:
    plan = plan_step(mlp_graph(), TWO, "data")
    with pytest.raises(AssertionError, match=message):
        verify_plan(broken(plan))
