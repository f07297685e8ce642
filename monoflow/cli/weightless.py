"""Within: modules have no memory for their parameters, and every device is the CPU.

A script then builds its model, of any size, as it always does, on a machine without its devices. Parameters
become meta tensors the moment a module takes them; buffers, data and everything else stay real.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

_CPU, _META = torch.device("cpu"), torch.device("meta")
_TO_DEVICE = (torch.Tensor.cuda, torch.Tensor.xpu, torch.Tensor.cpu)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@contextmanager
def weightless() -> Iterator[Callable[[], None]]:
    """Within: new modules are weightless, and devices are the CPU. Yields what ends the former."""
    handle = register_module_parameter_registration_hook(_emptied)  # pyright: ignore[reportArgumentType]
    try:
        with (
            _OnCpu(),
            mock.patch.object(torch.autocast, "__init__", _autocast_on_cpu),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            yield handle.remove
    finally:
        handle.remove()


_autocast = torch.autocast.__init__


def _autocast_on_cpu(
    self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
) -> None:
    _autocast(self, "cpu", dtype or torch.get_autocast_dtype(device_type), *args, **kwargs)


def _emptied(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
    """What a module takes in a parameter's place: the same object on meta, so that aliases and ties stay.

    Parameters of other classes (those of lazy modules among them) are left as they are.
    """
    if type(param) is not nn.Parameter or param.device == _META:
        return None
    empty = nn.Parameter(torch.empty_like(param, device=_META), param.requires_grad)
    vars(empty).update(vars(param))
    try:
        torch.utils.swap_tensors(param, empty)
    except RuntimeError:  # something else holds the tensor, such as a graph
        return empty
    return None


class _OnCpu(TorchFunctionMode):
    """Reads every other device as the CPU; what is on meta stays there."""

    def __torch_function__(
        self,
        func: Callable,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _TO_DEVICE:
            return args[0]
        if func == _SET_DATA and args[0].device == _META:
            return func(args[0], args[1].to(_META))
        if func is torch.Tensor.to:
            return _to(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": _on_cpu(kwargs["device"])}
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> torch.device:
    return _META if torch.device(device) == _META else _CPU


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`tensor.to(...)` of which only the dtype and the memory format are heeded, unless it goes to meta."""
    if args and isinstance(args[0], torch.Tensor):
        return tensor.to(dtype=args[0].dtype)
    devices = [one for one in (*args, kwargs.pop("device", None)) if isinstance(one, (str, torch.device))]
    for one in args:
        if isinstance(one, torch.dtype):
            kwargs["dtype"] = one
    if any(torch.device(one) == _META for one in devices):
        kwargs["device"] = _META
    return tensor.to(**kwargs) if kwargs.get("dtype") or kwargs.get("device") else tensor
