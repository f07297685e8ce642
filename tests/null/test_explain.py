"""Plans that explain themselves: prices hold against an independent sum, and everything is found by name."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from monoflow.boxing.route import LinkCost
from monoflow.errors import PlanError
from monoflow.graph.step_graph import StepGraph
from monoflow.mesh import placement
from monoflow.plan.around import Around, once
from monoflow.plan.cost import Device, Machine
from monoflow.plan.explain import Choice, explain
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.search import Space
from monoflow.sbp.layout import S
from monoflow.sbp.rules import RULES

from .test_plan import GRID, mlp_graph, trained

CUDA = placement("cuda", [0, 1, 2, 3])


class Block(nn.Module):
    """One layer of two weights, so that it is folded with others like it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Layers alike, but that the first one's input needs no gradient."""

    def __init__(self, num_layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def tower() -> StepGraph:
    return trained(Tower(), torch.randn(8, 16), torch.randn(8, 16))


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Slow at work against its links, so that even small steps are worth splitting."""
    return Machine(Device("slow", {"float32": 1e9}, 1e9, 0.0, 1 << 40), (LinkCost(1e-7, 1e-10),))


@pytest.fixture(scope="module")
def best(tower: StepGraph, machine: Machine) -> Plan:
    return plan_step(tower, CUDA, "auto", machine=machine)


def by_name(choices: tuple[Choice, ...]) -> dict[str, Choice]:
    return {one.name: one for one in choices}


def cheapest(around: Around, number: int, position: int) -> float:
    """The whole step's price when one variable is set: hubs tried one by one, the rest as the plan has it."""
    tables = around.problem.tables()
    fixed = {**around.chosen, number: position}
    total = sum(float(tables.unary[one][at]) for one, at in fixed.items())
    total += sum(float(table[fixed[a], fixed[b]]) for a, b, table in tables.pairs if {a, b} <= fixed.keys())
    for hub in around.problem.hubs:
        ways = []
        for layout in range(len(hub.layouts)):
            price = float(tables.unary[hub.number][layout])
            for a, b, table in tables.pairs:
                if a == hub.number:
                    price += float(table[layout, fixed[b]])
                elif b == hub.number:
                    price += float(table[fixed[a], layout])
            ways.append(price)
        total += min(ways)
    return total


# --- prices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "zero", "tensor"])
def test_a_choice_costs_what_the_whole_step_costs_more(name: str, machine: Machine) -> None:
    """The difference of two options is that of two whole sums, every hub chosen anew."""
    around = Around(plan_step(mlp_graph(rows=8), CUDA, name, machine=machine), RULES)
    compared = 0
    for node, number in around.problem.variable.items():
        if node.op != "placeholder" and node not in around.problem.needed:
            continue
        prices, at = around.prices(node), around.position(node)
        assert np.isfinite(prices[at]), node
        now = cheapest(around, number, at)
        for other in np.flatnonzero(np.isfinite(prices))[:4]:
            more = cheapest(around, number, int(other)) - now
            assert prices[other] - prices[at] == pytest.approx(more, abs=1e-12), (node, other)
            compared += int(other) != at
    assert compared > 40


def test_no_single_change_betters_the_search(best: Plan) -> None:
    assert any("S(" in axis for one in best.explain("*").choices for axis in one.chosen.axes)
    for one in best.explain("*").choices:
        if one.runner_up is not None:
            assert one.runner_up.seconds >= one.chosen.seconds - 1e-12, one


def test_a_template_may_have_cheaper_runners_up(tower: StepGraph, machine: Machine) -> None:
    """With plenty of memory, state that is split has a price and nothing in return."""
    found = plan_step(tower, CUDA, "zero", machine=machine).explain("layers.1.up.weight")
    (weight,) = found.choices
    assert weight.chosen.axes == ("S(0)",) and weight.runner_up is not None
    assert weight.runner_up.axes == ("B",) and weight.runner_up.seconds < weight.chosen.seconds
    assert "-" in found.text().splitlines()[-1]


def test_the_tables_are_those_of_the_search(tower: StepGraph, machine: Machine, best: Plan) -> None:
    space = Space(tower, best.rewrites, CUDA, machine, {}, RULES)
    around = Around(best, RULES)
    assert around.problem.folding.num_classes == space.problem.folding.num_classes
    choices = [0] * len(around.problem.unary)
    for number, at in around.chosen.items():
        choices[number] = at
    for hub in around.problem.hubs:
        edges = [(a, b, t) for a, b, t in around.problem.tables().pairs if hub.number in (a, b)]
        ways = [
            sum(float(t[at, choices[b]] if a == hub.number else t[choices[a], at]) for a, b, t in edges)
            for at in range(len(hub.layouts))
        ]
        choices[hub.number] = int(np.argmin(ways))
    assert around.problem.tables().cost(choices) == pytest.approx(space.fastest.cost, rel=1e-6)


def test_work_and_moves_make_the_price(tower: StepGraph, machine: Machine) -> None:
    """Under "data" a layer's first product reads nothing that is moved."""
    plan = plan_step(tower, CUDA, "data", machine=machine)
    ops = [one for one in plan.explain("layers.0.up").choices if one.op == "addmm"]
    (product,) = ops
    assert product.moved == () and product.chosen.seconds == pytest.approx(product.chosen.work, abs=1e-11)
    assert product.chosen.axes == ("B, S(0), B -> S(0)",)
    split = plan_step(tower, CUDA, "zero", machine=machine).explain("layers.0.up")
    (product,) = [one for one in split.choices if one.op == "addmm"]
    gathered = {one.tensor: one for one in product.moved}
    weight = [one for one in by_name(split.choices).values() if one.op == "t" and one.phase == "forward"]
    moved = [*gathered.values(), *weight[0].moved]
    gather = next(one for one in moved if one.tensor == "layers.0.up.weight")
    assert (gather.source, gather.target) == ("S(0)", "B")
    # Three quarters of 64 x 16 floats come from the other three ranks.
    sent = 3 * 64 * 16 * 4 // 4
    assert gather.seconds == pytest.approx(machine.links[0].seconds("all_gather", sent), rel=1e-6)


# --- what is said --------------------------------------------------------------------------------------


def test_layers_that_were_decided_together_say_so(best: Plan) -> None:
    found = best.explain("layers.2")
    assert {one.copies for one in found.choices} == {3}
    assert {one.copies for one in best.explain("layers.0").choices} == {1}
    assert found.text().splitlines()[0].startswith("layers.2 in plan 'auto', as in 3 layers: ")
    names = [one.name for one in found.choices if not one.phase]
    assert names == [f"layers.2.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")]
    assert {one.phase for one in found.choices} == {"", "forward", "backward", "update"}


def test_layers_that_a_plan_treats_otherwise_stand_apart(best: Plan) -> None:
    """A plan need not come from a search; what it stores otherwise was not decided with the others."""
    (weight,) = best.explain("layers.2.up.weight").choices
    other = (S(1),) if weight.chosen.axes == ("S(0)",) else (S(0),)
    apart = replace(best, inputs={**best.inputs, "layers.2.up.weight": other})
    copies = {i: apart.explain(f"layers.{i}.up.weight").choices[0].copies for i in (1, 2, 3)}
    assert copies == {1: 2, 2: 1, 3: 2}
    assert apart.explain("layers.2.up.weight").choices[0].chosen.axes == (str(other[0]),)
    assert apart.explain("layers.3.up.bias").choices[0].copies == 3


def test_it_says_where_code_is_and_what_memory_is_held(tower: StepGraph, machine: Machine) -> None:
    plan = plan_step(tower, CUDA, "data", machine=machine)
    found = [one for one in plan.explain("layers.1").choices if one.phase == "forward"]
    tanh = next(one for one in found if one.op == "tanh")
    assert tanh.source.startswith("null/test_explain.py:") and tanh.module == "layers.1"
    assert (tanh.held, tanh.until) == (2 * 64 * 4, "backward")  # a quarter of eight rows, kept for backward
    total = next(one for one in found if one.op == "add.Tensor")
    assert (total.held, total.until) == (2 * 16 * 4, "backward")  # the next layer's weights need it
    view = next(one for one in plan.explain("layers.1").choices if one.op == "t")
    assert view.held == 0
    weight = plan.explain("layers.1.up.weight").choices[0]
    assert (weight.held, weight.until, weight.meta) == (64 * 16 * 4, "the end", "float32[64, 16]")


class Cut(nn.Module):
    """What a layer makes is cut in two, and backward needs the pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.up(x).chunk(2, -1)
        return left * right


def test_views_hold_nothing_and_keep_what_they_view() -> None:
    graph = trained(Cut(), torch.randn(8, 16), torch.randn(8, 16))
    choices = plan_step(graph, CUDA, "data").explain("*").choices
    cut = next(one for one in choices if one.op.startswith("split"))
    assert cut.held == 0 and cut.meta == "float32[8, 16], float32[8, 16]"
    product = next(one for one in choices if one.op == "addmm")
    assert (product.held, product.until) == (2 * 32 * 4, "backward")


def test_what_is_computed_again_is_marked(tower: StepGraph, machine: Machine) -> None:
    free = plan_step(tower, CUDA, "data", machine=machine)
    names = tuple(one.name for one in free.explain("layers.*").choices if one.op == "tanh" and one.phase)
    space = Space(tower, (), CUDA, machine, {}, RULES)
    plan = space.candidate(space.problem.choice(space.fastest.choices), "again", frozenset(names)).plan
    assert len(list(plan.graph.calls())) > len(list(once(plan.graph).calls()))
    found = by_name(plan.explain("layers.*").choices)
    assert {name for name, one in found.items() if one.again} == set(names)
    assert "forward tanh again" in plan.explain("layers.1").text()
    plain = by_name(best_of(space).explain("layers.*").choices)
    assert found.keys() == plain.keys()  # nothing is listed twice
    assert found[names[0]].chosen == plain[names[0]].chosen
    assert (plain[names[0]].until, found[names[0]].until) == ("backward", "forward")  # not kept any more


class Normed(nn.Module):
    """A norm, of which backward alone reads some outputs, and an op that backward alone needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sigmoid(self.norm(x)))


def test_what_only_backward_reads_is_told_where_it_is_computed_again(machine: Machine) -> None:
    graph = trained(Normed(), torch.randn(8, 16), torch.randn(8, 16))
    space = Space(graph, (), CUDA, machine, {}, RULES)
    choice = space.problem.choice(space.fastest.choices)
    kept = space.candidate(choice, "kept").plan
    wanted = ("norm", "sigmoid", "t.default")
    forward = {one.name for one in kept.explain("*").choices if one.phase == "forward"}
    names = [node.name for node in graph.calls() if any(one in str(node.target) for one in wanted)]
    plan = space.candidate(choice, "again", frozenset(names) & forward).plan
    found = plan.explain("*").choices
    again = {one.op for one in found if one.again}
    assert {"native_layer_norm", "sigmoid"} <= again
    assert len(found) == len(kept.explain("*").choices)
    # Each op once: what differs is where it is computed, not how.
    assert plan.diff(kept).run == () and plan.diff(kept).again != ()


def best_of(space: Space) -> Plan:
    return space.candidate(space.problem.choice(space.fastest.choices), "plain").plan


def test_a_mesh_of_two_axes_names_both() -> None:
    plan = plan_step(mlp_graph(rows=8), GRID, "data x tensor")
    found = plan.explain("up")
    weight = by_name(found.choices)["up.weight"]
    assert weight.chosen.axes == ("B", "S(0)")
    header = found.text().splitlines()[1].split()
    assert header[:2] == ["outer", "inner"]
    assert all(len(one.chosen.axes) == 2 for one in found.choices)


def test_columns_are_aligned_and_data_is_json(best: Plan) -> None:
    found = best.explain("layers.0")
    lines = [line for line in found.text().splitlines()[1:] if not line.startswith("    moves")]
    start = lines[0].index("runner-up")
    assert all(len(line) <= start or line[start - 1] == " " for line in lines)
    data = json.loads(json.dumps(found.as_data()))
    assert data["pattern"] == "layers.0" and data["axes"] == list(CUDA.axes)
    assert [one["name"] for one in data["choices"]] == [one.name for one in found.choices]
    assert data["choices"][0]["chosen"]["axes"] == list(found.choices[0].chosen.axes)


def test_an_op_without_a_rule_is_marked(machine: Machine) -> None:
    rules = {op: rule for op, rule in RULES.items() if op is not torch.ops.aten.tanh.default}
    plan = plan_step(mlp_graph(rows=8), CUDA, "data", machine=machine, rules=rules)
    found = explain(Around(plan, rules), "*")
    (tanh,) = [one for one in found.choices if one.op == "tanh"]
    assert not tanh.has_rule and (tanh.num_options, tanh.runner_up) == (1, None)
    assert tanh.chosen.axes == ("B -> B",) and "forward tanh (no rule)" in found.text()
    assert all(one.has_rule for one in found.choices if one.op != "tanh")


def test_one_rank_has_nothing_to_choose(machine: Machine) -> None:
    found = plan_step(mlp_graph(), placement("cuda", [0]), "auto", machine=machine).explain("up")
    assert found.choices and all(one.moved == () for one in found.choices)
    for one in found.choices:
        assert one.chosen.seconds == pytest.approx(one.chosen.work, abs=1e-11)


# --- names ---------------------------------------------------------------------------------------------


def test_modules_inputs_nodes_and_patterns_are_found(best: Plan) -> None:
    def names(pattern: str) -> list[str]:
        return [one.name for one in best.explain(pattern).choices]

    assert names("layers.1.up.weight") == ["layers.1.up.weight"]
    assert names("layers.1.up.weight:exp_avg") == ["layers.1.up.weight:exp_avg"]
    assert set(names("layers.1.up")) < set(names("layers.1")) < set(names("layers"))
    assert names("1.up") == names("layers.1.up")  # wherever it lies in the model
    node = next(one.name for one in best.explain("layers.1").choices if one.op == "tanh")
    assert names(node) == names(f"%{node}") == [node]
    every = [names(f"layers.{i}.up") for i in range(4)]
    assert sorted(names("layers.*.up")) == sorted(itertools.chain(*every))
    assert not any(":" in name for name in names("layers.1"))  # state by its own name only


def test_unknown_names_list_near_ones(best: Plan) -> None:
    with pytest.raises(
        PlanError, match=r"nothing in step is called 'layers.7.up'.* near it are .*layers.0.up"
    ):
        best.explain("layers.7.up")
    with pytest.raises(PlanError, match=r"no module, input or node\. The plan's text"):
        best.explain("zzzzzzzzzzzz")


def test_one_plan_looks_its_tables_up_once(best: Plan) -> None:
    around = Around(best, RULES)
    assert explain(around, "layers.0").choices == best.explain("layers.0").choices
