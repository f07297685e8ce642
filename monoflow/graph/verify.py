"""The verifier of StepGraphs: what every pass and the planner may rely on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..config import SETTINGS
from .step_graph import NodeInfo, Role, StepGraph, is_getitem, leaves_of, metas_of


def verify(graph: StepGraph, after: str) -> StepGraph:
    """Returns `graph` if it is well formed; an AssertionError names what the stage `after` broke.

    MONOFLOW_VERIFY=0 turns it off.
    """
    if not SETTINGS.verify:
        return graph
    try:
        _verify_nodes(graph)
        _verify_inputs(graph)
        _verify_outputs(graph)
    except AssertionError as error:
        raise AssertionError(f"after {after}: {error}") from None
    return graph


def _verify_nodes(graph: StepGraph) -> None:
    seen: set[fx.Node] = set()
    for node in graph.graph.nodes:
        for source in node.all_input_nodes:
            assert source in seen, f"{node} runs before {source}, which it reads"
            assert node in source.users, f"{source} does not know its user {node}"
        seen.add(node)
        if node.op == "call_function":
            _verify_call(node)
        else:
            assert node.op in ("placeholder", "output"), f"{node} is a {node.op}"
    _verify_unique("node", [node.name for node in graph.graph.nodes])


def _verify_call(node: fx.Node) -> None:
    assert isinstance(node.meta.get("info"), NodeInfo), f"{node} has no origin"
    assert "val" in node.meta, f"{node} has no fake value"
    for value in leaves_of((node.args, node.kwargs, node.meta["val"])):
        if isinstance(value, torch.Tensor):
            assert isinstance(value, FakeTensor), f"{node} holds a tensor with values; make it an input"
    if is_getitem(node):
        _verify_getitem(node)
        return
    assert isinstance(node.target, torch._ops.OpOverload), f"{node} calls {node.target}, no registered op"
    assert not node.target._schema.is_mutable, f"{node} writes in place by {node.target}"


def _verify_getitem(node: fx.Node) -> None:
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int), f"{node} picks {index} of {source}"
    values: Any = source.meta["val"]
    assert isinstance(values, (list, tuple)), f"{node} picks an output of {source}, which gives one tensor"
    assert 0 <= index < len(values), f"{node} picks output {index} of {source}, which gives {len(values)}"
    there = [_describe(value) for value in leaves_of(values[index])]
    here = [_describe(value) for value in leaves_of(node.meta["val"])]
    assert here == there, f"{node} is {here}, what it picks is {there}"


def _describe(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _verify_inputs(graph: StepGraph) -> None:
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(graph.inputs), (
        f"{len(placeholders)} placeholders stand for {len(graph.inputs)} inputs"
    )
    _verify_unique("input", [one.name for one in graph.inputs])
    for one, node in zip(graph.inputs, placeholders, strict=True):
        assert metas_of(node) == (one.meta,), f"input {one.name} is {_text(metas_of(node))}, not {one.meta}"
        if one.role is Role.CONSTANT:
            value = graph.constants.get(one.name)
            assert value is not None, f"constant {one.name} has no value"
            assert _describe(value) == (one.meta.shape, one.meta.dtype), (
                f"constant {one.name} is {_describe(value)}, not {one.meta}"
            )


def _verify_outputs(graph: StepGraph) -> None:
    assert len(graph.results) == len(graph.outputs), (
        f"{len(graph.results)} results stand for {len(graph.outputs)} outputs"
    )
    _verify_unique("output", [one.name for one in graph.outputs])
    _verify_unique("next value of", [one.replaces for one in graph.outputs if one.replaces])
    for one, node in zip(graph.outputs, graph.results, strict=True):
        assert metas_of(node) == (one.meta,), f"output {one.name} is {_text(metas_of(node))}, not {one.meta}"
        if one.replaces in graph.input_of:
            before = graph.input_of[one.replaces]
            assert before.meta == one.meta, f"{one.replaces} was {before.meta}, becomes {one.meta}"
            assert before.role not in (Role.CONSTANT, Role.RANDOM), (
                f"{one.name} replaces {one.replaces}, a {before.role} that no step may write"
            )


def _verify_unique(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        assert name not in seen, f"{what} {name} appears twice"
        seen.add(name)


def _text(metas: Iterable[Any]) -> str:
    return ", ".join(map(str, metas))
