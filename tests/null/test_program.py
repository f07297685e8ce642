"""Programs: their verifier, their text, and tasks that let go of their inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from monoflow.mesh import placement
from monoflow.runtime.program import Port, Program, Register, Task, task_module, verify

PLACE = placement("cpu", [0], axes=("data",))


def add_module(name: str = "total") -> fx.GraphModule:
    graph = fx.Graph()
    first, second = graph.placeholder("r0"), graph.placeholder("r1")
    graph.output([graph.call_function(torch.add, (first, second), name=name)])
    return task_module(graph)


def small() -> Program:
    """Two sums: r2 = r0 + r1, r3 = r2 + r1."""
    tasks = (
        Task(0, "first", "forward", (0, 1), (2,), add_module()),
        Task(1, "second", "update", (2, 1), (3,), add_module(), after=(0,)),
    )
    registers = tuple(Register(index, f"x{index}", (2, 3), torch.float32) for index in range(4))
    inputs = (Port("weight", 0, donated=True), Port("batch.0", 1))
    outputs = (Port("weight:next", 3, replaces="weight"), Port("result", 2))
    return Program(0, PLACE, tasks, registers, inputs, outputs)


def test_text_shows_ports_tasks_and_sizes() -> None:
    assert verify(small()).text().splitlines() == [
        f"Program of rank 0 on {PLACE}",
        "  r0 <- weight (donated)",
        "  r1 <- batch.0",
        "  t0 forward first: (r0, r1) -> (r2:[2, 3])  # 1 ops",
        "  t1 update second: (r2, r1) -> (r3:[2, 3])  # 1 ops",
        "  weight:next <- r3 replaces weight",
        "  result <- r2",
    ]


def test_consumers_and_bytes() -> None:
    assert small().consumers == ((0,), (0, 1), (1,), ())
    assert small().registers[0].num_bytes == 24
    assert Register(0, "x", (), torch.int64, slots=2).num_bytes == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"inputs": p.inputs[:1]}, r"task first reads registers \{1\} before they are written"),
        (lambda p: {"inputs": (*p.inputs, Port("again", 2))}, r"task first writes registers \{2\} again"),
        (lambda p: {"tasks": p.tasks[::-1]}, "second"),
        (lambda p: {"tasks": p.tasks[:1]}, r"outputs read registers \{3\} that nothing writes"),
        (
            lambda p: {"tasks": (dataclasses.replace(p.tasks[0], after=(1,)), p.tasks[1])},
            "task first waits for a later task",
        ),
        (
            lambda p: {"tasks": (dataclasses.replace(p.tasks[0], compute=None), p.tasks[1])},
            "first",
        ),
    ],
    ids=["missing input", "written twice", "wrong order", "missing output", "later", "empty task"],
)
def test_a_broken_program_is_refused(change, message: str) -> None:
    program = small()
    with pytest.raises(AssertionError, match=message):
        verify(dataclasses.replace(program, **change(program)))


def test_a_task_empties_the_list_it_is_given() -> None:
    given = [torch.ones(2), torch.ones(2)]
    (total,) = add_module().forward(given)
    assert total.tolist() == [2, 2] and given == []


def test_a_task_without_inputs() -> None:
    graph = fx.Graph()
    graph.output([graph.call_function(torch.zeros, (2,))])
    assert task_module(graph).forward([])[0].tolist() == [0, 0]
