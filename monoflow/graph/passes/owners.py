"""name-owners: nodes around an update are filed under the module whose parameter they serve.

No module's forward runs while gradients are accumulated or clipped and optimizers step. A planner that
compares the layers of a model wants their updates along with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from ..rewrite import editable
from ..step_graph import Phase, StepGraph, info_of


def name_owners(graph: StepGraph) -> StepGraph:
    """Gives every backward and update node without a module the one that it serves.

    That is the owner of the only parameter whose value, state or accumulated gradient leads to it; where none
    does, the only module whose gradients lead to it. What serves several (the norm of all gradients) stays
    without one.
    """
    edited = editable(graph)
    placeholders = [node for node in edited.nodes if node.op == "placeholder"]
    params = {node: one.of for one, node in zip(graph.inputs, placeholders, strict=True) if one.of}
    modules: dict[fx.Node, str] = {}
    for node in edited.nodes:
        info = info_of(node)
        if node.op != "call_function" or info.phase not in (Phase.BACKWARD, Phase.UPDATE):
            continue
        if not info.module:
            sources = node.all_input_nodes
            param = _only(params[source] for source in sources if source in params)
            if param:
                params[node] = param
            found = param.rpartition(".")[0] or _only(modules.get(source, "") for source in sources)
            if not found:
                continue
            info = node.meta["info"] = replace(info, module=found)
        modules[node] = info.module
    return replace(graph, graph=edited)


def _only(names: Iterable[str]) -> str:
    """The one name among those that are not empty; "" if there are several, or none."""
    found = {name for name in names if name}
    return found.pop() if len(found) == 1 else ""
