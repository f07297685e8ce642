"""What watches the step while it is captured: origins of nodes, refusals, random ops."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..graph.step_graph import NodeInfo, Phase
from ..sbp.random_mode import random_or
from .attention import scaled_dot_product_attention
from .known import KnownValues
from .optimizers import is_fused_update, run_fused_update
from .record import Recorder, is_question

_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_OWN_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_CONTEXTLIB = contextlib.__file__
aten = torch.ops.aten

_READS_VALUE = {
    aten._local_scalar_dense.default: "reads a tensor's value (.item(), bool(), int(), float() or an if)",
    aten.is_nonzero.default: "branches on a tensor's value",
    aten.equal.default: "compares two tensors into a Python bool",
}
_DATA_SIZED = {
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select (or indexing with a boolean mask)",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.repeat_interleave.Tensor: "repeat_interleave with a tensor of repeats",
    aten.bincount.default: "bincount",
}
_MASKS = (torch.bool, torch.uint8)


@contextmanager
def logical_attention() -> Iterator[None]:
    """Within: scaled-dot-product attention is `monoflow::attention`, wherever it is called from.

    Below autocast, above autograd: so its inputs are cast as in an eager run, and recomputation in a backward
    pass (where Python's function modes are off) gets the same op.
    """
    library = torch.library.Library("aten", "IMPL")
    for device in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", scaled_dot_product_attention, f"Autograd{device}")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """Within: recurrent layers are plain ops; mkldnn's own has no fake form and fits no other device."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


class CaptureMode(TorchDispatchMode):
    """Annotates every traced node with its origin and refuses what one graph cannot hold.

    Args:
        key: the fake key that random ops derive from.
        hypers: the fakes of hyper-parameters, which a step may read but not change.
        batch: the fakes of the step's arguments by name, which it may not change either.
        module_names: qualified names of the models' modules by identity.
        step_code: the code object of the user's step function, to name its line in errors.
    """

    def __init__(
        self,
        key: torch.Tensor,
        hypers: Sequence[torch.Tensor],
        batch: Mapping[str, torch.Tensor],
        module_names: Mapping[int, str],
        step_code: CodeType | None,
    ) -> None:
        super().__init__()
        self.key = key
        self.hypers = {id(hyper) for hyper in hypers}
        self.batch_of_storage = {_storage(value): name for name, value in batch.items()}
        self.module_names = module_names
        self.step_code = step_code
        self.modules: list[str] = []
        self.in_update = False
        self._known = KnownValues()
        self._recorder = Recorder()
        self._is_user: dict[str, bool] = {}
        self._origins: dict[int, NodeInfo] = {}
        self._last_number = _sequence_number() - 1

    # --- where we are ------------------------------------------------------------------------------

    @contextmanager
    def module_stack(self) -> Iterator[None]:
        """Within: forwards of the models' modules are followed by name."""

        def enter(module: nn.Module, args: Any) -> None:
            self.modules.append(self.module_names.get(id(module), self.modules[-1] if self.modules else ""))

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self.modules.pop()

        handles = (
            nn_module.register_module_forward_pre_hook(enter),
            nn_module.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within: an optimizer is at work."""
        self.in_update = True
        try:
            yield
        finally:
            self.in_update = False

    def user_frames(self) -> Iterator[FrameType]:
        """Frames outside torch and monoflow, innermost first."""
        frame: FrameType | None = sys._getframe(2)
        is_user = self._is_user
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in is_user:
                is_user[name] = not name.startswith((_TORCH_DIR, _OWN_DIR, "<")) and name != _CONTEXTLIB
            if is_user[name]:
                yield frame
            frame = frame.f_back

    def source_line(self) -> str:
        """`file:line` of the innermost user frame, "" if there is none."""
        for frame in self.user_frames():
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return ""

    def origin(self) -> NodeInfo:
        """Where the op that is dispatched now comes from."""
        if self.in_update:
            return NodeInfo(Phase.UPDATE, "", self.source_line())
        module = self.modules[-1] if self.modules else ""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not torch.is_grad_enabled():
            return self._backward_origin()
        # An op that autograd follows has just taken a number; any other leaves the last one standing.
        number = _sequence_number() - 1
        fresh = number > self._last_number
        self._last_number = max(number, self._last_number)
        phase = Phase.BACKWARD if in_backward else Phase.FORWARD
        info = NodeInfo(phase, module, self.source_line(), number if fresh else -1)
        if in_backward and not module:  # a backward pass that is differentiated itself
            forward = self._backward_origin()
            info = NodeInfo(phase, forward.module, forward.source or info.source, info.sequence)
        if fresh:
            self._origins[number] = info
        return info

    def _backward_origin(self) -> NodeInfo:
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        forward = self._origins.get(number)
        if forward is None:
            return NodeInfo(Phase.BACKWARD, "", "", -1)
        return NodeInfo(Phase.BACKWARD, forward.module, forward.source, number)

    def place(self, info: NodeInfo) -> str:
        """The end of a message: the line, the module, and the line of the step that led there."""
        source = self.source_line()
        where = f"at {source}"
        if info.phase is Phase.BACKWARD and info.source not in ("", source):
            where += f", in the gradient of {info.source}"
        if info.module:
            where += f" (in module {info.module!r})"
        for frame in self.user_frames():
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if frame.f_code is self.step_code and line != source:
                where += f", called from {line}"
        return where

    # --- each op -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_question(func, args):  # asked twice a node, by autograd
            return args[0].fake_device
        kwargs = kwargs or {}
        if func is aten.native_batch_norm.default and args[3] is not None and args[5]:
            # It writes its statistics, but only this op's schema says so.
            func = aten._native_batch_norm_legit.default
        info = self.origin()
        proxies = get_proxy_mode()
        if func in _READS_VALUE and proxies is not None and not _is_known(args):
            value = self._known.value(func, args, proxies.tracer)
            if value is not None:
                return value
        self._refuse(func, args, kwargs, info)
        if proxies is None:
            return self._run(func, args, kwargs, info)
        root = proxies.tracer.graph._root
        before = root.prev
        result = self._run(func, args, kwargs, info)
        node = root.prev
        while node is not before and node is not root:
            node.meta["info"] = info
            node = node.prev
        return result

    def _run(self, func: Any, args: Sequence, kwargs: dict[str, Any], info: NodeInfo) -> Any:
        """The op, or the form that it has in a StepGraph."""
        try:
            if is_fused_update(func):
                return run_fused_update(func, args, kwargs, self._recorder.call)
            result = self._recorder.record(func, args, kwargs)
            return random_or(self.key, func, args, kwargs) if result is NotImplemented else result
        except CaptureError as error:
            raise CaptureError(f"{error}, {self.place(info)}") from None
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise self._data_dependent(str(func), info) from None

    def refuse_read(self, how: str) -> None:
        """Raises CaptureError for what takes values to Python past torch's dispatcher."""
        raise CaptureError(
            _read_message(f"takes a tensor's values to Python ({how})", self.place(self.origin()))
        )

    def _data_dependent(self, name: str, info: NodeInfo) -> CaptureError:
        return CaptureError(
            f"{name} gives a result whose size or value depends on the data, {self.place(info)}; "
            "use a mask with torch.where (fixed size), or do it outside the step"
        )

    def _refuse(self, func: Any, args: Sequence, kwargs: Mapping[str, Any], info: NodeInfo) -> None:
        """Raises CaptureError if this op cannot be part of a graph."""
        if func in _READS_VALUE and not _is_known(args):
            if id(args[0]) in self.hypers and self.in_update:
                raise CaptureError(
                    f"the optimizer takes its learning rate to a Python number {self.place(info)}; in a "
                    "captured step it is a tensor, so that it can change without a new capture. Use tensor "
                    "arithmetic: param.sub_(lr * update)"
                )
            raise CaptureError(_read_message(_READS_VALUE[func], self.place(info)))
        if func in _DATA_SIZED:
            raise self._data_dependent(_DATA_SIZED[func], info)
        if func is aten.index.Tensor and any(x is not None and x.dtype in _MASKS for x in args[1]):
            raise self._data_dependent("indexing with a boolean mask", info)
        if func._schema.is_mutable and args and id(args[0]) in self.hypers:
            raise CaptureError(
                f"the step changes the learning rate {self.place(info)}; call the scheduler outside the "
                "step, after it: train_step(batch); scheduler.step()"
            )
        written = list(_written(func, args, kwargs)) if func._schema.is_mutable else []
        for value in _tensors(args, kwargs):
            if not isinstance(value, FakeTensor):
                self._refuse_real(value, written, info)
        for value in written:
            name = self.batch_of_storage.get(_storage(value))
            if name is not None:
                raise CaptureError(
                    f"the step writes in place to its argument {name} (or a view of it) {self.place(info)}; "
                    "a captured step leaves its arguments as they are. Compute a new tensor (x = x + 1), or "
                    "write to a copy (x = x.clone())"
                )

    def _refuse_real(self, value: torch.Tensor, written: Sequence[torch.Tensor], info: NodeInfo) -> None:
        if value.requires_grad and value.is_leaf:
            raise CaptureError(
                f"a parameter of shape {tuple(value.shape)} is used {self.place(info)}, but it belongs to no "
                "model given to flow.graph; add its module: @flow.graph(model, other_model, optimizer)"
            )
        if value.requires_grad:
            raise CaptureError(
                f"a tensor of shape {tuple(value.shape)} that was computed from parameters before the step "
                f"is used {self.place(info)}; compute it inside the step, or detach it"
            )
        if any(x is value for x in written):
            raise CaptureError(
                f"the step writes in place to a tensor it closes over, shape {tuple(value.shape)}, "
                f"{self.place(info)}; make it a buffer of the model (module.register_buffer), or return "
                "the new value from the step"
            )


def _sequence_number() -> int:
    """The number that autograd gives to the next node."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def _read_message(what: str, place: str) -> str:
    return (
        f"the step {what} {place}; a captured step cannot depend on values it has not computed yet. "
        "Use torch.where or tensor arithmetic, or move this outside the step"
    )


def _is_known(args: Sequence) -> bool:
    """Whether the value is a Python constant that fake tensors carry along (torch.tensor(3.0).item())."""
    value = args[0] if args else None
    return isinstance(value, FakeTensor) and value.constant is not None


def _storage(value: torch.Tensor) -> int:
    """What a tensor and its views have in common."""
    return value.untyped_storage()._cdata


def _written(func: Any, args: Sequence, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments that an op writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[index : index + 1], {"": kwargs.get(argument.name)})


def _tensors(args: Sequence, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, torch.Tensor))
