"""A traced function without writes: every in-place op becomes its functional form, in sum form.

Private parts of torch used here: the functional wrappers of `torch.func.functionalize`, and the nodes that a
trace keeps for tensors. tests/null/test_functional.py fails when they move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, track_tensor

from ..graph.rewrite import add_call
from ..graph.step_graph import info_of, is_getitem
from .record import Recording
from .sum_form import table
from .writes import Written, writes

aten = torch.ops.aten

#: ops that functionalization replaces, beside views and writes
_REPLACED = (aten.lift.default, aten.lift_fresh_copy.default)


def functionalize(
    traced: fx.GraphModule,
    fakes: Sequence[torch.Tensor],
    batch_stats: str = "global",
    *,
    copy_nodes: bool = True,
) -> fx.GraphModule:
    """The same computation without writes, in sum form; a write to an input is one copy_ at the end.

    Args:
        fakes: what stands for each placeholder, in order.
        copy_nodes: whether nodes that stay as they are are copied, which takes a trace that holds no tensor
            of its own. The result is that of running every op again, sooner.
    """
    for node in reversed(traced.graph.nodes):
        if not node.users and not _is_kept(node):
            traced.graph.erase_node(node)
    forms = table(batch_stats)
    written = Written(traced.graph, fakes) if copy_nodes else None

    def run(*values: torch.Tensor) -> Any:
        replay = _Replay(traced, forms, written, [_node_of(value) for value in values])
        if not copy_nodes or not values:
            return replay(values)
        with fakes[0].fake_mode, Recording(others=forms):  # pyright: ignore[reportAttributeAccessIssue]
            return replay(values)

    with torch.no_grad(), _use_lazy_graph_module(True):
        made = make_fx(run, decomposition_table=forms)(*(fake.detach() for fake in fakes))
    for node in made.graph.nodes:
        # Views of what was written are taken anew after the last node has run.
        if node.op == "call_function" and "info" not in node.meta:
            node.meta["info"] = info_of(node.all_input_nodes[0])
    return made


def _is_kept(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or bool(writes(node.target))


class _Replay:
    """Runs a traced graph under another trace and hands each node's origin to the nodes it becomes.

    A node whose op stays what it is, whose results no op writes to before all have read them, and whose
    arguments look as they did, is copied with the fake values it has. Only the others run again: most of a
    model is copied.

    Args:
        written: tells what is written to; None if every node is to run.
        inputs: the placeholders of the trace that is under way.
    """

    def __init__(
        self,
        traced: fx.GraphModule,
        forms: Mapping[Any, Callable],
        written: Written | None,
        inputs: Sequence[fx.Node],
    ) -> None:
        self.traced, self.forms, self.written = traced, forms, written
        self.inputs = inputs
        self.ran: dict[fx.Node, Any] = {}  # values, wrapped for functionalization
        self.copies: dict[fx.Node, fx.Node] = {}
        self.names: dict[Any, str] = {}

    def __call__(self, values: Sequence[torch.Tensor]) -> Any:
        return torch.func.functionalize(self._run, remove="mutations")(*values)

    def _run(self, *values: torch.Tensor) -> Any:
        given = iter(zip(self.inputs, values, strict=True))
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                self.copies[node], self.ran[node] = next(given)
                if self.written is None or self.written.touches(node):
                    del self.copies[node]
            elif node.op == "call_function":
                self._run_node(node)
            elif node.op == "get_attr":
                self.ran[node] = getattr(self.traced, str(node.target))
        return fx.map_arg(self.traced.graph.output_node().args[0], self._value)

    def _run_node(self, node: fx.Node) -> None:
        proxies = get_proxy_mode()
        assert proxies is not None
        root = proxies.tracer.graph._root
        before = root.prev
        if not self._copied(node, proxies.tracer.graph):
            self.ran[node] = self._called(node)
        made = root.prev
        while made is not before and made is not root:
            made.meta["info"] = info_of(node)
            made = made.prev

    # --- nodes that run again -------------------------------------------------------------------------

    def _called(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)  # type: ignore[misc]
        result: Any = NotImplemented
        if node.target in self.forms:
            # Here, above functionalization: torch's decompositions write in place.
            result = self.forms[node.target](*args, **kwargs)
            for source in node.all_input_nodes if self.written is not None else ():
                kept = source not in self.copies or not _was_written(self._value(source))
                assert kept, f"{node} writes to {source}, and its op does not say so"
        if result is NotImplemented:
            target: Any = node.target
            result = target(*args, **kwargs)
        return result

    def _value(self, node: fx.Node) -> Any:
        """The value of a node, for an op that runs."""
        if node not in self.ran:
            self.ran[node] = self._wrapped(node.meta["val"], self.copies[node])
        return self.ran[node]

    def _wrapped(self, value: Any, copy: fx.Node) -> Any:
        """The fake value of a copied node as the trace under way knows it."""
        if not isinstance(value, torch.Tensor):
            return value
        tracer = get_proxy_mode().tracer  # pyright: ignore[reportOptionalMemberAccess]
        track_tensor(value, fx.Proxy(copy, tracer), constant=None, tracer=tracer)
        return _functorch._wrap_functional_tensor(value, _functorch.peek_interpreter_stack().level())

    # --- nodes that are copied ------------------------------------------------------------------------

    def _copied(self, node: fx.Node, graph: fx.Graph) -> bool:
        """Copies the node into the trace under way, if it is one to copy."""
        if self.written is None or not self._stays(node):
            return False
        sources = {source: self._source(source) for source in node.all_input_nodes}
        if not all(_looks_alike(source, copy) for source, copy in sources.items()):
            return False
        args, kwargs = fx.map_arg((node.args, node.kwargs), sources.__getitem__)  # type: ignore[misc]
        copy = add_call(graph, node.target, args, kwargs, self._name(node, graph))
        copy.meta["val"] = node.meta["val"]
        self.copies[node] = copy
        return True

    def _stays(self, node: fx.Node) -> bool:
        """Whether the op stays what it is, and nothing writes to what it gives while that is read."""
        assert self.written is not None
        if is_getitem(node):
            return node.args[0] in self.copies
        op = node.target
        return (
            isinstance(op, torch._ops.OpOverload)
            and op not in self.forms
            and op not in _REPLACED
            and not op._schema.is_mutable
            and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
            and all(x.layout is torch.strided for x in _tensors(node.meta["val"]))
            and not self.written.matters(node)
        )

    def _source(self, node: fx.Node) -> fx.Node | None:
        """The node that has the present value of an argument in the trace under way, if one has."""
        copy = self.copies.get(node)
        if copy is not None:
            return copy
        value = self.ran[node]
        return _node_of(_unwrapped(value)) if isinstance(value, torch.Tensor) else None

    def _name(self, node: fx.Node, graph: fx.Graph) -> str:
        """What a trace calls this op's nodes."""
        op: Any = node.target
        if op not in self.names:
            name = op.overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else op.__name__
            self.names[op] = graph._target_to_str(name)
        return self.names[op]


def _unwrapped(value: torch.Tensor) -> torch.Tensor:
    """The present value below a functional wrapper, pending writes to its memory applied."""
    if not torch._is_functional_tensor(value):  # pyright: ignore[reportPrivateImportUsage]
        return value
    torch._sync(value)  # pyright: ignore[reportPrivateImportUsage]
    return _functorch._unwrap_functional_tensor(value, True)


def _was_written(value: Any) -> bool:
    """Whether something was written to a functional wrapper."""
    return isinstance(value, torch.Tensor) and torch._functionalize_has_data_mutation(value)  # pyright: ignore


def _node_of(value: torch.Tensor) -> fx.Node:
    proxies = get_proxy_mode()
    assert proxies is not None
    slot: Any = get_proxy_slot(value, proxies.tracer)
    return slot.proxy.node


def _looks_alike(node: fx.Node, copy: fx.Node | None) -> bool:
    """Whether two nodes give one tensor each, of the same shape, strides, dtype and device."""
    if copy is None:
        return False
    before, after = node.meta["val"], copy.meta["val"]
    if before is after:
        return True
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.layout is not torch.strided or after.layout is not torch.strided:
        return False
    return (
        before.shape == after.shape
        and before.stride() == after.stride()
        and before.storage_offset() == after.storage_offset()
        and before.dtype == after.dtype
        and before.device == after.device
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    if isinstance(value, (list, tuple)):
        return [found for one in value for found in _tensors(one)]
    return [value] if isinstance(value, torch.Tensor) else []
