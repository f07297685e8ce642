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


class KnownValues:
    """The values of a trace's nodes that depend on no input, kept from one look to the next."""

    def __init__(self) -> None:
        self._values: dict[fx.Node, Any] = {}
        self._last: fx.Node | None = None
        self._lost = False

    def value(self, func: Callable, args: Sequence[Any], tracer: Any) -> Any:
        """`func(*args)` for real, if every tensor among `args` is known; None if one is not."""
        nodes = []
        for value in args:
            slot = get_proxy_slot(value, tracer, None, lambda one: one.proxy) if _is_tensor(value) else None
            if _is_tensor(value) and slot is None:
                return None
            nodes.append(slot.node if slot is not None else value)
        self._follow(tracer)
        values = self._values
        if self._lost or any(isinstance(node, fx.Node) and node not in values for node in nodes):
            return None
        with _disable_current_modes():
            return func(*(values[node] if isinstance(node, fx.Node) else node for node in nodes))

    def _follow(self, tracer: Any) -> None:
        """Runs the nodes that are new since the last look, writes to known values included, in order.

        An unknown value that is written into a known one ends all knowledge: views of it changed as well.
        """
        root = tracer.graph._root
        node = self._last
        if node is None or node.graph is not tracer.graph:
            self._values, node, self._lost = {}, root, False
        with _disable_current_modes():
            while not self._lost and node.next is not root:
                node = node.next
                self._run(node, tracer)
        self._last = node

    def _run(self, node: fx.Node, tracer: Any) -> None:
        values = self._values
        target: Any = node.target
        if target in _LIFTS:  # torch.tensor(1.0), not a closure: those are used as they are
            (literal,) = node.all_input_nodes
            if literal.op == "get_attr":
                values[node] = target(getattr(tracer.root, str(literal.target)))
                return
        known = node.op == "call_function" and all(source in values for source in node.all_input_nodes)
        if known and _is_foldable(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = target(*args, **kwargs)
        elif _writes(node):
            self._lost = any(source in values for source in node.all_input_nodes)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_foldable(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    value = node.meta.get("val")
    small = not isinstance(value, torch.Tensor) or value.numel() <= _LARGEST
    return small and torch.Tag.nondeterministic_seeded not in tags


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
