"""Boxes: ranges of a tensor's indices, one half-open range per dim, and where they lie in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

Box = tuple[tuple[int, int], ...]


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def num_elements(box: Box) -> int:
    """How many elements a box has; a 0-dim one has one."""
    return math.prod(extents(box))


def meet(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """A box as slices of the tensor that holds `outer`."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True))


def cut(box: Box, most: int) -> Iterator[Box]:
    """A box in pieces of at most `most` elements, in row-major order, each contiguous within the box."""
    size = num_elements(box)
    if size <= max(1, most):
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, most // (size // (stop - start)))
    for first in range(start, stop, rows):
        yield from cut((*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :]), most)


def runs(box: Box, outer: Box) -> tuple[np.ndarray, int]:
    """Where a box lies in the row-major array of `outer`.

    Returns:
        int64 starts of its contiguous runs, ascending, in elements; and the length of every run.
    """
    dim, length = len(box), 1
    while dim and box[dim - 1] == outer[dim - 1]:
        dim -= 1
        length *= box[dim][1] - box[dim][0]
    stride, start, first = length, 0, dim
    if dim:  # a range of rows of whole ones is contiguous too
        first = dim - 1
        start = (box[first][0] - outer[first][0]) * stride
        length *= box[first][1] - box[first][0]
        stride *= outer[first][1] - outer[first][0]
    starts = np.array([start], dtype=np.int64)
    for d in reversed(range(first)):
        rows = np.arange(box[d][0] - outer[d][0], box[d][1] - outer[d][0], dtype=np.int64)
        starts = (rows[:, None] * stride + starts[None, :]).reshape(-1)
        stride *= outer[d][1] - outer[d][0]
    return starts, length


def describe(box: Box, shape: Sequence[int]) -> str:
    """`[0:4, 2:8]`, or nothing for a whole tensor."""
    if box == whole_box(shape):
        return ""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
