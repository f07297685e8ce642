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
from .results import Call, Results

aten = torch.ops.aten
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # pyright: ignore[reportAttributeAccessIssue]
_PLAIN = (
    bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_RESULTS = ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]")
_DEVICE = torch.ops.prim.device.default
_OTHERWISE = (aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)


class _Unusual(Exception):
    """Raised for an argument that torch's own way has to see."""


class Recorder:
    """Records the ops of one capture in the trace that is under way."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}  # of the ops that may take the short way; "" for the others
        self._results = Results()

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
        call = Call(func)
        try:
            node_args = tuple(_as_node(value, tracer.tensor_tracker, call) for value in args)
            node_kwargs = {
                key: _as_keyword(key, value, tracer.tensor_tracker, call) for key, value in kwargs.items()
            }
        except _Unusual:
            return NotImplemented
        found = self._results.of(call)
        if found is None:
            torch._C._unset_dispatch_mode(_PROXY)
            try:
                result = func(*args, **kwargs)
                self._results.learn(call, func, result)
            finally:
                torch._C._set_dispatch_mode(proxies)
            found = result, _snapshots(result)
        result, kept = found
        _follow(result, kept, add_call(tracer.graph, func, node_args, node_kwargs, name), tracer)
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
        if is_question(func, args):
            return args[0].fake_device
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an op as a call of it would."""
        return func(*args, **kwargs) if func in self.others else self.recorder.call(func, args, kwargs)


def is_question(func: Any, args: Sequence[Any]) -> bool:
    """Whether an op only asks for the device of a fake, which is no op of a trace."""
    return func is _DEVICE and type(args[0]) is FakeTensor


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


def _as_node(value: Any, tracked: Any, call: Call) -> Any:
    """An argument with nodes for its tensors, noted in `call`.

    Raises _Unusual for all but fakes without a known value.
    """
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor) or value.constant is not None:
            raise _Unusual
        slot = tracked.get(value)
        if slot is None or slot.constant is not None:
            raise _Unusual
        call.tensor(value)
        return slot.proxy.node
    if isinstance(value, (list, tuple)):
        call.several(value)
        found = [_as_node(one, tracked, call) for one in value]
        return found if isinstance(value, list) else tuple(found)
    if type(value) not in _PLAIN:
        raise _Unusual
    call.value(value)
    return value


def _as_keyword(name: str, value: Any, tracked: Any, call: Call) -> Any:
    call.value(name)
    return _as_node(value, tracked, call)


def _snapshots(result: Any) -> Any:
    """Fakes of the same memory as results, for the trace to keep."""
    if isinstance(result, (list, tuple)):
        return type(result)(_snapshots(one) for one in result)
    return snapshot_fake(result) if isinstance(result, torch.Tensor) else None


def _follow(result: Any, kept: Any, node: fx.Node, tracer: Any) -> None:
    """Makes the trace know what a node gave, and keep a fake of it."""
    node.meta["val"] = kept
    if isinstance(result, torch.Tensor):
        set_proxy_slot(result, tracer, _ProxyTensor(fx.Proxy(node, tracer), None))
    elif isinstance(result, (list, tuple)):
        for index, (one, snapshot) in enumerate(zip(result, kept, strict=True)):
            if one is not None:
                _follow(one, snapshot, _picked(node, index), tracer)


def _picked(node: fx.Node, index: int) -> fx.Node:
    return add_call(node.graph, operator.getitem, (node, index), {}, "getitem")
