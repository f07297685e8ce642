"""Small step graphs for the tests of passes, verifier and text form, and their values by interpretation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from monoflow.graph.step_graph import Input, NodeInfo, Output, Phase, Role, StepGraph, meta_of


def built(
    function: Callable[..., Sequence[Tensor]],
    inputs: Mapping[str, tuple[Role, Tensor]],
    *,
    replaces: Sequence[str] = (),
) -> StepGraph:
    """The graph of `function` over the named inputs.

    Args:
        replaces: per output, the input whose next value it is ("" for a result); those left out are results.
    """
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        fakes = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            for _, value in inputs.values()
        ]
        graph = make_fx(function)(*fakes).graph
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["info"] = NodeInfo(Phase.FORWARD, "layer", "/home/user/project/model.py:7")
    results: Any = graph.output_node().args[0]
    replaced = [*replaces, *[""] * (len(results) - len(replaces))]
    return StepGraph(
        graph,
        tuple(Input(name, role, meta_of(value)) for name, (role, value) in inputs.items()),
        tuple(
            Output(f"out{number}", meta_of(node.meta["val"]), name)
            for number, (node, name) in enumerate(zip(results, replaced, strict=True))
        ),
        "small",
        "/home/user/project/train.py:3",
        {name: value for name, (role, value) in inputs.items() if role is Role.CONSTANT},
    )


def values(graph: StepGraph, *inputs: Tensor) -> list[Tensor]:
    """What the graph computes."""
    return list(fx.Interpreter(fx.GraphModule(nn.Module(), graph.graph)).run(*inputs))


def targets(graph: StepGraph) -> list[str]:
    """The ops of a graph in order, getitem left out: "mm", "add.Tensor"."""
    names = [str(node.target) for node in graph.calls() if isinstance(node.target, torch._ops.OpOverload)]
    return [name.removeprefix("aten.").removesuffix(".default") for name in names]
