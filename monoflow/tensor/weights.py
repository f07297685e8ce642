"""Directories and files of safetensors, as Hugging Face writes them; only what is asked for is read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Stored(NamedTuple):
    """One tensor of the files."""

    file: Path
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """The tensors of a directory or file, by name; none is read before it is asked for."""

    path: Path
    tensors: dict[str, Stored]

    @staticmethod
    def open(path: str | Path) -> Weights:
        """Looks at the headers of the files.

        Raises:
            CheckpointError: there is no such file, or it is damaged.
        """
        path = Path(path)
        tensors: dict[str, Stored] = {}
        for file in _files(path):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        tensors[name] = Stored(file, tuple(opened.get_slice(name).get_shape()))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}; copy or download it again") from error
        return Weights(path, tensors)

    def read(self, name: str, runs: Sequence[Sequence[tuple[int, int]]], dtype: torch.dtype) -> torch.Tensor:
        """One part of a tensor, in memory of its own.

        Args:
            runs: for every dim, the ranges of indices to read.
        """
        stored = self.tensors[name]
        shape = [sum(stop - start for start, stop in ranges) for ranges in runs]
        part = torch.empty(shape, dtype=dtype)
        # Opened for this tensor alone: what is read of a file counts as this
        # process' memory until it is closed.
        with safe_open(stored.file, framework="pt") as opened:
            if not runs:
                return part.copy_(opened.get_tensor(name))
            source = opened.get_slice(name)
            for pieces in itertools.product(*map(_pieces, runs)):
                here = tuple(slice(at, at + stop - start) for at, (start, stop) in pieces)
                part[here] = source[tuple(slice(start, stop) for _, (start, stop) in pieces)]
        return part


def _pieces(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """Every range with the position where it begins among all of them."""
    ends = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
    return list(zip(ends, ranges, strict=False))


def _files(path: Path) -> list[Path]:
    """The safetensors files of a directory, in order of their names; a file is its own."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"no file or directory {path}; give a Hugging Face model's or a checkpoint")
    if (path / _INDEX).is_file():
        names = sorted(set(json.loads((path / _INDEX).read_text())["weight_map"].values()))
        return [path / name for name in names]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    raise CheckpointError(f"{path} holds neither {_SINGLE} nor {_INDEX}; give the directory of a saved model")
