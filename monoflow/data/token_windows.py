"""Windows of tokens from memory-mapped files."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import DTypeLike

from ..errors import FlowError
from .blocks import Paths, find_files
from .source import Columns


def tokens(
    paths: Paths, length: int, dtype: DTypeLike = "uint16", stride: int | None = None, shift: bool = True
) -> TokenWindows:
    """Windows of tokens as samples: {"input_ids": int64[length], "labels": int64[length]}.

    Files are memory-mapped: a rank reads the windows of its own rows. No window lies across two files; what
    is left at the end of a file is not used.

    Args:
        paths: raw files of tokens, or .npy files of one dim; a file, a pattern (sorted), or several of them.
        length: tokens of a window.
        dtype: of raw files, in this machine's byte order; a .npy file says its own.
        stride: tokens from the start of a window to that of the next; `length` when left out.
        shift: whether labels are the tokens that come next (so a window reads one token more), or the same
            tokens, for a model that shifts them itself, such as those of transformers.

    Raises:
        FlowError: a path names no file, a file does not hold whole tokens of one dim, none is long enough
            for a window, or length or stride is less than 1.
    """
    return TokenWindows(paths, length, np.dtype(dtype), length if stride is None else stride, shift)


class TokenWindows(Columns):
    """See `tokens`."""

    def __init__(self, paths: Paths, length: int, dtype: np.dtype, stride: int, shift: bool) -> None:
        if length < 1 or stride < 1:
            raise FlowError(
                f"length={length}, stride={stride}: a window has at least one token, and moves on"
            )
        self.paths = find_files(paths)
        self.length, self.dtype, self.stride, self.shift = length, dtype, stride, shift
        sizes = [len(one) for one in self._files]
        self._ends = np.cumsum([max(0, (size - self._reads) // stride + 1) for size in sizes])
        if not self._ends[-1]:
            raise FlowError(
                f"a window takes {self._reads} tokens; the longest of {self.paths} has {max(sizes)}"
            )

    @property
    def _reads(self) -> int:
        return self.length + self.shift

    @cached_property
    def _files(self) -> list[np.ndarray]:
        return [_map(path, self.dtype) for path in self.paths]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        windows = np.empty((len(indices), self._reads), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            file = int(np.searchsorted(self._ends, index, side="right"))
            start = (index - (int(self._ends[file - 1]) if file else 0)) * self.stride
            windows[row] = self._files[file][start : start + self._reads]
        inputs = torch.from_numpy(windows)
        if not self.shift:
            return {"input_ids": inputs, "labels": inputs.clone()}
        return {"input_ids": inputs[:, :-1].contiguous(), "labels": inputs[:, 1:].contiguous()}

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value for name, value in self.__dict__.items() if name != "_files"
        }  # mapped again there


def _map(path: str, dtype: np.dtype) -> np.ndarray:
    try:
        if path.endswith(".npy"):
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            found = np.memmap(path, dtype=dtype, mode="r")
    except ValueError as error:
        raise FlowError(f"{path} does not hold {dtype} tokens: {error}") from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise FlowError(f"{path} holds {found.dtype}{list(found.shape)}, not integers in one dim")
    return found
