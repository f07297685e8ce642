"""A shorter way into torch's trace: an op that it would record as it is becomes a node at once.

torch's own way asks for each op what only few need: a decomposition, a known value, symbolic sizes. Ops that
may need one of these take it, here all others leave it out; the trace is the same.

Private parts of torch used here: the trackers and infra modes of `torch.fx.experimental.proxy_tensor`.
tests/null/test_record.py fails when they move.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    get_proxy_mode,
    set_proxy_slot,
    snapshot_fake,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph.rewrite import add_call

aten = torch.ops.aten
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # pyright: ignore[reportAttributeAccessIssue]
_PLAIN = (
    bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_RESULTS = ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]")
_OTHERWISE = (aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)


class _Unusual(Exception):
    """Raised for an argument that torch's own way has to see."""


class Recorder:
    """Records the ops of one capture in the trace that is under way."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}  # of the ops that may take the short way; "" for the others

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an op and adds its node to the trace, in whichever way."""
        result = self.record(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an op and adds its node to the trace; NotImplemented if torch's own way has to do it."""
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = _name(func)
        proxies = get_proxy_mode()
        if not name or proxies is None:
            return NotImplemented
        tracer: Any = proxies.tracer
        try:
            node_args = tuple(_as_node(value, tracer.tensor_tracker) for value in args)
            node_kwargs = {key: _as_node(value, tracer.tensor_tracker) for key, value in kwargs.items()}
        except _Unusual:
            return NotImplemented
        torch._C._unset_dispatch_mode(_PROXY)
        try:
            result = func(*args, **kwargs)
        finally:
            torch._C._set_dispatch_mode(proxies)
        _follow(result, add_call(tracer.graph, func, node_args, node_kwargs, name), tracer)
        return result


class Recording(TorchDispatchMode):
    """Within: ops are recorded the shorter way where they can be.

    Args:
        others: ops that always take torch's own way, such as those that it decomposes.
    """

    def __init__(self, others: Container[Any] = ()) -> None:
        super().__init__()
        self.recorder, self.others = Recorder(), others

    def __torch_dispatch__(
        self, func: Any, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs) if func in self.others else self.recorder.call(func, args, kwargs)


def _name(func: Any) -> str:
    """What a trace calls an op's nodes, "" for an op that is not for the short way."""
    if not isinstance(func, torch._ops.OpOverload) or func in _OTHERWISE or func.namespace == "prim":
        return ""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return ""
    if any(str(returned.type) not in _RESULTS for returned in func._schema.returns):
        return ""
    if {torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded} & set(func.tags):
        return ""
    return fx.Graph()._target_to_str(func.overloadpacket.__name__)


def _as_node(value: Any, tracked: Any) -> Any:
    """An argument with nodes for its tensors. Raises _Unusual for all but fakes without a known value."""
    if isinstance(value, torch.Tensor):
        slot = tracked.get(value) if isinstance(value, FakeTensor) and value.constant is None else None
        if slot is None or slot.constant is not None:
            raise _Unusual
        return slot.proxy.node
    if isinstance(value, (list, tuple)):
        found = [_as_node(one, tracked) for one in value]
        return found if isinstance(value, list) else tuple(found)
    if type(value) not in _PLAIN:
        raise _Unusual
    return value


def _follow(result: Any, node: fx.Node, tracer: Any) -> Any:
    """Makes the trace know what a node gave; returns the fakes that its metadata keeps."""
    kept: Any = None
    if isinstance(result, torch.Tensor):
        kept = snapshot_fake(result)
        set_proxy_slot(result, tracer, _ProxyTensor(fx.Proxy(node, tracer), None))
    elif isinstance(result, (list, tuple)):
        kept = type(result)(
            None if one is None else _follow(one, _picked(node, index), tracer)
            for index, one in enumerate(result)
        )
    node.meta["val"] = kept
    return kept


def _picked(node: fx.Node, index: int) -> fx.Node:
    return add_call(node.graph, operator.getitem, (node, index), {}, "getitem")
