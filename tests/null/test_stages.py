"""The cut of a step into stages: what lies where, how good it is, what pins do, what a rank then runs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monoflow as flow
from monoflow.errors import LayoutError, PlanError
from monoflow.graph.step_graph import Phase, StepGraph, info_of, is_getitem, source_of, tensor_args
from monoflow.mesh import placement
from monoflow.plan.by_stage import stages_of
from monoflow.plan.cost import DeviceCost
from monoflow.plan.exact import require_exact
from monoflow.plan.parts import Parts
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.positions import positions
from monoflow.plan.schedule import Box, Op, schedule
from monoflow.plan.stages import _best, cut_stages, module_pattern
from monoflow.sbp.layout import At, B, S
from monoflow.sbp.signature import Signature
from monoflow.sbp.sources import RuleBook
from monoflow.step import Step
from tests.parity.models import KINDS, batch_of, training

WIDTH, ROWS = 8, 4


class Layers(nn.Module):
    """Layers of one shape; if they are tied, the last one has the first one's weight."""

    def __init__(self, count: int, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def step_of(model: nn.Module, plan: str = "pipeline", grid: list | None = None) -> tuple[Step, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer, plan=plan, placement=flow.placement("cpu", grid or [0, 1]))
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, torch.randn(ROWS, WIDTH)


def planned(model: nn.Module, size: int = 2, **pins: int) -> Plan:
    step, x = step_of(model)
    names = {key.replace("__", "."): stage for key, stage in pins.items()}
    return plan_step(step.capture(x), placement("cpu", range(size)), "pipeline", stages=names)


@pytest.fixture(scope="module")
def gpt2() -> StepGraph:
    model, optimizer, function = training("gpt2", "adamw")
    return flow.graph(model, optimizer)(function).capture(batch_of(KINDS["gpt2"]))


def stage_of(plan: Plan, name: str) -> int:
    (one,) = plan.inputs[name]
    assert isinstance(one, At), f"{name} is {one}"
    return one.stage


# --- positions -----------------------------------------------------------------------------------------


def test_backward_and_update_are_where_forward_is():
    step, x = step_of(Layers(4))
    graph = step.capture(x)
    found = positions(graph)
    where = {node.name: found.forward[at].name for node, at in found.of.items()}
    expected = {
        "layers_2_weight": "mm_2", "t_2": "mm_2", "mm_2": "mm_2", "relu_2": "relu_2",
        "threshold_backward_1": "relu_2", "t_8": "mm_2", "mm_6": "mm_2", "mm_7": "mm_2",
        "_fused_sgd_2": "mm_2",
    }  # fmt: skip
    assert {name: where[name] for name in expected} == expected
    assert {info_of(node).phase for node in found.of if node.op != "placeholder"} == {
        Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE,
    }  # fmt: skip


def test_no_forward_op_reads_from_a_later_stage_and_no_backward_op_from_an_earlier_one(gpt2: StepGraph):
    plan = plan_step(gpt2, placement("cpu", range(4)), "pipeline")
    one_way = {Phase.FORWARD: 1, Phase.BACKWARD: -1}
    crossings = 0
    for node in gpt2.calls():
        if is_getitem(node):
            continue
        for source in tensor_args(node):
            giver = source_of(source)[0]
            given = plan.layouts(source)[0][0]
            taken = plan.signatures[node.name][0].outputs[0]
            phase = info_of(node).phase
            if giver.op == "placeholder" or not isinstance(given, At) or not isinstance(taken, At):
                continue
            if phase in one_way and info_of(giver).phase is phase:
                assert (taken.stage - given.stage) * one_way[phase] >= 0, f"{giver} to {node}"
                crossings += given != taken
    assert crossings >= 6  # forward and backward over three cuts


def test_what_the_batch_alone_decides_is_not_sent(gpt2: StepGraph):
    """Labels, masks and counts are computed wherever they are read."""
    plan = plan_step(gpt2, placement("cpu", range(2)), "pipeline")
    sent = {item.source for item in schedule(plan).items if isinstance(item, Box) and not item.is_local}
    anywhere = set(positions(gpt2).anywhere)
    assert sent and not any(value.node in anywhere for value in sent)


# --- the cut -------------------------------------------------------------------------------------------


def test_equal_layers_are_cut_in_the_middle_and_the_bytes_are_those_that_cross():
    step, x = step_of(Layers(4))
    graph = step.capture(x)
    cut = cut_stages(graph, positions(graph), 2, {}, DeviceCost())
    plan = planned(Layers(4))
    assert [stage_of(plan, f"layers.{i}.weight") for i in range(4)] == [0, 0, 1, 1]
    assert cut.sent == (2 * ROWS * WIDTH * 4,)  # the activation, and its gradient
    predicted = plan.predicted
    assert predicted is not None and predicted.collectives["send"] == 2


def test_a_shared_weight_lies_at_its_first_reader_and_is_sent_to_the_other():
    plan = planned(Layers(4, tied=True), layers__3=1)
    assert stage_of(plan, "layers.0.weight") == 0
    sends = [item for item in schedule(plan).items if isinstance(item, Box) and item.move.kind == "send"]
    weights = [one for one in sends if one.source.name.endswith("weight")]
    assert [str(one.phase) for one in weights] == ["forward", "backward"]
    assert {one.target.layout for one in weights} == {(At(1),)}
    # Its gradient comes back, is added to the other one, and there is one update.
    grads = [one for one in sends if one.target.layout == (At(0),) and one.move.shape == (WIDTH, WIDTH)]
    assert [str(one.phase) for one in grads] == ["backward"]
    weight = plan.graph.placeholders["layers.0.weight"]
    (update,) = [node for node in weight.users if info_of(node).phase is Phase.UPDATE]
    assert plan.signatures[update.name][0].inputs[0] == At(0)


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_better(seed: int):
    """Against every cut there is: the slowest stage first, then what is sent."""
    draw = random.Random(seed)
    count, size = draw.randint(4, 9), draw.randint(2, 4)
    seconds = np.array([draw.randint(1, 9) for _ in range(count)], dtype=float)
    sends = np.array([0.0, *(draw.choice([0.5, 1.0, 3.0]) for _ in range(count - 1)), 0.0])
    pinned = np.full(count, -1)
    if seed % 2:
        pinned[draw.randrange(count)] = draw.randrange(size)

    def cost(starts: tuple[int, ...]) -> tuple[float, float] | None:
        ends = (*starts[1:], count)
        for stage, (a, b) in enumerate(zip(starts, ends, strict=True)):
            if any(one not in (-1, stage) for one in pinned[a:b]):
                return None
        slowest = max(seconds[a:b].sum() + sends[a] + sends[b] for a, b in zip(starts, ends, strict=True))
        return slowest, sum(sends[one] for one in starts[1:])

    every = [(0, *rest) for rest in itertools.combinations(range(1, count), size - 1)]
    possible = [found for one in every if (found := cost(one)) is not None]
    before = np.concatenate([[0.0], np.cumsum(seconds)])
    got = _best(before, sends, range(count + 1), pinned, size)
    if not possible:
        assert got is None
    else:
        assert got is not None and cost(tuple(got)) == pytest.approx(min(possible))


# --- pins ----------------------------------------------------------------------------------------------


def test_pins_are_kept():
    plan = planned(Layers(6), **{"layers__0-3": 0})
    assert [stage_of(plan, f"layers.{i}.weight") for i in range(6)] == [0, 0, 0, 0, 1, 1]
    step, x = step_of(Layers(3))
    with flow.simulate(2):
        step.stage("layers.1-2", 1)
        assert [stage_of(step.compile(x), f"layers.{i}.weight") for i in range(3)] == [0, 1, 1]
        step.stage("layers.1", 0)  # the pin of the range holds it too
        with pytest.raises(PlanError, match=r"'layers\.1' is pinned to stage 1 and to stage 0"):
            step.compile(x)


def test_patterns_of_modules():
    form = module_pattern("*.h.0-11")
    assert form.fullmatch("transformer.h.3") and form.fullmatch("transformer.h.11.attn.c_proj")
    assert not form.fullmatch("transformer.h.12") and not form.fullmatch("transformer.ln_f")
    assert module_pattern("layers.1").fullmatch("layers.1.out")
    assert not module_pattern("layers.1").fullmatch("layers.11")


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"layrs.0": 0}, r"'layrs\.0' matches no module that runs in forward; modules are layers\.0, layers"),
        ({"layers.0": 2}, r"'layers\.0' at 2: there are stages 0 to 1"),
        (
            {"layers.0": 1, "layers.2": 0},
            r"module 'layers\.0' is pinned to stage 1 and runs before module 'layers\.2', which is pinned to "
            "stage 0: forward work would go back",
        ),
        ({"layers.0": 1}, r"cannot be cut into 2 stages with 'layers\.0' at stage 1: every stage needs an"),
    ],
)  # fmt: skip
def test_pins_that_cannot_be_met(pins: dict[str, int], message: str):
    step, x = step_of(Layers(4))
    with pytest.raises(PlanError, match=message):
        plan_step(step.capture(x), placement("cpu", range(2)), "pipeline", stages=pins)


def test_stages_that_ranks_cannot_have_equally_many_of():
    step, x = step_of(Layers(6))
    graph = step.capture(x)

    def planned_with(**options: Any) -> Plan:
        return plan_step(graph, placement("cpu", [0, 1]), "pipeline", **options)

    with pytest.raises(PlanError, match=r"stages=3 on an axis of 2 ranks: each rank .* give 2 or 4"):
        planned_with(num_stages=3)
    with pytest.raises(PlanError, match=r"'layers\.0' at 4: there are stages 0 to 3"):
        planned_with(num_stages=4, stages={"layers.0": 4})
    with pytest.raises(PlanError, match=r"stages=2 on an axis of 1 ranks: .* one alone has one; give 1, or"):
        plan_step(graph, placement("cpu", [0]), "pipeline", num_stages=2)
    asked = {"num_stages": 4, "zero_bubble": True, "stages": {"layers.0": 0}}
    with pytest.raises(
        PlanError, match=r"pinned to stages \('layers\.0'\) and stages=4 .* and schedule=\"zero"
    ):
        plan_step(graph, placement("cpu", [0, 1]), "data", **asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "gpipe"}, r"schedule='gpipe' is neither \"1f1b\" nor \"zero-bubble\""),
        ({"stages": 0}, "stages=0 is no number of a pipeline's stages"),
        ({"stages": 2, "plan": Path("a.json")}, r"stages=2: the plan in a\.json says how many"),
        (
            {"schedule": "zero-bubble", "plan": Path("a.json")},
            r"'zero-bubble': the plan in a\.json says which",
        ),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        flow.graph(Layers(2), **options)


@pytest.mark.parametrize("count", [1, 4])
def test_several_stages_of_a_rank_lie_there_and_forward_goes_round(count: int):
    step, x = step_of(Layers(6))
    pins = {"layers.0": 0, "layers.1-2": 1, "layers.3": 2, "layers.4-5": 3}
    plan = plan_step(
        step.capture(x), placement("cpu", [0, 1]), "pipeline",
        stages=pins, num_stages=4, micro_batches=count, zero_bubble=True,
    )  # fmt: skip
    assert [stage_of(plan, f"layers.{i}.weight") for i in range(6)] == [0, 1, 1, 0, 1, 1]
    found = stages_of(plan)
    assert (found.axis, found.num) == (0, 4)
    modules = {info_of(node).module: stage for node, stage in found.of.items() if node.op != "placeholder"}
    assert {name: stage for name, stage in modules.items() if name} == dict(
        zip([f"layers.{i}" for i in range(6)], [0, 1, 1, 2, 3, 3], strict=True)
    )
    sends = [one.move for one in schedule(plan).items if isinstance(one, Box) and one.move.kind == "send"]
    assert len(sends) == 6  # three cuts, there and back


def test_names_of_plans():
    step, x = step_of(Layers(2))
    graph, grid = step.capture(x), placement("cpu", [[0, 1], [2, 3]])
    with pytest.raises(PlanError, match="makes a pipeline of 2 axes"):
        plan_step(graph, grid, "pipeline")
    with pytest.raises(PlanError, match=r"pinned to stages \('layers\.0'\), but plan='data' has none"):
        plan_step(graph, placement("cpu", [0, 1]), "data", stages={"layers.0": 0})
    with pytest.raises(LayoutError, match=r"pin 'layers\.\*': S\(0\) is along the axis of a pipeline"):
        plan_step(graph, grid, "pipeline x data", {"layers.*": (S(0), B)})
    with pytest.raises(PlanError, match="has 7 forward ops, too few for 40 stages"):
        plan_step(graph, placement("cpu", range(40)), "pipeline")


# --- what follows --------------------------------------------------------------------------------------


def test_a_rank_runs_its_stage_and_meets_the_others_by_number():
    plan = planned(Layers(4))
    made = schedule(plan)
    parts = Parts(made)
    own = [parts.of((stage,)) for stage in range(2)]
    ops = [{item.node.name for item in part.items if isinstance(item, Op)} for part in own]
    assert not ops[0] & ops[1]
    assert ops[0] | ops[1] == {item.node.name for item in made.items if isinstance(item, Op)}
    moves = [
        {item.order: item for item in part.items if isinstance(item, Box) and item.order >= 0} for part in own
    ]
    assert moves[0].keys() == moves[1].keys()
    for order, item in moves[0].items():
        other = moves[1][order]
        assert item.gives != other.gives or item.move.kind == "broadcast"
    state = [{value.name for value in part.inputs if "weight" in value.name} for part in own]
    assert state == [{"layers_0_weight", "layers_1_weight"}, {"layers_2_weight", "layers_3_weight"}]


def test_a_saved_plan_comes_back_and_what_is_no_stage_is_refused(tmp_path):
    step, x = step_of(Layers(2))
    graph = step.capture(x)
    plan = plan_step(graph, placement("cpu", [0, 1]), "pipeline")
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json", graph)
    assert read.signatures == plan.signatures and read.inputs == plan.inputs and read.outputs == plan.outputs
    name, (one,) = next((key, axes) for key, axes in plan.signatures.items() if len(axes[0].inputs) == 2)
    mixed = Signature((At(0), At(1)), one.outputs)
    wrong = {**plan.signatures, name: (mixed,)}
    broken = Plan(plan.graph, plan.placement, plan.name, wrong, plan.inputs, plan.outputs, {})
    with pytest.raises(PlanError, match="as @0, @1 -> @"):
        require_exact(broken, RuleBook(), "this")
    assert require_exact(plan, RuleBook(), "this") is plan


def test_results_are_everywhere_and_the_peak_is_the_worst_stages():
    plan = planned(Layers(4), **{"layers__0-2": 0})
    assert plan.outputs["result"] == (B,)
    predicted = plan.predicted
    assert predicted is not None and plan.machine is not None
    layer = WIDTH * WIDTH * 4
    held = predicted.memory.before
    assert held == 3 * layer + ROWS * WIDTH * 4 + 8  # three of four weights, the batch, the learning rate
    assert predicted.seconds == pytest.approx(
        sum(sum(kinds.values()) for kinds in predicted.seconds_by.values())
    )
