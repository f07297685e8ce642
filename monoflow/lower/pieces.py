"""Cuts a task into pieces to compile, at the borders of repeated layers: equal layers are equal pieces.

Updates in place, and what depends on the number of the micro-batch, stay calls between the pieces: torch has
fused kernels for the first. Random ops draw from generators that one call sets up for the whole task: their
numbers are then no part of a piece.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..graph.step_graph import leaves_of
from ..runtime.program import TIME, task_module
from ..sbp.ops import bits, normal, uniform
from ..sbp.ops.random import draw, lanes, states
from .local import update_in_place
from .touched_rows import adagrad_rows, sgd_rows

Tensor = torch.Tensor

#: Layers with fewer ops than this are not worth a border, and pieces with fewer than that no compilation.
_LEAST_OPS = 16
_LEAST_COMPILED = 6
#: Gradients that wait for a piece to end may be this part of all tensors that the task is given.
_WAITING_SHARE = 1 / 16
_LEAST_WAITING = 1 << 20

#: Calls that write what they are given, and the place of their first list.
UPDATES: Mapping[Any, int] = {update_in_place: 1, sgd_rows: 4, adagrad_rows: 4}

_KINDS: Mapping[Any, str] = {uniform: "uniform", normal: "normal", bits: "bits"}


class Look(NamedTuple):
    """What a tensor looks like from outside."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Look:
        return Look(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """A tensor that looks so."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(eq=False)
class Piece:
    """A part of a task, a function from the list of its inputs to the list of its outputs (`task_module`).

    Attributes:
        nodes: of the task's graph, in order.
        is_call: whether it is called op by op and not compiled.
        inputs: nodes of the task's graph; `outputs`, too.
        key: equal for pieces of equal structure.
    """

    nodes: list[fx.Node]
    is_call: bool = False
    inputs: list[fx.Node] = field(init=False)
    outputs: list[fx.Node] = field(init=False)
    key: tuple = field(init=False)

    def finished(self) -> Piece:
        """Works out what goes in and out of its nodes, now that all are there."""
        own = set(self.nodes)
        self.inputs = list(dict.fromkeys(x for n in self.nodes for x in n.all_input_nodes if x not in own))
        self.outputs = [node for node in self.nodes if any(user not in own for user in node.users)]
        self.key = _key(self)
        return self

    @cached_property
    def module(self) -> fx.GraphModule:
        """Its nodes alone. Who has code for them never asks."""
        graph, env = fx.Graph(), {}
        for node in self.inputs:
            env[node] = graph.placeholder(node.target if node.target == TIME else node.name)  # type: ignore[arg-type]
            env[node].meta["val"] = node.meta["val"]
        for node in self.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output([env[node] for node in self.outputs])
        return task_module(graph)


def prepared(module: fx.GraphModule, inputs: Sequence[Look]) -> fx.Graph:
    """A copy of a task's graph, with generators set up apart, and with fake tensors in `meta["val"]`.

    Args:
        inputs: what the task's inputs look like.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    graph.output(result)
    _set_up_generators(graph)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [look.empty() for look in inputs]
    given = iter(fakes)
    ordered = [0 if node.target == TIME else next(given) for node in graph.find_nodes(op="placeholder")]
    with mode, torch.no_grad():
        _Shapes(fx.GraphModule(torch.nn.Module(), graph), garbage_collect_values=False).run(*ordered)
    return graph


class _Shapes(fx.Interpreter):
    """Runs a graph on fake tensors and keeps them."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["val"] = result
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in UPDATES:
            return args[UPDATES[target] :]
        return super().call_function(target, args, kwargs)


def generators(key: Tensor, sites: Sequence[Sequence[tuple[int, int]]]) -> list[Tensor]:
    """The generators of each random op under a key, from the (op, lane) that it draws from."""
    found = states(key, [one for site in sites for one in site])
    return list(found.split([len(site) for site in sites]))


def draw_at_once(kind: str, state: Tensor, shape: Sequence[int], **options: Any) -> Tensor:
    """A random op as ops on all its elements, which a compiler cuts into blocks."""
    return draw(kind, state, shape, **options, chunk=max(1, prod(shape)))


def _set_up_generators(graph: fx.Graph) -> None:
    sites: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in _KINDS and not any(x.target == TIME for x in node.all_input_nodes):
            sites.setdefault(node.args[0], []).append(node)
    placeholders = graph.find_nodes(op="placeholder")
    for key, nodes in sites.items():
        kinds = [_KINDS[node.target] for node in nodes]
        drawn = [lanes(kind, node.args[1]) for kind, node in zip(kinds, nodes, strict=True)]  # type: ignore[arg-type]
        with graph.inserting_after(placeholders[-1] if key.op == "placeholder" else key):
            call = graph.call_function(generators, (key, drawn))
        last = call
        for number, (kind, node) in enumerate(zip(kinds, nodes, strict=True)):
            with graph.inserting_after(last):
                last = state = graph.call_function(operator.getitem, (call, number))
            node.target, node.args = draw_at_once, (kind, state, *node.args[2:])


def cut(graph: fx.Graph, layer_of: Callable[[str], str | None]) -> list[Piece]:
    """The pieces of a prepared graph, in the order in which they run.

    Args:
        layer_of: from a node's name to the repeated layer that it belongs to, "" for none; None for a name
            that is not known.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    layers = _layers(nodes, layer_of)
    given = sum(map(_num_bytes, graph.find_nodes(op="placeholder")))
    limit = max(_LEAST_WAITING, int(_WAITING_SHARE * given))
    pieces: list[Piece] = []
    pending: list[fx.Node] = []  # updates of the piece that is being filled
    where: dict[fx.Node, Piece] = {}
    layer, waiting, open_ = "", 0, False

    def close() -> None:
        nonlocal waiting, open_
        if pending:
            pieces.append(Piece(list(pending), is_call=True))
            where.update(dict.fromkeys(pending, pieces[-1]))
            pending.clear()
        waiting, open_ = 0, False

    for node in nodes:
        if node.target is operator.getitem and node.args[0] in where:
            where[node] = where[node.args[0]]  # type: ignore[index]
            where[node].nodes.append(node)
        elif node.target in UPDATES or (node.target is operator.getitem and node.args[0] in pending):
            pending.append(node)
            waiting += sum(map(_num_bytes, node.all_input_nodes)) if node.target in UPDATES else 0
            if waiting > limit:
                close()
        elif _stays_call(node):
            close()
            pieces.append(Piece([node], is_call=True))
            where[node] = pieces[-1]
        else:
            if not open_ or layers[node] != layer:
                close()
                pieces.append(Piece([]))
                layer, open_ = layers[node], True
            where[node] = pieces[-1]
            pieces[-1].nodes.append(node)
    close()
    return _joined(pieces)


def _stays_call(node: fx.Node) -> bool:
    return node.target is generators or any(one.target == TIME for one in node.all_input_nodes)


def layer_of_module(name: str) -> str:
    """The repeated layer of a module: its name up to the first number in it; "" where there is none."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return found[0] if found else ""


def _layers(nodes: Sequence[fx.Node], layer_of: Callable[[str], str | None]) -> dict[fx.Node, str]:
    """Every node's layer. What is not known goes with what runs before it."""
    found: dict[fx.Node, str] = {}
    last = ""
    for node in nodes:
        known = layer_of(node.name)
        last = last if known is None else known
        found[node] = last
    sizes = Counter(found.values())
    kept = {node: layer if sizes[layer] >= 2 * _LEAST_OPS else "" for node, layer in found.items()}
    return _bridged(kept)


def _bridged(layers: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """A few ops of no layer within one are that layer's."""
    runs = [(layer, list(nodes)) for layer, nodes in groupby(layers, key=layers.__getitem__)]
    found: dict[fx.Node, str] = {}
    for at, (layer, nodes) in enumerate(runs):
        around = {runs[at - 1][0], runs[at + 1][0]} if 0 < at < len(runs) - 1 else set()
        is_within = not layer and len(around) == 1 and len(nodes) < _LEAST_COMPILED
        found |= dict.fromkeys(nodes, around.pop() if is_within else layer)
    return found


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Puts neighbours together that have no like; leaves the smallest pieces uncompiled."""
    pieces = _split([piece.finished() for piece in pieces])
    count = Counter(piece.key for piece in pieces)
    pieces = _together(pieces, lambda piece: not piece.is_call and count[piece.key] == 1)
    for piece in pieces:
        piece.is_call |= len(piece.nodes) < _LEAST_COMPILED
    return [piece for piece in pieces if piece.outputs or piece.is_call]


def _split(pieces: Sequence[Piece]) -> list[Piece]:
    """Cuts off what follows in a piece that begins as others do, such as gradients of the model's input."""
    count = Counter(piece.key for piece in pieces if not piece.is_call)
    several = {key: piece for piece in pieces if count[key := piece.key] > 1}
    lengths = sorted({len(piece.nodes) for piece in several.values()}, reverse=True)
    made: list[Piece] = []
    for piece in pieces:
        made.append(piece)
        if piece.is_call or piece.key in several:
            continue
        for length in (one for one in lengths if one < len(piece.nodes)):
            first = Piece(piece.nodes[:length]).finished()
            if first.key in several:
                made[-1:] = first, Piece(piece.nodes[length:]).finished()
                break
    return made


def _together(pieces: Sequence[Piece], belong: Callable[[Piece], bool]) -> list[Piece]:
    """The pieces, neighbours put together that both belong."""
    made: list[Piece] = []
    for does, group in groupby(pieces, key=belong):
        if does:
            made.append(Piece([node for piece in group for node in piece.nodes]).finished())
        else:
            made += group
    return made


def _key(piece: Piece) -> tuple:
    numbers = {node: number for number, node in enumerate([*piece.inputs, *piece.nodes])}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", numbers[value]
        if isinstance(value, (list, tuple)):
            return type(value).__name__, *map(plain, value)
        if isinstance(value, dict):
            return "dict", *((key, plain(one)) for key, one in value.items())
        if isinstance(value, slice):
            return "slice", value.start, value.stop, value.step
        if isinstance(value, Tensor):
            return Itself(value)
        return type(value), repr(value)  # 0.0 is not -0.0, and 1 not True

    return (
        tuple(_look(node.meta["val"]) for node in piece.inputs),
        tuple((_function_key(n.target), plain(n.args), plain(n.kwargs)) for n in piece.nodes),
        tuple(numbers[node] for node in piece.outputs),
    )


def _look(value: Any) -> tuple:
    return tuple(Look.of(one) if isinstance(one, Tensor) else (type(one), one) for one in leaves_of(value))


def _function_key(function: Any) -> Any:
    """Equal for functions that do the same: of one code, and with equal values in their closures."""
    if isinstance(function, partial):
        keywords = tuple((name, _value_key(one)) for name, one in sorted(function.keywords.items()))
        return "partial", _function_key(function.func), tuple(map(_value_key, function.args)), keywords
    if isinstance(function, FunctionType) and (function.__closure__ or function.__defaults__):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return function.__code__, tuple(map(_value_key, [*cells, *(function.__defaults__ or ())]))
    return function


def _value_key(value: Any) -> Any:
    if isinstance(value, (FunctionType, partial)):
        return _function_key(value)
    if isinstance(value, (list, tuple)):
        return type(value), *map(_value_key, value)
    if isinstance(value, dict):
        return dict, *((key, _value_key(one)) for key, one in value.items())
    if isinstance(value, Hashable) and not isinstance(value, Tensor):
        return type(value), value, repr(value)
    return Itself(value)


@dataclass(frozen=True, eq=False)
class Itself:
    """What nothing else is like, in this run or another."""

    value: Any = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
