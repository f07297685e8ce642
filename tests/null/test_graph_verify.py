"""The verifier catches each kind of breakage and says what, where and after which stage."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from monoflow.boxing.route import Move
from monoflow.config import SETTINGS
from monoflow.graph.rewrite import copied
from monoflow.graph.step_graph import Role, StepGraph
from monoflow.graph.verify import verify
from monoflow.mesh import placement
from monoflow.runtime import program
from monoflow.runtime.program import Port, Program, Register, Task
from monoflow.sbp.layout import B, P

from .graph_build import built

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4)


def step(p: Tensor, x: Tensor, c: Tensor) -> list[Tensor]:
    high, index = torch.max(x + c, 0)
    return [p + 1, p + high, index]


def small() -> StepGraph:
    return built(
        step,
        {"p": (Role.PARAM, X[0]), "x": (Role.BATCH, X), "c": (Role.CONSTANT, X)},
        replaces=["p"],
    )


Break = Callable[[StepGraph], StepGraph]


def edited(change: Callable[[fx.Graph, dict[str, fx.Node]], None]) -> Break:
    """A breakage of the fx graph."""

    def broken(graph: StepGraph) -> StepGraph:
        copy = copied(graph)
        change(copy, {node.name: node for node in copy.nodes})
        return replace(graph, graph=copy)

    return broken


def late(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["getitem"].append(nodes["max_1"])


def no_origin(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    del nodes["max_1"].meta["info"]


def no_value(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    del nodes["max_1"].meta["val"]


def python_function(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["add"].target = operator.add


def in_place(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["add"].target = aten.add_.Tensor


def real_tensor(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["add"].update_arg(1, X)  # pyright: ignore[reportArgumentType]


def past_the_end(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["getitem_1"].update_arg(1, 2)


def other_output(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["getitem_1"].update_arg(1, 0)


def item_of_one_tensor(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["getitem"].update_arg(0, nodes["add"])


def attribute(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["add"].op = "get_attr"


def extra_input(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    with graph.inserting_after(nodes["c_1"]):
        graph.placeholder("more").meta.update(nodes["c_1"].meta)


def wrong_result(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    output = graph.output_node()
    first, second, third = output.args[0]  # pyright: ignore
    output.args = ((first, third, second),)


def fewer_results(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    output = graph.output_node()
    output.args = (output.args[0][:2],)  # pyright: ignore


def same_name(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    nodes["getitem"].name = "add"


BROKEN: dict[str, tuple[Break, str]] = {
    "order": (edited(late), r"getitem runs before max_1, which it reads"),
    "origin": (edited(no_origin), r"max_1 has no origin"),
    "value": (edited(no_value), r"max_1 has no fake value"),
    "target": (edited(python_function), r"add calls .*add.*, no registered op"),
    "write": (edited(in_place), r"add writes in place by aten.add_.Tensor"),
    "real tensor": (edited(real_tensor), r"add holds a tensor with values"),
    "index": (edited(past_the_end), r"getitem_1 picks output 2 of max_1, which gives 2"),
    "picked": (edited(other_output), r"getitem_1 is .*int64.*, what it picks is .*float32"),
    "single": (edited(item_of_one_tensor), r"getitem picks an output of add, which gives one tensor"),
    "kind": (edited(attribute), r"add is a get_attr"),
    "inputs": (edited(extra_input), r"4 placeholders stand for 3 inputs"),
    "result": (edited(wrong_result), r"output out1 is int64\[4\], not float32\[4\]"),
    "results": (edited(fewer_results), r"2 results stand for 3 outputs"),
    "node name": (edited(same_name), r"node add appears twice"),
    "input name": (
        lambda g: replace(g, inputs=(*g.inputs[:2], replace(g.inputs[2], name="x"))),
        r"input x appears twice",
    ),
    "input shape": (
        lambda g: replace(g, inputs=(replace(g.inputs[0], meta=g.inputs[1].meta), *g.inputs[1:])),
        r"input p is float32\[4\], not float32\[3, 4\]",
    ),
    "constant": (lambda g: replace(g, constants={}), r"constant c has no value"),
    "constant's shape": (
        lambda g: replace(g, constants={"c": X[:2]}),
        r"constant c is \(\(2, 4\), torch.float32\), not float32\[3, 4\]",
    ),
    "output name": (
        lambda g: replace(g, outputs=(*g.outputs[:2], replace(g.outputs[2], name="out0"))),
        r"output out0 appears twice",
    ),
    "two next values": (
        lambda g: replace(g, outputs=(g.outputs[0], replace(g.outputs[1], replaces="p"), g.outputs[2])),
        r"next value of p appears twice",
    ),
    "next value's dtype": (
        lambda g: replace(
            g, outputs=(replace(g.outputs[0], replaces=""), g.outputs[1], replace(g.outputs[2], replaces="p"))
        ),
        r"p was float32\[4\], becomes int64\[4\]",
    ),
    "written constant": (
        lambda g: replace(g, inputs=(replace(g.inputs[0], role=Role.RANDOM), *g.inputs[1:])),
        r"out0 replaces p, a random that no step may write",
    ),
}


def test_a_sound_graph_comes_back_as_it_is() -> None:
    graph = small()
    assert verify(graph, "capture") is graph


@pytest.mark.parametrize("kind", BROKEN)
def test_breakage_is_caught(kind: str) -> None:
    change, message = BROKEN[kind]
    graph = change(small())
    with pytest.raises(AssertionError, match=rf"after some-pass: {message}"):
        verify(graph, "some-pass")


def test_the_environment_turns_the_graph_verifier_off(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = replace(small(), constants={})
    monkeypatch.setitem(verify.__globals__, "SETTINGS", replace(SETTINGS, verify=False))
    assert verify(graph, "capture") is graph


def two_writes() -> Program:
    move = Move(0, (P,), (B,), (4,), (2,))
    task = Task(0, "all_reduce:p", "forward", (0,), (0,), move=move)
    return Program(
        0,
        placement("cpu", [0, 1]),
        (task,),
        (Register(0, "p", (4,), torch.float32),),
        (Port("p", 0),),
        (),
    )


def test_the_environment_turns_the_program_verifier_off(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = two_writes()
    with pytest.raises(AssertionError, match=r"task all_reduce:p writes registers \{0\} again"):
        program.verify(broken)
    monkeypatch.setitem(program.verify.__globals__, "SETTINGS", replace(SETTINGS, verify=False))
    assert program.verify(broken) is broken
