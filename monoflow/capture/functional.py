"""A traced function without writes: every in-place op becomes its functional form, in sum form.

Private parts of torch used here: the functional wrappers of `torch.func.functionalize`, its interpreter, and
the nodes that a trace keeps for tensors. tests/null/test_functional.py fails when they move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as below_functionalization
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    snapshot_fake,
    track_tensor,
)

from ..graph.rewrite import add_call
from ..graph.step_graph import info_of, is_getitem
from .record import Recording
from .sum_form import table
from .writes import Written, functional_form, writes

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

    placeholders = (node for node in traced.graph.nodes if node.op == "placeholder")
    inputs = dict(zip(placeholders, fakes, strict=True))
    # The others need no trace to follow them: it takes longer over an input than over any other node.
    followed = [node for node in inputs if written is None or not written.is_renamed(node)]

    def run(*values: torch.Tensor) -> Any:
        recording = Recording(others=forms)
        replay = _Replay(traced, forms, written, recording)
        given = dict(zip(followed, values, strict=True))
        if written is None or not fakes:
            return replay(inputs, given)
        with fakes[0].fake_mode, recording:  # pyright: ignore[reportAttributeAccessIssue]
            return replay(inputs, given)

    with torch.no_grad(), _use_lazy_graph_module(True):
        made = make_fx(run, decomposition_table=forms)(*(inputs[node].detach() for node in followed))
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
    arguments look as they did, is copied with the fake values it has. A write that is only a name becomes its
    functional form, and what that gives is read in the tensor's place. Only the others run again, under
    torch's functionalization: most of a model is copied.

    Args:
        written: tells what is written to; None if every node is to run.
        recording: the mode under which all but that is done.
    """

    def __init__(
        self,
        traced: fx.GraphModule,
        forms: Mapping[Any, Callable],
        written: Written | None,
        recording: Recording,
    ) -> None:
        self.traced, self.forms, self.written = traced, forms, written
        self.recording = recording
        self.inputs: dict[fx.Node, fx.Node] = {}  # the placeholders of both traces
        self.ran: dict[fx.Node, Any] = {}  # values, wrapped for functionalization
        self.copies: dict[fx.Node, fx.Node] = {}
        self.names: dict[Any, str] = {}

    def __call__(
        self, inputs: Mapping[fx.Node, torch.Tensor], followed: Mapping[fx.Node, torch.Tensor]
    ) -> Any:
        """Replays the graph.

        Args:
            inputs: what stands for each of its placeholders, in order.
            followed: those of them that are inputs of the trace under way, as it knows them.
        """
        graph = self.graph
        for number, (node, fake) in enumerate(inputs.items()):
            if node in followed:
                made = _node_of(followed[node])
                graph._root.prev.append(made)
            else:
                made = self.copies[node] = graph.create_node("placeholder", f"input{number}")
                made.meta["val"] = snapshot_fake(fake)
            self.inputs[node] = made

        def run(*wrapped: torch.Tensor) -> Any:
            self.ran.update(zip(followed, wrapped, strict=True))
            return self._run()

        results = torch.func.functionalize(run, remove="mutations")(*followed.values())
        self._write_back()
        return self.results if self.written is not None else results

    def _run(self) -> Any:
        for node in self.traced.graph.nodes:
            if node.op == "call_function":
                self._run_node(node)
            elif node.op == "get_attr":
                self.ran[node] = getattr(self.traced, str(node.target))
        results = self.traced.graph.output_node().args[0]
        if self.written is None:
            return fx.map_arg(results, self._value)
        self.results = fx.map_arg(results, self._plain)
        return ()

    def _write_back(self) -> None:
        """Ends the trace with a write to every input that has another value, in order, as torch does."""
        graph = self.graph
        writes = (node for node in graph.nodes if node.target is aten.copy_.default and not node.users)
        done = {node.args[0]: node for node in writes}
        for before, made in self.inputs.items():
            if made in done:
                graph._root.prev.append(done[made])
            elif self.copies.get(before, made) is not made:
                name = self._name(aten.copy_.default)
                write = add_call(graph, aten.copy_.default, (made, self.copies[before]), {}, name)
                write.meta["val"] = made.meta["val"]

    @property
    def graph(self) -> fx.Graph:
        """The trace under way."""
        proxies = get_proxy_mode()
        assert proxies is not None
        return proxies.tracer.graph

    def _run_node(self, node: fx.Node) -> None:
        root = self.graph._root
        before = root.prev
        if not self._renamed(node) and not self._copied(node):
            self.ran[node] = self._called(node)
        made = root.prev
        while made is not before and made is not root:
            made.meta["info"] = info_of(node)
            made = made.prev

    # --- writes that are only names -------------------------------------------------------------------

    def _renamed(self, node: fx.Node) -> bool:
        """Runs the functional form of a write, if that is all there is to it."""
        if self.written is None or not self.written.renames(node):
            return False
        form = functional_form(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._plain)  # type: ignore[misc]
        targets: Any = [node.args[0]] if isinstance(node.args[0], fx.Node) else node.args[0]
        with below_functionalization():
            results = self.recording.run(form, args, kwargs)
            for target, result in zip(
                targets, results if isinstance(results, (list, tuple)) else [results], strict=True
            ):
                before = target.meta["val"]
                if result.dtype != before.dtype:
                    result = aten._to_copy.default(result, dtype=before.dtype, layout=before.layout)
                own = self.written.itself(target)
                self.copies[own] = _node_of(result)
                self.ran.pop(own, None)
        return True

    def _plain(self, node: fx.Node) -> Any:
        """The present value of a node, as the trace under way knows it."""
        own = self._itself(node)
        if own in self.copies:
            return self._tracked(self.copies[own])
        value = self.ran[own]
        return _unwrapped(value) if isinstance(value, torch.Tensor) else value

    def _itself(self, node: fx.Node) -> fx.Node:
        return node if self.written is None else self.written.itself(node)

    def _tracked(self, copy: fx.Node) -> Any:
        value = copy.meta["val"]
        tracer = get_proxy_mode().tracer  # pyright: ignore[reportOptionalMemberAccess]
        if isinstance(value, torch.Tensor) and get_proxy_slot(value, tracer, None) is None:
            track_tensor(value, fx.Proxy(copy, tracer), constant=None, tracer=tracer)
        return value

    # --- nodes that run again -------------------------------------------------------------------------

    def _called(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)  # type: ignore[misc]
        result: Any = NotImplemented
        if node.target in self.forms:
            # Here, above functionalization: torch's decompositions write in place.
            result = self.forms[node.target](*args, **kwargs)
            for source in node.all_input_nodes if self.written is not None else ():
                kept = self._itself(source) not in self.copies or not _was_written(self._value(source))
                assert kept, f"{node} writes to {source}, and its op does not say so"
        if result is NotImplemented:
            target: Any = node.target
            result = target(*args, **kwargs)
        return result

    def _value(self, node: fx.Node) -> Any:
        """The value of a node, for an op that runs."""
        own = self._itself(node)
        if own not in self.ran:
            value = self._tracked(self.copies[own])
            if isinstance(value, torch.Tensor):
                value = _functorch._wrap_functional_tensor(value, _functorch.peek_interpreter_stack().level())
            self.ran[own] = value
        return self.ran[own]

    # --- nodes that are copied ------------------------------------------------------------------------

    def _copied(self, node: fx.Node) -> bool:
        """Copies the node into the trace under way, if it is one to copy."""
        if self.written is None or not self._stays(node):
            return False
        sources = {source: self._source(source) for source in node.all_input_nodes}
        if not all(_looks_alike(source, copy) for source, copy in sources.items()):
            return False
        args, kwargs = fx.map_arg((node.args, node.kwargs), sources.__getitem__)  # type: ignore[misc]
        copy = add_call(self.graph, node.target, args, kwargs, self._name(node.target))
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
        own = self._itself(node)
        if own in self.copies:
            return self.copies[own]
        value = self.ran[own]
        return _node_of(_unwrapped(value)) if isinstance(value, torch.Tensor) else None

    def _name(self, op: Any) -> str:
        """What a trace calls this op's nodes."""
        if op not in self.names:
            name = op.overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else op.__name__
            self.names[op] = self.graph._target_to_str(name)
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
