"""Which inputs and ops of a step a user means by a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import fx

from ..graph.step_graph import Role, StepGraph, info_of, is_getitem

_MOST_NEAR = 8


def matching(graph: StepGraph, pattern: str) -> Iterator[fx.Node]:
    """Inputs, then ops, that a pattern means.

    Args:
        pattern: a module such as "layers.3.mlp", wherever it lies in the model, for all that it holds; the
            name of an input or a node; or any of these with `*`. The optimizer's state goes by its own names.
    """
    for name, node in graph.placeholders.items():
        is_model = graph.input_of[name].role in (Role.PARAM, Role.BUFFER)
        if fnmatchcase(name, pattern) or (is_model and _lies_in(name, pattern)):
            yield node
    for node in graph.calls():
        if not is_getitem(node):
            module = info_of(node).module
            if fnmatchcase(node.name, pattern.removeprefix("%")) or (module and _lies_in(module, pattern)):
                yield node


def near(graph: StepGraph, pattern: str) -> list[str]:
    """Names of modules, inputs and nodes, and parts of them, that are like a pattern."""
    modules = (info_of(node).module for node in graph.calls())
    known = {part: None for name in dict.fromkeys([*modules, *graph.placeholders]) for part in _parts(name)}
    known |= {node.name: None for node in graph.calls() if not is_getitem(node)}
    return difflib.get_close_matches(pattern, list(known), n=_MOST_NEAR, cutoff=0.5)


def _lies_in(path: str, pattern: str) -> bool:
    """Whether the parts of a pattern stand in a dotted path, one after the other."""
    parts, wanted = path.split("."), pattern.split(".")
    return any(
        all(fnmatchcase(part, one) for part, one in zip(parts[at:], wanted, strict=False))
        for at in range(len(parts) - len(wanted) + 1)
    )


def _parts(name: str) -> Iterator[str]:
    """A dotted name and every run of its parts, the whole first."""
    parts = name.split(".") if name else []
    for start in range(len(parts)):
        for stop in range(len(parts), start, -1):
            yield ".".join(parts[start:stop])
