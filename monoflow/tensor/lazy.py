"""`flow.lazy`: modules built without memory; how they would have been initialized is recorded."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils import _pytree as pytree

from .record import Recording, memory_of
from .recorder import Pretence, Recorder, RecordMode


@contextmanager
def lazy(
    weights: str | Path | None = None,
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> Iterator[None]:
    """Within: modules take no memory for parameters and buffers; their initialization is recorded.

    They get memory when a step that uses them is compiled, each rank only its parts, or by
    `flow.materialize`. Random numbers follow from `torch.manual_seed`, and are the same on every layout,
    though not those that the module would draw outside.

    Args:
        weights: a directory or file of safetensors from which parameters and persistent buffers are read in
            the place of their initialization, by their names in the model that is given to the step.
        strict: whether all names must be there, and no others. Otherwise what is missing is initialized.
        rename: the name in the files of a model's name.

    Raises:
        CaptureError: the initialization looks at a random value, or at a parameter's.
    """
    recording = Recording(None if weights is None else str(weights), strict, rename)
    modules: WeakSet[nn.Module] = WeakSet()
    try:
        with _noting(modules), _recording(Recorder(recording)):
            yield
    finally:
        for module in modules:
            for held in (module._parameters, module._buffers):
                for tensor in held.values():
                    _mark(tensor)


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    """Within: ops go to the recorder."""
    trunc_normal = _trunc_normal(nn.init._no_grad_trunc_normal_)
    with (
        mock.patch.object(nn.init, "_no_grad_trunc_normal_", trunc_normal),
        Pretence(recorder),
        RecordMode(recorder),
    ):
        yield


@contextmanager
def _noting(modules: WeakSet[nn.Module]) -> Iterator[None]:
    """Within: modules that take a parameter or a buffer are noted."""

    def note(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
        modules.add(module)

    hooks = (
        register_module_parameter_registration_hook(note),
        register_module_buffer_registration_hook(note),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- afterwards ------------------------------------------------------------------------------------


class _Unfilled:
    """Of a tensor that was built lazily: what is done to it after `flow.lazy`, and before it has memory, is
    recorded too, or refused, and not lost."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        memories = [memory_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        recording = next((memory.recording for memory in memories if memory is not None), None)
        with torch._C.DisableTorchFunctionSubclass():
            if recording is None or func in _ASKS:
                # torch's own initialization passes over meta tensors, without a word.
                in_init = func == _IS_META and sys._getframe(1).f_code.co_filename == nn.init.__file__
                return False if in_init else func(*args, **(kwargs or {}))
            with _recording(Recorder(recording)):
                result = func(*args, **(kwargs or {}))
        pytree.tree_map_only(torch.Tensor, _mark, result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memory = memory_of(self)  # pyright: ignore[reportArgumentType]
        assert memory is not None, "it is filled"
        filled(self)  # pyright: ignore[reportArgumentType]  # torch copies only classes that it knows
        try:
            with _recording(Recorder(memory.recording)):
                made = copy.deepcopy(self, memo)
        finally:
            _mark(self)  # pyright: ignore[reportArgumentType]
        _mark(made)  # pyright: ignore[reportArgumentType]
        return made


class _UnfilledTensor(_Unfilled, torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class _UnfilledParameter(_Unfilled, nn.Parameter):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


_CLASSES: Mapping[type, type] = {torch.Tensor: _UnfilledTensor, nn.Parameter: _UnfilledParameter}
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
#: What a tensor without memory says truly of itself.
_ASKS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("is_meta", "device", "is_cpu", "is_cuda", "grad", "shape")
)


def _mark(tensor: torch.Tensor | None) -> None:
    """Sees to it that what is done to a lazily built tensor from now on is recorded."""
    if tensor is not None and type(tensor) in _CLASSES and memory_of(tensor) is not None:
        tensor.__class__ = _CLASSES[type(tensor)]


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """The same object, of the class that it has when it has memory."""
    if isinstance(tensor, _Unfilled):
        tensor.__class__ = type(tensor).__mro__[2]
    return tensor


# --- initialization that looks at values -----------------------------------------------------------


def _trunc_normal(original: Callable) -> Callable:
    """torch's draws again until every value is inside, which looks at them; this inverts the distribution."""

    def trunc_normal(
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if memory_of(tensor) is None:
            return original(tensor, mean, std, a, b, generator=generator)
        low, high = (math.erf((bound - mean) / std / math.sqrt(2)) for bound in (a, b))
        with torch.no_grad():
            drawn = torch.empty_like(tensor, dtype=torch.float64)
            drawn.uniform_(low, high, generator=generator).erfinv_()
            return tensor.copy_(drawn.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b))

    return trunc_normal
