"""Nested Python values as JSON and tensors, and back: numbers, text, lists, tuples and dicts."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import CheckpointError

_KEY = "$"  # marks what JSON has no form for: {"$": kind, "of": value}


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value for JSON.

    Args:
        name: where the value belongs, for names of tensors and in errors.
        tensors: gets the tensors that the value holds.

    Raises:
        CheckpointError: the value holds an object of another kind.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_KEY: "float", "of": repr(value)}
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {_KEY: "tensor", "of": name}
    if isinstance(value, torch.dtype):
        return {_KEY: "dtype", "of": str(value).removeprefix("torch.")}
    if type(value) in (list, tuple):
        items = [encode(one, f"{name}.{number}", tensors) for number, one in enumerate(value)]
        return items if type(value) is list else {_KEY: "tuple", "of": items}
    if type(value) in (dict, OrderedDict, Counter, defaultdict):
        if all(type(key) is str for key in value) and _KEY not in value and not isinstance(value, Counter):
            return {key: encode(one, f"{name}.{key}", tensors) for key, one in value.items()}
        pairs = [[encode(key, name, {}), encode(one, f"{name}.{key}", tensors)] for key, one in value.items()]
        return {_KEY: "counter" if isinstance(value, Counter) else "dict", "of": pairs}
    if hasattr(value, "item") and type(value).__module__ == "numpy" and not getattr(value, "shape", None):
        return encode(value.item(), name, tensors)
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint does not hold: it holds numbers, text, "
        f"lists, dicts and tensors; give these, or an object with state_dict() and load_state_dict()"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value of what `encode` made; `tensor` finds a tensor by name."""
    if isinstance(value, list):
        return [decode(one, tensor) for one in value]
    if not isinstance(value, dict):
        return value
    if _KEY not in value:
        return {key: decode(one, tensor) for key, one in value.items()}
    return _DECODERS[value[_KEY]](value["of"], tensor)


def _pairs(of: Any, tensor: Callable[[str], torch.Tensor]) -> dict[Any, Any]:
    return {decode(key, tensor): decode(one, tensor) for key, one in of}


def _dtype(of: Any, tensor: Callable[[str], torch.Tensor]) -> torch.dtype:
    found = getattr(torch, of, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{of!r} is no dtype of this torch")
    return found


_DECODERS: Mapping[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    "tensor": lambda of, tensor: tensor(of),
    "float": lambda of, tensor: float(of),
    "tuple": lambda of, tensor: tuple(decode(one, tensor) for one in of),
    "dict": _pairs,
    "counter": lambda of, tensor: Counter(_pairs(of, tensor)),
    "dtype": _dtype,
}


def tensor_names(value: Any) -> list[str]:
    """The names of the tensors in an encoded value."""
    if isinstance(value, list):
        return [name for one in value for name in tensor_names(one)]
    if not isinstance(value, dict):
        return []
    if value.get(_KEY) == "tensor":
        return [value["of"]]
    return [name for one in value.values() for name in tensor_names(one)]
