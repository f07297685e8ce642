"""State dicts that other programs wrote: safetensors files, Hugging Face directories of them, and .pt files.

A .pt file is read with torch's weights-only loader; one that needs more would run code, and is refused.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .boxes import Box, whole_box, within
from .files import LocalBytes, RemoteBytes, bytes_at
from .index import DTYPES, Entry, Stored
from .read import Arrays, Wanted
from .remote import HF_INDEX

SINGLE = "model.safetensors"
_MOST_HEADER = 100 * 2**20  # as the safetensors library allows
_HOLDERS = ("model", "state_dict", "module", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")


class Safetensors(Arrays):
    """A safetensors file, or a directory of them as Hugging Face lays it out. It has no checksums.

    Raises:
        CheckpointError: a file is missing, or is no safetensors file.
    """

    is_foreign = True

    def __init__(self, path: str | Path) -> None:
        text = str(path)
        if text.endswith(".safetensors"):
            folder, _, name = text.rpartition("/")
            files, names = bytes_at(folder or "."), [name]
        else:
            files = bytes_at(text)
            names = _files_of(files, text)
        self._ends: dict[str, int] = {}
        stored: dict[str, Stored] = {}
        for name in names:
            arrays, self._ends[name] = read_head(files, name)
            stored |= arrays
        self.meta: Mapping[str, Any] = {}
        super().__init__(text, files, stored)

    def faults(self, names: Iterable[str], share: int = 0, num_shares: int = 1) -> list[str]:
        """Files that are shorter or longer than their heads say."""
        found = []
        for file, end in self._ends.items() if share == 0 else ():
            if (size := self.files.size(file)) != end:
                found.append(f"{self.path}: {file} has {size or 0:,} bytes, its head says {end:,}")
        return found

    def text(self, name: str) -> str | None:
        return None


def holds_safetensors(files: LocalBytes | RemoteBytes) -> bool:
    """Whether a directory is one of Hugging Face's."""
    return files.size(HF_INDEX) is not None or files.size(SINGLE) is not None


def _files_of(files: LocalBytes | RemoteBytes, path: str) -> list[str]:
    size = files.size(HF_INDEX)
    if size is None:
        return [SINGLE]
    try:
        return sorted(set(json.loads(bytes(files.read(HF_INDEX, 0, size)))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path}/{HF_INDEX} has no weight_map that can be read") from None


def read_head(files: LocalBytes | RemoteBytes, file: str) -> tuple[dict[str, Stored], int]:
    """The arrays of a safetensors file, and the size that it says it has.

    Raises:
        CheckpointError: it is missing or no safetensors file.
    """
    size = files.size(file)
    if size is None:
        raise CheckpointError(f"{files.path(file)} is missing")
    length = int.from_bytes(files.read(file, 0, 8), "little") if size >= 8 else 0
    if not 0 < length <= min(size - 8, _MOST_HEADER):
        raise CheckpointError(
            f"{files.path(file)} is no safetensors file, or was cut short at {size:,} bytes"
        )
    try:
        header = json.loads(bytes(files.read(file, 8, length)))
        header.pop("__metadata__", None)
        found, end = {}, 0
        for name, one in header.items():
            dtype, shape, (start, stop) = DTYPES[one["dtype"]], tuple(one["shape"]), one["data_offsets"]
            if stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} has {stop - start} bytes")
            found[name] = Stored(dtype, shape, (Entry(file, 8 + length + start, whole_box(shape)),))
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{files.path(file)} is no safetensors file: {error!r}") from None
    return found, 8 + length + end


class StateDictFile:
    """A state dict that torch.save wrote; of a dict of several, the model's.

    Raises:
        CheckpointError: it holds other objects than tensors and plain values, or no state dict.
    """

    is_foreign = True

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.meta: Mapping[str, Any] = {}
        self._values = _model_of(_load(self.path), self.path)
        self.tensors = {name: Wanted(tuple(value.shape), value.dtype) for name, value in self._values.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        value = self._values[name]
        return value[within(box, whole_box(value.shape))].contiguous()

    def faults(self, names: Iterable[str], share: int = 0, num_shares: int = 1) -> list[str]:
        """None: what can be known of the file was known when it was opened."""
        return []

    def text(self, name: str) -> str | None:
        return None


def _load(path: str) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before torch 1.6: not a zip file, which alone can be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and reading it would run code: it is refused "
            f"({reason}). Save model.state_dict() from the program that wrote it"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _model_of(value: Any, path: str) -> dict[str, torch.Tensor]:
    for key in _HOLDERS:
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
            break
    if not isinstance(value, Mapping) or not value:
        raise CheckpointError(f"{path} holds a {type(value).__name__}, no state dict")
    others = [str(name) for name, one in value.items() if not isinstance(one, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"{path} is no state dict of tensors: {', '.join(others[:5])} are none, and it has no dict of "
            f"tensors under any of {', '.join(_HOLDERS)}"
        )
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in value):
            value = {name.removeprefix(wrapper): one for name, one in value.items()}
    return dict(value)
