"""Values that a step can know while it is captured: those that depend on no input at all.

`nn.Transformer` compares the mask that it is given with a causal one to pick a kernel. Where the mask was
made inside the step, both come from sizes alone, so the branch is the same in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

#: elements of a tensor that is computed for real; a larger one counts as unknown
_LARGEST = 1 << 24
_LIFTS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


def known_value(func: Callable, args: Sequence[Any], tracer: Any) -> Any:
    """`func(*args)` for real, if every tensor among `args` is known; None if one is not."""
    nodes = []
    for value in args:
        slot = get_proxy_slot(value, tracer, None, lambda one: one.proxy) if _is_tensor(value) else None
        if _is_tensor(value) and slot is None:
            return None
        nodes.append(slot.node if slot is not None else value)
    values = _known(tracer)
    if values is None or any(isinstance(node, fx.Node) and node not in values for node in nodes):
        return None
    with _disable_current_modes():
        return func(*(values[node] if isinstance(node, fx.Node) else node for node in nodes))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _known(tracer: Any) -> dict[fx.Node, Any] | None:
    """The values of all nodes so far that depend on no input; None if an unknown one is written into them."""
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes():
        for node in tracer.graph.nodes:
            sources = node.all_input_nodes
            if node.op == "get_attr":
                if all(user.target in _LIFTS for user in node.users):  # torch.tensor(1.0), not a closure
                    values[node] = getattr(tracer.root, node.target)
                continue
            known = node.op == "call_function" and all(source in values for source in sources)
            if known and _is_foldable(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            elif _writes(node) and any(source in values for source in sources):
                return None
    return values


def _is_foldable(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    value = node.meta.get("val")
    small = not isinstance(value, torch.Tensor) or value.numel() <= _LARGEST
    return small and torch.Tag.nondeterministic_seeded not in tags


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
