"""Repeated layers: which nodes of a step are copies of each other, so that they are decided once.

A unit is everything under one index of a module path, such as "h.3": the nodes of its forward, backward and
update, and its parameters and their state. Units under one prefix whose nodes are the same op for op, in the
same order, with the same shapes and the same wiring inside, are copies. The outermost index whose units
repeat counts. Units with a single weight do not: a stack of plain layers wants them laid out in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.step_graph import Role, StepGraph, info_of, is_getitem, metas_of

_FEWEST = 3  # units to be worth folding


@dataclass(frozen=True)
class Folding:
    """The classes of the nodes of a step.

    Attributes:
        first: node -> the first of its class, in topological order. A node without copies is its own.
        members: first of a class -> all of the class.
    """

    first: Mapping[fx.Node, fx.Node]
    members: Mapping[fx.Node, tuple[fx.Node, ...]]

    @property
    def num_classes(self) -> int:
        return len(self.members)


def fold(graph: StepGraph, enabled: bool = True) -> Folding:
    """Finds the repeated layers of a step.

    Args:
        enabled: False leaves every node on its own.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder" or _computes(node)]
    first = {node: node for node in nodes}
    if enabled:
        paths = {node: path for node, path in _paths(graph, nodes).items() if path}
        weights = {
            graph.placeholders[one.name]: None
            for one in graph.inputs
            if one.role is Role.PARAM and len(one.meta.shape) > 1
        }
        _fold_units(paths, weights, 0, {node: i for i, node in enumerate(nodes)}, first)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(first[node], []).append(node)
    return Folding(first, {one: tuple(all_of) for one, all_of in members.items()})


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_getitem(node)


def _paths(graph: StepGraph, nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[str, ...]]:
    """The module path of every node; of an input, its own name's."""
    names = {node: name for name, node in graph.placeholders.items()}
    state = (Role.PARAM, Role.BUFFER, Role.STATE, Role.GRAD)
    found = {}
    for node in nodes:
        if node.op == "placeholder":
            of_model = graph.input_of[names[node]].role in state
            found[node] = tuple(names[node].split(".")) if of_model else ()
        else:
            found[node] = tuple(filter(None, info_of(node).module.split(".")))
    return found


def _fold_units(
    paths: Mapping[fx.Node, tuple[str, ...]],
    weights: Mapping[fx.Node, None],
    depth: int,
    order: Mapping[fx.Node, int],
    first: dict[fx.Node, fx.Node],
) -> None:
    """Folds units by the next index in the paths from `depth` on; the ones inside where units differ."""
    units: dict[tuple[str, ...], list[fx.Node]] = {}
    for node, path in paths.items():
        at = next((i for i in range(depth, len(path)) if path[i].isdigit()), None)
        if at is not None:
            units.setdefault(path[: at + 1], []).append(node)
    alike: dict[tuple, list[tuple[str, ...]]] = {}
    for unit, nodes in units.items():
        if sum(node in weights for node in nodes) > 1:
            alike.setdefault((unit[:-1], _form(nodes, paths, len(unit))), []).append(unit)
    folded: set[tuple[str, ...]] = set()
    for copies in alike.values():
        if len(copies) >= _FEWEST:
            folded.update(copies)
            for same in zip(*(units[unit] for unit in copies), strict=True):
                first.update(dict.fromkeys(same, min(same, key=order.__getitem__)))
    for unit, nodes in units.items():
        if unit not in folded:
            _fold_units({node: paths[node] for node in nodes}, weights, len(unit), order, first)


def _form(nodes: Sequence[fx.Node], paths: Mapping[fx.Node, tuple[str, ...]], depth: int) -> tuple:
    """What a unit computes, whatever its index and names."""
    number = {node: i for i, node in enumerate(nodes)}
    return tuple(
        (
            node.op,
            node.target if node.op == "call_function" else "",
            info_of(node).phase if node.op == "call_function" else "",
            paths[node][depth:],
            metas_of(node),
            _argument((_arguments(node), tuple(node.kwargs.items())), number),
        )
        for node in nodes
    )


def _arguments(node: fx.Node) -> tuple:
    """The arguments that say what a node computes: not which of a step's random streams it draws from."""
    if node.op == "placeholder" or getattr(node.target, "namespace", "") != "monoflow":
        return node.args
    names = [one.name for one in node.target._schema.arguments]  # pyright: ignore
    return tuple(value for name, value in zip(names, node.args, strict=False) if name != "op")


def _argument(value: Any, number: Mapping[fx.Node, int]) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, (list, tuple)):
        return tuple([_argument(one, number) for one in value])
    if isinstance(value, fx.Node):
        path: tuple[Any, ...] = ()
        while is_getitem(value):
            value, path = value.args[0], (value.args[1], *path)
        return ("node", number[value], path) if value in number else "outside"
    return "number" if isinstance(value, float) else repr(value)  # no layout depends on it
