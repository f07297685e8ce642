"""Time as an axis: signatures along it, what is refused and why, where items of a schedule stand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import monoflow as flow
from monoflow.errors import PlanError
from monoflow.graph.step_graph import Phase, Role, StepGraph, info_of, is_getitem
from monoflow.lower.lower import lower
from monoflow.plan.facts import facts_of
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.schedule import Box, Op, schedule
from monoflow.plan.verify import complete
from monoflow.plan.when import When, arriving, when_of
from monoflow.runtime.program import TIME, Rate
from monoflow.sbp.layout import B, P, S
from monoflow.sbp.signature import Signature

ONE, TWO = [0], [0, 1]
Loss = Callable[[nn.Module, Tensor], Tensor]


class Mlp(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 10), nn.Dropout(0.5), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.up(x))))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def captured(loss: Loss = mean_square, rows: int = 8, model: nn.Module | None = None) -> StepGraph:
    """A step of SGD."""
    torch.manual_seed(0)
    model = Mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: Tensor) -> Tensor:
        value = loss(model, x)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step.capture(torch.randn(rows, 6))


def planned(graph: StepGraph, num: int, grid: list = ONE, name: str = "data") -> Plan:
    return plan_step(graph, flow.placement("cpu", grid), name, micro_batches=num)


def in_time(plan: Plan) -> dict[str, str]:
    """By node name: its signature along time."""
    return {name: str(axes[-1]) for name, axes in plan.signatures.items()}


# --- the walk ------------------------------------------------------------------------------------------


def test_the_batch_is_split_parameters_are_whole_and_gradients_are_sums() -> None:
    plan = planned(captured(), 2)
    assert plan.mesh == (1, 2) and plan.axes == ("axis0", "time") and plan.micro_batches == 2
    graph, found = plan.graph, in_time(plan)
    by_op: dict[str, list[str]] = {}
    for node in graph.calls():
        if not is_getitem(node):
            by_op.setdefault(str(node.target), []).append(found[node.name])
    assert by_op["aten.addmm.default"] == ["B, S(0), B -> S(0)", "B, S(0), B -> S(0)"]
    assert by_op["aten.tanh.default"] == ["S(0) -> S(0)"]
    mm = Counter(by_op["aten.mm.default"])  # two gradients of weights, one of an activation
    assert mm == {"S(1), S(0) -> P(sum)": 2, "S(0), B -> S(0)": 1}
    for one in graph.inputs:
        assert plan.layouts(graph.placeholders[one.name])[0][-1] == B
    updates = [node for node in graph.calls() if "_fused" in str(node.target) and not is_getitem(node)]
    assert updates and all(set(plan.signatures[node.name][-1].inputs) == {B} for node in updates)


def test_a_mask_of_dropout_is_drawn_for_a_micro_batch_only() -> None:
    plan = planned(captured(), 4)
    drawn = [node for node in plan.graph.calls() if "monoflow" in str(node.target)]
    assert drawn
    assert all(plan.signatures[node.name][-1].outputs == (S(0),) for node in drawn)


def test_rows_that_devices_cut_in_the_middle_are_the_same_rows_in_time() -> None:
    """S(0) of half a batch is S(0, 2) of all of it: devices exchange what they hold in one micro-batch."""
    mesh = (2, 3)
    assert arriving(S(0), (S(0), B), (B, B), mesh) == S(0, 2)
    assert arriving(S(0, 2), (B, B), (S(0), B), mesh) == S(0)
    assert arriving(S(0, 6), (B, B), (B, S(0)), mesh) == S(0, 2)
    assert arriving(S(0), (B, B), (S(0), B), mesh) is None
    assert arriving(S(1), (S(0), B), (B, B), mesh) == S(1)
    assert arriving(P, (S(0), B), (B, B), mesh) == P


def test_uneven_micro_batches_follow_chunk() -> None:
    plan = planned(captured(rows=7), 3)
    program = lower(plan, [0], torch.device("cpu")).programs[0]
    walked = next(task for task in program.tasks if task.compute is not None and task.rate is Rate.MICRO)
    assert set(walked.others) == {2}, "3, 3 and 1 rows: the last one is of another shape"
    with pytest.raises(PlanError, match=r"micro_batches=8 is more than the batch's 7 rows; give at most"):
        planned(captured(rows=7), 8)
    with pytest.raises(
        PlanError, match=r"the batch's 7 rows lie unevenly on 2 parts .* a multiple of 2 rows"
    ):
        planned(captured(rows=7), 2, TWO)
    with pytest.raises(PlanError, match="is more than the batch's 4 rows on each of 2 parts"):
        planned(captured(rows=8), 5, TWO)


# --- what is refused -----------------------------------------------------------------------------------


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(out @ out.T, torch.arange(len(x)))


def rooted(model: nn.Module, x: Tensor) -> Tensor:
    return mean_square(model, x).sqrt()


def line_of(function: Callable, text: str) -> str:
    """The "file:line" at which a function of this file says `text`."""
    lines = Path(__file__).read_text().splitlines()
    begin = function.__code__.co_firstlineno
    return f"{Path(__file__).name}:{next(i for i in range(begin, len(lines)) if text in lines[i - 1])}"


@pytest.mark.parametrize(
    ("loss", "op", "text", "layouts"),
    [
        (contrastive, "mm.default", "out @ out.T", "comes as (B, S(1)) and is wanted (B, B)"),
        (rooted, "sqrt.default", ".sqrt()", "comes as (B, P(sum)) and is wanted (B, B)"),
    ],
)
def test_what_needs_the_whole_batch_before_backward_is_refused(
    loss: Loss, op: str, text: str, layouts: str
) -> None:
    with pytest.raises(PlanError) as error:
        planned(captured(loss), 2)
    said = str(error.value)
    assert f"aten.{op}" in said and line_of(loss, text) in said, said
    assert "along (axis0, time)" in said and layouts in said, said
    assert "Use micro_batches=1" in said and 'batch_stats="local"' in said


def test_batch_norm_over_the_global_batch_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.raises(PlanError, match=r"in '1' needs all of the batch at once.*batch_stats=\"local\""):
        planned(captured(mean_square, model=model), 2)


def test_what_only_the_result_needs_comes_after_the_last_micro_batch() -> None:
    """The square root of a loss that is not what backward begins with."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.sqrt()

    plan = planned(step.capture(torch.randn(8, 6)), 2)
    when = when_of(plan, facts_of(plan.graph))
    roots = [node for node in when if "sqrt" in str(node.target)]
    assert len(roots) == 2, "of the loss, and of the norm that clips"
    assert all(when[node] is When.AFTER for node in roots)
    walked = [info_of(node).phase for node in when if when[node] is When.WALKED]
    assert Phase.BACKWARD in walked and Phase.UPDATE not in walked


def test_what_is_made_in_every_micro_batch_is_not_read_after_them() -> None:
    """But a shape alone is waited for by nobody: ones like a result are there from the beginning."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trained(made: Callable[[Tensor], Tensor]) -> Plan:
        @flow.graph(model, optimizer)
        def step(x: Tensor) -> Tensor:
            out = model(x)
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return made(out.detach()) * loss.detach().sqrt()

        return planned(step.capture(torch.randn(8, 6)), 2)

    assert trained(lambda out: out.new_ones(3)).has_time
    with pytest.raises(PlanError, match=r"aten\.fill\.Scalar at .*test_time\.py:\d+ is read by %mul"):
        trained(lambda out: torch.fill(out, 3.0))


def test_an_op_that_is_read_by_backward_as_a_partial_breaks_the_law_of_barriers() -> None:
    """The verifier sees it, whatever made the plan."""
    plan = planned(captured(), 2)
    tanh = next(node for node in plan.graph.calls() if node.target is torch.ops.aten.tanh.default)
    axes = plan.signatures[tanh.name]
    whole = {**plan.signatures, tanh.name: (*axes[:-1], Signature((B,), (B,)))}
    with pytest.raises(AssertionError, match=r"reads tanh, .* before the last micro-batch"):
        complete(replace(plan, signatures=whole))
    partial = {**plan.signatures, tanh.name: (*axes[:-1], Signature((P,), (P,)))}
    with pytest.raises(AssertionError, match="%tanh"):
        complete(replace(plan, signatures=partial))


# --- plans as files and text ---------------------------------------------------------------------------


def test_a_plan_with_micro_batches_comes_back_from_its_file(tmp_path: Path) -> None:
    graph = captured()
    plan = planned(graph, 4, TWO, "zero")
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json", graph)
    assert read.micro_batches == 4 and read.signatures == plan.signatures and read.mesh == (2, 4)
    assert "4 micro-batches" in read.text()
    edited = (tmp_path / "plan.json").read_text().replace('"micro_batches": 4', '"micro_batches": 1')
    (tmp_path / "plan.json").write_text(edited)
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json", graph)


def test_plans_with_and_without_micro_batches_differ_in_that() -> None:
    graph = captured()
    walked, whole = planned(graph, 2), planned(graph, 1)
    found = walked.diff(whole)
    assert not found.is_equal and found.micro_batches == (2, 1) and not found.stored
    assert re.search(r"walked in +2 micro-batches +1 micro-batches", found.text())
    assert walked.diff(planned(graph, 2)).is_equal


def test_explain_says_how_an_op_runs_along_time() -> None:
    told = planned(captured(), 2, TWO).explain("up")
    assert told.axes == ("axis0", "time")
    ops = {one.op: one for one in told.choices}
    assert ops["addmm"].chosen.axes == ("B, S(0), B -> S(0)", "B, S(0), B -> S(0)")
    assert ops["addmm"].held == 8 // 2 // 2 * 10 * 4
    assert ops["param"].chosen.axes[-1] == "B"


# --- schedules and programs ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "grid"), [("data", ONE), ("data", TWO), ("zero", TWO), ("tensor", TWO)])
def test_items_stand_before_in_and_after_the_walk(name: str, grid: list) -> None:
    made = schedule(planned(captured(), 4, grid, name))
    walked = [item.walked for item in made.items]
    begin, end = walked.index(True), len(walked) - walked[::-1].index(True)
    assert all(walked[begin:end]) and 0 < end < len(walked)
    there = set(made.inputs)
    for item in made.items:
        assert set(item.inputs) <= there, item
        there.update(item.outputs)
    folded = {item.target for item in made.items if isinstance(item, Box) and item.folds}
    assert not folded & {value for item in made.items[:end] for value in item.inputs}
    updates = [item for item in made.items if isinstance(item, Op) and item.phase is Phase.UPDATE]
    assert updates and not any(item.walked for item in updates)


def test_gradients_are_added_up_over_time_before_devices_exchange_them() -> None:
    """Once a step, and the loss too: the only moves between devices are after the walk."""
    made = schedule(planned(captured(), 4, TWO))
    moves = [item for item in made.items if isinstance(item, Box) and not item.is_local]
    folds = Counter(item.move.kind for item in moves if item.folds)
    assert folds == {"all_reduce": 5}, "four gradients and the loss"
    between = [item for item in moves if not item.folds]
    assert Counter(item.move.kind for item in between) == {"all_reduce": 5}
    assert not any(item.walked for item in between)


def test_a_gathered_parameter_is_not_kept_from_one_micro_batch_to_the_next() -> None:
    plan = planned(captured(), 4, TWO, "zero")
    params = {plan.graph.placeholders[one.name] for one in plan.graph.inputs if one.role is Role.PARAM}
    gathers = [
        item
        for item in schedule(plan).items
        if isinstance(item, Box) and item.source.node in params and item.move.kind == "all_gather"
    ]
    assert gathers and all(item.walked for item in gathers)


def test_programs_fire_what_is_walked_for_every_micro_batch() -> None:
    plan = planned(captured(), 4, TWO)
    program = lower(plan, [1], torch.device("cpu")).programs[1]
    assert program.micro_batches == 4
    rates = [task.rate for task in program.tasks]
    assert rates.count(Rate.MICRO) and rates[-1] is Rate.STEP
    folds = [task for task in program.tasks if task.move is not None and task.move.axis == 1]
    assert len(folds) == 5
    for task in folds:
        assert task.rate is Rate.MICRO
        assert program.registers[task.inputs[0]].rate is Rate.MICRO
        assert program.registers[task.outputs[0]].rate is Rate.STEP
    (batch,) = (port for port in program.inputs if plan.graph.input_of[port.name].role is Role.BATCH)
    assert program.registers[batch.register].shape == (4, 6)
    shapes = {one.shape for one in program.registers if one.rate is Rate.MICRO}
    assert (1, 10) in shapes, "one row of four on each of two ranks"


def test_lowering_makes_no_more_modules_for_more_micro_batches() -> None:
    """Only what depends on the micro-batch's place, as a random op does, picks by it."""

    def timed(num: int) -> tuple[int, int, int]:
        tasks = lower(planned(captured(rows=16), num), [0], torch.device("cpu")).programs[0].tasks
        modules = {
            id(module) for task in tasks if task.compute for module in (task.compute, *task.others.values())
        }
        nodes = [node for task in tasks if task.compute for node in task.compute.graph.nodes]
        picks = [node for node in nodes if any(getattr(one, "target", "") == TIME for one in node.args)]
        return len(modules), len(nodes), len(picks)

    assert timed(2) == timed(8)
    _, nodes, picks = timed(8)
    assert picks <= 3 < nodes, "the slice of the batch, and the mask of dropout"


def test_a_prediction_counts_every_micro_batch() -> None:
    graph = captured(rows=16)
    whole, walked = planned(graph, 1, TWO, "zero").predicted, planned(graph, 4, TWO, "zero").predicted
    assert whole is not None and walked is not None
    assert walked.collectives["all_gather"] == 4 * whole.collectives["all_gather"]
    assert walked.collectives["all_reduce"] == whole.collectives["all_reduce"]
    assert walked.seconds > whole.seconds
    assert len(walked.memory.held) == len(schedule(planned(graph, 4, TWO, "zero")).items)
