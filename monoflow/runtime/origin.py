"""Which op of a task failed: the line of generated code in the trace leads to its node."""

from __future__ import annotations

from types import TracebackType

from torch import fx


def failing_node(module: fx.GraphModule, trace: TracebackType | None) -> str:
    """The name of the node of a task's function that raised; "" where the trace does not tell."""
    line, code = None, type(module).forward.__code__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            line = trace.tb_lineno
        trace = trace.tb_next
    nodes = list(module.graph.nodes)
    positions = getattr(module, "_lineno_map", None) or {}
    position = positions.get(line - getattr(module, "_prologue_start", 0)) if line is not None else None
    return "" if position is None or position >= len(nodes) else nodes[position].name
