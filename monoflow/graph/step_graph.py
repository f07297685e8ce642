"""StepGraph: the captured step as one functional graph with roles on its inputs and outputs."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import fx

from ..errors import FlowError
from ..sbp.signature import OpCall, TensorMeta
from .serial import decode_graph, encode_graph

_FORMAT = "monoflow step graph 1"


class Role(StrEnum):
    """What an input of the step is."""

    PARAM = "param"
    BUFFER = "buffer"
    STATE = "state"  # an optimizer's state of one parameter
    GRAD = "grad"  # a parameter's .grad, where the step reads or leaves one
    HYPER = "hyper"  # a hyper-parameter that may change between steps, such as the learning rate
    RANDOM = "random"  # the key that every random op of this step derives from
    BATCH = "batch"  # an argument of the step function
    CONSTANT = "constant"  # a tensor that the step closes over; read, never written


class Phase(StrEnum):
    """Which part of the step a node belongs to."""

    PROLOGUE = "prologue"  # counts that depend on the batch alone, over the whole batch
    FORWARD = "forward"
    RECOMPUTE = "recompute"  # forward work that is done again for backward
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class NodeInfo:
    """Where a node comes from.

    Attributes:
        phase: the part of the step.
        module: qualified name of the module whose forward ran, "" outside any.
        source: "file:line" of the user's (or the model library's) own code.
        sequence: autograd's number, shared by a forward node and its backward nodes; -1 if none.
    """

    phase: Phase = Phase.FORWARD
    module: str = ""
    source: str = ""
    sequence: int = -1


@dataclass(frozen=True)
class Input:
    """One placeholder. `of` names the parameter that a state or gradient belongs to."""

    name: str
    role: Role
    meta: TensorMeta
    of: str = ""


@dataclass(frozen=True)
class Output:
    """One result. `replaces` names the input whose next value it is; "" for what the user gets.

    `observed` outputs (a parameter's gradient as the optimizer sees it) are computed only when asked for.
    State changes only if all `checked` outputs, which are scalars, are finite.
    """

    name: str
    meta: TensorMeta
    replaces: str = ""
    observed: bool = False
    checked: bool = False


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A functional fx graph: placeholders in the order of `inputs`, results in the order of `outputs`.

    Node targets are op overloads and operator.getitem. Every node has `meta["val"]` (fake tensors) and
    `meta["info"]` (NodeInfo). The graph is never changed after it is made: a pass returns a new one. While it
    is made, it is a `draft`: its only holder hands it from pass to pass, and each may edit it in place.
    """

    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    name: str = "step"
    source: str = ""
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    draft: bool = False

    @cached_property
    def input_of(self) -> dict[str, Input]:
        """Inputs by name."""
        return {one.name: one for one in self.inputs}

    @cached_property
    def placeholders(self) -> dict[str, fx.Node]:
        """Placeholder nodes by input name."""
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        return {one.name: node for one, node in zip(self.inputs, nodes, strict=True)}

    @cached_property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that give the outputs, in order."""
        return tuple(self.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]

    def calls(self) -> Iterator[fx.Node]:
        """Nodes that compute, in topological order (getitem included)."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def text(self) -> str:
        """The graph for people: roles, then one line a node with its shape, phase, module and source."""
        lines = [f"StepGraph {self.name} ({_short(self.source)})"]
        for one, node in zip(self.inputs, self.placeholders.values(), strict=True):
            lines.append(f"  %{node.name}: {one.meta} = {one.role} {one.name!r}")
        for node in self.calls():
            info = info_of(node)
            shapes = ", ".join(str(meta) if meta else "-" for meta in metas_of(node))
            arguments = ", ".join(
                [*map(_text, node.args), *(f"{k}={_text(v)}" for k, v in node.kwargs.items())]
            )
            where = " ".join(filter(None, (str(info.phase), info.module, _short(info.source))))
            lines.append(f"  %{node.name}: {shapes} = {op_name(node.target)}({arguments})  # {where}")
        for one, node in zip(self.outputs, self.results, strict=True):
            role = "next" if one.replaces else "observed" if one.observed else "result"
            lines.append(f"  return %{node.name} as {role} {(one.replaces or one.name)!r}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the graph as JSON; constants' values, where it has any, to `path`.safetensors beside it."""
        data = {
            "format": _FORMAT,
            "name": self.name,
            "source": self.source,
            "inputs": [{"name": one.name, "role": one.role, "of": one.of} for one in self.inputs],
            "nodes": encode_graph(self.graph, lambda node: {"info": asdict(info_of(node))}),
            "outputs": [
                {
                    "name": one.name,
                    "node": node.name,
                    "replaces": one.replaces,
                    "observed": one.observed,
                    "checked": one.checked,
                }
                for one, node in zip(self.outputs, self.results, strict=True)
            ],
        }
        if self.constants:
            values = {
                key: one.detach().cpu().clone(memory_format=torch.contiguous_format)
                for key, one in self.constants.items()
            }
            save_file(values, _constants_path(path))
        Path(path).write_text(json.dumps(data, indent=1, allow_nan=False))

    @staticmethod
    def load(path: str | Path) -> StepGraph:
        """Reads a saved graph. Nodes get fake tensors, constants their values.

        Raises:
            FlowError: the file is no saved graph, or one that this version or this torch does not understand.
        """
        try:
            data = json.loads(Path(path).read_text())
            found = data["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise FlowError(f"{path} is not a saved step graph ({error})") from None
        if found != _FORMAT:
            raise FlowError(f"{path} has format {found!r}, this version reads {_FORMAT!r}; capture it again")
        try:
            return _built(data, _load_constants(path, data["inputs"]))
        except FlowError as error:
            raise FlowError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FlowError(f"{path} is damaged: {type(error).__name__} {error}") from error


def _constants_path(path: str | Path) -> Path:
    return Path(f"{path}.safetensors")


def _load_constants(path: str | Path, inputs: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    names = {one["name"] for one in inputs if one["role"] == Role.CONSTANT}
    if not names:
        return {}
    beside = _constants_path(path)
    try:
        values = load_file(beside)
    except (OSError, SafetensorError) as error:
        raise FlowError(f"the values of its constants cannot be read from {beside} ({error})") from None
    if values.keys() != names:
        raise FlowError(f"{beside} holds constants {sorted(values)}, the graph has {sorted(names)}")
    return values


def _built(data: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> StepGraph:
    def origin(record: dict[str, Any]) -> dict[str, Any]:
        info = record["info"]
        return {"info": NodeInfo(Phase(info["phase"]), info["module"], info["source"], info["sequence"])}

    graph = decode_graph(data["nodes"], origin)
    nodes = {node.name: node for node in graph.nodes}
    results = tuple(nodes[one["node"]] for one in data["outputs"])
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    graph.output(results)
    wheres = {
        one["name"]: node.meta["val"].device for one, node in zip(data["inputs"], placeholders, strict=True)
    }
    return StepGraph(
        graph,
        tuple(
            Input(one["name"], Role(one["role"]), meta_of(node.meta["val"]), one["of"])
            for one, node in zip(data["inputs"], placeholders, strict=True)
        ),
        tuple(
            Output(
                one["name"],
                meta_of(node.meta["val"]),
                one["replaces"],
                one["observed"],
                one["checked"],
            )
            for one, node in zip(data["outputs"], results, strict=True)
        ),
        data["name"],
        data["source"],
        {name: value.to(wheres[name]) for name, value in constants.items()},
    )


def info_of(node: fx.Node) -> NodeInfo:
    """Where the node comes from."""
    return node.meta.get("info", _NO_INFO)


_NO_INFO = NodeInfo()


def is_getitem(node: fx.Node) -> bool:
    """Whether the node only picks one output of a multi-output op."""
    return node.op == "call_function" and node.target is operator.getitem


def output_paths(node: fx.Node) -> list[tuple[int, ...]]:
    """For every tensor output, in flattened order, the getitem indices that lead to it."""

    def walk(value: Any, path: tuple[int, ...]) -> list[tuple[int, ...]]:
        if isinstance(value, (list, tuple)):
            return [found for i, one in enumerate(value) for found in walk(one, (*path, i))]
        return [path]

    return walk(node.meta["val"], ())


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The op that computes a tensor and which of its outputs it is, seen through getitem."""
    path: list[int] = []
    while is_getitem(node):
        path.insert(0, node.args[1])  # pyright: ignore[reportArgumentType]
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return (node, output_paths(node).index(tuple(path))) if path else (node, 0)


def meta_of(value: torch.Tensor) -> TensorMeta:
    """Shape and dtype of a tensor."""
    return TensorMeta(tuple(value.shape), value.dtype)


def metas_of(node: fx.Node) -> tuple[TensorMeta | None, ...]:
    """Shape and dtype of every tensor output of a node; None for an absent one."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return (meta_of(value),)
    return tuple(meta_of(x) if isinstance(x, torch.Tensor) else None for x in leaves_of(value))


def tensor_args(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor arguments of a node in flattened order, repeats included."""
    return tuple([x for x in leaves_of((node.args, node.kwargs)) if isinstance(x, fx.Node)])


def leaves_of(tree: Any) -> list[Any]:
    """What lists, tuples and dicts hold, in order. What fx allows as arguments needs no more than that."""
    found: list[Any] = []
    _collect((tree,), found)
    return found


def _collect(trees: Iterable[Any], found: list[Any]) -> None:
    for one in trees:
        if isinstance(one, (list, tuple)):
            _collect(one, found)
        elif isinstance(one, dict):
            _collect(one.values(), found)
        else:
            found.append(one)


def op_call(node: fx.Node) -> OpCall:
    """The node as a rule sees it."""

    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: metas_of(one)[0])  # type: ignore[misc]
    return OpCall(node.target, args, kwargs, metas_of(node))  # pyright: ignore[reportArgumentType]


def op_name(target: Any) -> str:
    """`aten.mm.default` for an overload, the plain name for a Python function."""
    return (
        str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    )


def _short(source: str) -> str:
    """A "path:line" with the last two parts of its path."""
    return "/".join(PurePath(source).parts[-2:])


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
