"""Predictions against what runs count: bytes that ops touch, collectives, bytes sent, and the peak."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import monoflow as flow
from monoflow.boxing.route import LinkCost
from monoflow.graph.step_graph import info_of
from monoflow.plan.cost import REFERENCE, Device, Machine
from monoflow.plan.predict import COMPUTE, Prices, predict
from monoflow.plan.schedule import schedule
from monoflow.step import Step

GRID = [[0, 1], [2, 3]]


def trained(plan: str, grid: list, rows: int = 6, axes: tuple[str, ...] | None = None) -> tuple[Step, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @flow.graph(model, optimizer, plan=plan, placement=flow.placement("cpu", grid, axes=axes))
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, torch.randn(rows, 12)


def machine(bandwidth: float = math.inf, link: LinkCost | None = None) -> Machine:
    """One on which only bytes of memory take time, or only what the link says."""
    device = Device("paper", {"float32": math.inf}, bandwidth, 0.0, 1 << 40)
    return Machine(device, (link or LinkCost(0.0, 0.0),))


def touched(step: Step, inputs: list[Tensor]) -> Iterator[tuple[str, int]]:
    """(phase, bytes read and written) of every op of a one-rank program; views touch none."""
    program = step._require().lowered.programs[0]
    phases = {node.name: str(info_of(node).phase) for node in step.plan.graph.calls()}
    given = {f"r{port.register}": one for port, one in zip(program.inputs, inputs, strict=True)}
    env: dict[fx.Node, Any] = {}
    for node in (node for task in program.tasks for node in task.module().graph.nodes):
        if node.op == "placeholder":
            env[node] = given[node.target]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: env[one])  # type: ignore[misc]
        if node.op == "output":
            task = next(one for one in program.tasks if one.module().graph is node.graph)
            given |= {f"r{register}": one for register, one in zip(task.outputs, args[0], strict=True)}
        if node.op != "call_function":
            continue
        env[node] = node.target(*args, **kwargs)
        read, written = _tensors((args, kwargs)), _tensors(env[node])
        owned = {one.untyped_storage()._cdata for one in read}
        is_view = any(one.untyped_storage()._cdata in owned for one in written)
        if node.target is not operator.getitem and not is_view:
            yield phases[node.name], sum(one.nbytes for one in (*read, *written))


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor)]


def test_compute_is_the_bytes_that_ops_touch() -> None:
    """On a machine where a byte of memory takes a second and nothing else any time."""
    step, x = trained("data", [0])
    step(x)
    compiled = step._require()
    predicted = predict(compiled.plan, machine(1.0))
    expected: dict[str, float] = {}
    for phase, num_bytes in touched(step, step._bound(compiled).read((x,), {})[0]):
        expected[phase] = expected.get(phase, 0.0) + num_bytes
    for phase in ("forward", "backward"):
        assert predicted.seconds_by[phase][COMPUTE] == expected[phase] > 0
    assert predicted.seconds == pytest.approx(
        sum(sum(kinds.values()) for kinds in predicted.seconds_by.values())
    )
    assert predicted.hidden == 0.0


@pytest.mark.parametrize(
    ("plan", "grid", "axes"),
    [
        ("data", [0, 1], ("one",)),
        ("zero", [0, 1], ("one",)),
        ("tensor", [0, 1, 2, 3], ("one",)),
        ("data x tensor", GRID, ("out", "in")),
        ("zero x tensor", GRID, ("out", "in")),
    ],
)
def test_collectives_are_those_that_run(plan: str, grid: list, axes: tuple[str, ...]) -> None:
    """Counted by the transport: how many of each kind, and what rank 0 sends along each axis."""
    step, x = trained(plan, grid, 8, axes)
    with flow.simulate(torch.tensor(grid).numel()):
        step(x)
        seen = step.stats()
    predicted = predict(step.plan, machine(link=LinkCost(1.0, 0.0)))
    assert predicted.collectives == {
        kind: seen.calls(kind)
        for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
        if seen.calls(kind)
    }
    assert predicted.sent == {axis: seen.num_bytes(axis=axis) for axis in axes}
    phases = seen.calls() + seen.calls("all_reduce")  # an all-reduce has two
    assert predicted.seconds == phases == sum(predicted.seconds_of(axis) for axis in axes)
    by_byte = predict(step.plan, machine(link=LinkCost(0.0, 1.0)))
    assert {axis: by_byte.seconds_of(axis) for axis in axes} == predicted.sent


def test_links_are_priced_by_axis() -> None:
    step, x = trained("data x tensor", GRID, 8, ("out", "in"))
    with flow.simulate(4):
        step.compile(x)
    device = machine().device
    slow_outer = predict(step.plan, Machine(device, (LinkCost(0.0, 2.0), LinkCost(0.0, 3.0))))
    assert slow_outer.seconds_of("out") == 2 * slow_outer.sent["out"]
    assert slow_outer.seconds_of("in") == 3 * slow_outer.sent["in"]


def test_one_device_sends_nothing() -> None:
    step, x = trained("data", [0])
    step.compile(x)
    predicted = predict(step.plan, REFERENCE)
    assert predicted.collectives == {} and set(predicted.sent.values()) == {0}
    assert set().union(*(kinds for kinds in predicted.seconds_by.values())) <= {COMPUTE, "local move"}


def test_the_peak_is_the_fullest_item() -> None:
    step, x = trained("zero", [0, 1])
    with flow.simulate(2):
        step.compile(x)
    predicted = predict(step.plan, REFERENCE)
    totals = [sum(row) for row in predicted.memory.held]
    assert (
        predicted.peak_bytes == max(totals) == totals[predicted.peak_at] == sum(predicted.peak_split.values())
    )
    assert len(totals) == len(schedule(step.plan).items)
    assert "(" in predicted.peak_item


def test_ranks_with_smaller_shards_hold_and_touch_less() -> None:
    step, x = trained("data", [0, 1], rows=7)
    with flow.simulate(2):
        step.compile(x)
    prices = Prices(machine(1.0))
    largest, last = (
        predict(step.plan, prices.machine, coordinate=one, prices=prices) for one in (None, (1,))
    )
    assert largest.peak_bytes > last.peak_bytes
    assert largest.memory.before - last.memory.before == 4 * 12  # one row of the batch
    assert largest.seconds_of(COMPUTE) > last.seconds_of(COMPUTE)


def test_what_is_remembered_changes_nothing() -> None:
    step, x = trained("tensor", [0, 1])
    with flow.simulate(2):
        step.compile(x)
    prices = Prices(REFERENCE)
    first, again = (predict(step.plan, REFERENCE, prices=prices) for _ in range(2))
    assert first == again == predict(step.plan, REFERENCE)


def test_as_data_is_json() -> None:
    step, x = trained("data", [0, 1])
    with flow.simulate(2):
        step.compile(x)
    predicted = predict(step.plan, REFERENCE)
    data = json.loads(json.dumps(predicted.as_data(), allow_nan=False))
    assert data["peak_bytes"] == predicted.peak_bytes and data["sent"] == dict(predicted.sent)
    assert max(map(sum, data["memory"]["held"])) == predicted.peak_bytes
    assert len(data["memory"]["categories"]) == len(data["memory"]["held"][0])
