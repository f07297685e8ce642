"""What watches the step while it is captured: origins of nodes, refusals, random ops."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as nn_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..graph.step_graph import NodeInfo, Phase
from ..sbp.random_mode import random_or
from .optimizers import is_fused_update, run_fused_update

_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_OWN_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
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


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames outside torch and monoflow, innermost first."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH_DIR, _OWN_DIR, "<")) and "contextlib" not in name:
            yield frame
        frame = frame.f_back


def source_line(frame: FrameType | None) -> str:
    """`file:line` of the innermost user frame, "" if there is none."""
    for one in user_frames(frame):
        return f"{one.f_code.co_filename}:{one.f_lineno}"
    return ""


class CaptureMode(TorchDispatchMode):
    """Annotates every traced node with its origin and refuses what one graph cannot hold.

    Args:
        key: the fake key that random ops derive from.
        module_names: qualified names of the models' modules by identity.
        step_code: the code object of the user's step function, to name its line in errors.
    """

    def __init__(self, key: torch.Tensor, module_names: Mapping[int, str], step_code: Any) -> None:
        super().__init__()
        self.key = key
        self.step_code = step_code
        self.module_names = module_names
        self.modules: list[str] = []
        self.origins: dict[int, NodeInfo] = {}
        self.in_update = False
        self.backward_seen = False
        self.random_used = False

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
            nn_module.register_module_forward_hook(leave),
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

    def origin(self) -> NodeInfo:
        """Where the op that is dispatched now comes from."""
        if self.in_update:
            return NodeInfo(Phase.UPDATE, "", source_line(sys._getframe(2)))
        if torch._C._current_graph_task_id() != -1:
            self.backward_seen = True
            node = torch._C._current_autograd_node()
            number = node._sequence_nr() if node is not None else -1
            forward = self.origins.get(number)
            if forward is None:
                return NodeInfo(Phase.BACKWARD, "", "", number)
            return NodeInfo(Phase.BACKWARD, forward.module, forward.source, number)
        number = torch._C._autograd._get_sequence_nr() - 1
        module = self.modules[-1] if self.modules else ""
        info = NodeInfo(Phase.FORWARD, module, source_line(sys._getframe(2)), number)
        self.origins[number] = info
        return info

    def place(self, info: NodeInfo) -> str:
        """The end of a message: the line, the module, and the line of the step that led there."""
        where = f"at {info.source}" if info.source else "in the backward pass"
        if info.module:
            where += f" (in module {info.module!r})"
        for frame in user_frames(sys._getframe(1)):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if frame.f_code is self.step_code and line != info.source:
                where += f", called from {line}"
        return where

    # --- each op -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Callable, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        info = self.origin()
        self.refuse(func, args, kwargs, info)
        proxies = get_proxy_mode()
        graph: fx.Graph | None = proxies.tracer.graph if proxies is not None else None  # pyright: ignore
        before = graph._root.prev if graph is not None else None
        try:
            result = self.run(func, args, kwargs)
        except CaptureError as error:
            raise CaptureError(f"{error}, {self.place(info)}") from None
        node = graph._root.prev if graph is not None else None
        while node is not before and node is not None and graph is not None and node is not graph._root:
            node.meta["info"] = info
            node = node.prev
        return result

    def run(self, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> Any:
        """The op, or the form that it has in a StepGraph."""
        if is_fused_update(func):
            return run_fused_update(func, args, kwargs)
        return random_or(self.key, func, args, kwargs)

    def refuse(self, func: Any, args: Sequence, kwargs: Mapping[str, Any], info: NodeInfo) -> None:
        """Raises CaptureError if this op cannot be part of a graph."""
        if func in _READS_VALUE and not self._is_known(args):
            raise CaptureError(
                f"the step {_READS_VALUE[func]} {self.place(info)}; a captured step cannot depend on values "
                "it has not computed yet. Use torch.where or tensor arithmetic, or move this outside the step"
            )
        if func in _DATA_SIZED:
            raise CaptureError(
                f"{_DATA_SIZED[func]} gives a tensor whose size depends on the data, {self.place(info)}; "
                "use a mask with torch.where (fixed size), or do it outside the step"
            )
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                self._refuse_real(func, value, args, info)

    def _is_known(self, args: Sequence) -> bool:
        """Whether the value is a Python constant that fake tensors carry along (torch.tensor(3.0).item())."""
        value = args[0] if args else None
        return isinstance(value, FakeTensor) and value.constant is not None

    def _refuse_real(self, func: Any, value: torch.Tensor, args: Sequence, info: NodeInfo) -> None:
        if value.requires_grad and value.is_leaf:
            raise CaptureError(
                f"a parameter of shape {tuple(value.shape)} is used {self.place(info)}, but it belongs to no "
                "model given to flow.graph; add its module: @flow.graph(model, other_model, optimizer)"
            )
        schema = getattr(func, "_schema", None)
        written = [
            argument
            for argument, given in zip(schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and given is value
        ] if schema is not None else []
        if written:
            raise CaptureError(
                f"the step writes in place to a tensor it closes over, shape {tuple(value.shape)}, "
                f"{self.place(info)}; make it a buffer of the model (module.register_buffer), or return the "
                "new value from the step"
            )
