"""The part of a recorded initialization that one rank holds, computed block by block.

That works where every op that made the tensor is elementwise, on the tensor as a whole or on a box of it
(rows, a padding row, one expert): then an element's value depends on its own index alone, bit for bit, and no
rank makes more than its part. Any other initialization (an orthogonal matrix) is made whole and cut, one
tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..sbp.layout import NdSbp, dim_runs, local_shape, shard
from ..sbp.ops.random import bits, normal, pack_runs, uniform
from ..sbp.random_mode import has_form
from .record import Memory, Op, View, contiguous_strides, needed_ops
from .replay import call, plainly, value_of, values_of

aten = torch.ops.aten

Runs = Sequence[tuple[int, int]]
#: Per dim of a tensor, the range of indices of a box of it.
Box = tuple[tuple[int, int], ...]

#: Elements that are worked on at a time.
_BLOCK = 1 << 18

#: Elementwise ops whose result is the same wherever an element lies in memory: most are correctly rounded.
_EXACT = frozenset(
    f"aten::{name}"
    for name in (
        "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
        "fill", "fill_", "zero_", "copy_", "copy", "clone", "_to_copy",
        "mul", "mul_", "add", "add_", "sub", "sub_", "div", "div_", "neg", "neg_", "abs", "abs_",
        "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "sqrt", "sqrt_", "sign",
        "sign_", "erfinv_", "where", "lt", "le", "gt", "ge", "eq", "ne", "logical_not", "bitwise_not",
    )
)  # fmt: skip


class Part(NamedTuple):
    """Which part of a tensor a rank holds: how it lies on a grid of ranks, and the rank's place in that."""

    layout: NdSbp
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]


def part_of(view: View, part: Part) -> torch.Tensor:
    """What a rank holds of a lazily built tensor; on the CPU, in memory of its own."""
    shape = local_shape(view.size, part.layout, part.mesh, part.coordinate)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=view.dtype)
    ops = _elementwise_ops(view)
    if ops is None:
        whole = value_of(view)
        held = shard(whole, part.layout, part.mesh, part.coordinate)
        return held if held.shape == whole.shape else held.clone(memory_format=torch.contiguous_format)
    runs = [dim_runs(size, dim, *part) for dim, size in enumerate(view.size)]
    with plainly():
        scalars = {op: _scalars(op) for op in ops}
        held = torch.empty(shape, dtype=view.dtype)
        for where, block in _blocks(runs, shape):
            held[where] = _Block(view, block).run(ops, scalars)
    return held


def _blocks(runs: Sequence[Runs], shape: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], list[Runs]]]:
    """A part cut into blocks: where each lies in it, and the global indices of its elements, per dim."""
    sizes = list(shape)
    wide = [dim for dim, size in enumerate(sizes) if size > 1]
    if math.prod(sizes) <= _BLOCK or not wide:
        yield tuple(slice(0, size) for size in sizes), list(runs)
        return
    dim = wide[0]
    step = max(1, _BLOCK * sizes[dim] // math.prod(sizes))
    for start in range(0, sizes[dim], step):
        stop = min(start + step, sizes[dim])
        some = [*runs[:dim], _section(runs[dim], start, stop), *runs[dim + 1 :]]
        for where, block in _blocks(some, [*sizes[:dim], stop - start, *sizes[dim + 1 :]]):
            moved = slice(where[dim].start + start, where[dim].stop + start)
            yield (*where[:dim], moved, *where[dim + 1 :]), block


def _section(ranges: Runs, start: int, stop: int) -> Runs:
    """Positions [start, stop) of the concatenated ranges."""
    found, at = [], 0
    for low, high in ranges:
        a, b = max(start, at), min(stop, at + high - low)
        if a < b:
            found.append((low + a - at, low + b - at))
        at += high - low
    return found


def box_of(view: View, shape: Sequence[int]) -> Box | None:
    """The box of a row-major tensor of `shape` that a view of its memory is; None if it is another piece."""
    if view.memory.num_bytes != math.prod(shape) * view.dtype.itemsize:
        return None
    if view.is_all:
        return tuple((0, size) for size in shape)
    starts, rest = [], view.offset
    strides = contiguous_strides(shape)
    for step in strides:
        starts.append(rest // step)
        rest %= step
    extents = [1] * len(shape)
    at = 0
    for size, stride in zip(view.size, view.stride, strict=True):
        if size == 1:
            continue
        while at < len(shape) and (strides[at] != stride or shape[at] == 1):
            at += 1
        if at == len(shape):
            return None
        extents[at] = size
        at += 1
    box = tuple((start, start + extent) for start, extent in zip(starts, extents, strict=True))
    return box if all(stop <= size for (_, stop), size in zip(box, shape, strict=True)) else None


def _is_scalar(view: View) -> bool:
    """Whether a view is a single number, all there is in its memory."""
    return view.memory.num_bytes == view.dtype.itemsize


def _elementwise_ops(view: View) -> list[Op] | None:
    """The ops that made a tensor if all of them are elementwise on it or boxes of it; else None."""
    if not view.is_all or view.num_elements == 1 or view.memory.constant is not None:
        return None
    ops = needed_ops([view.memory], through=lambda read: not _is_scalar(read))
    return ops if all(_is_elementwise(op, view.size) for op in ops) else None


def _is_elementwise(op: Op, shape: Sequence[int]) -> bool:
    if op.key is not None:
        if not has_form(op.func):
            return False
    elif op.func._schema.name not in _EXACT or op.kwargs.get("alpha", 1) != 1:  # type: ignore[attr-defined]
        return False
    if "rounding_mode" in op.kwargs or len(op.outputs) != 1:
        return False
    views = [one for one in (*op.read, *op.outputs) if one is not None and not _is_scalar(one)]
    boxes = {box_of(one, shape) for one in views}
    begins = all(one.memory.constant is None for one in views)
    return len(boxes) == 1 and None not in boxes and begins


def _scalars(op: Op) -> dict[View, torch.Tensor]:
    """The numbers among an op's arguments, as they are when it runs."""
    found = {}
    for view in op.read:
        if _is_scalar(view):
            before = needed_ops([view.memory], before=op.number)
            found[view] = view.of(values_of([view.memory], before)[view.memory])
    return found


class _Block:
    """One block of a tensor: the ops that made it, run on the block alone.

    Args:
        view: the tensor.
        runs: the global indices of the block's elements, per dim.
    """

    def __init__(self, view: View, runs: Sequence[Runs]) -> None:
        self.view, self.runs = view, runs
        self.shape = tuple(sum(stop - start for start, stop in ranges) for ranges in runs)
        self.held: dict[Memory, torch.Tensor] = {}

    def run(self, ops: Sequence[Op], scalars: dict[Op, dict[View, torch.Tensor]]) -> torch.Tensor:
        """The block's values."""
        for op in ops:
            self._run(op, scalars[op])
        return self._of(self.view)

    def _of(self, view: View) -> torch.Tensor:
        """A memory's elements in this block; they begin as zeros."""
        if view.memory not in self.held:
            self.held[view.memory] = torch.zeros(self.shape, dtype=view.dtype)
        return self.held[view.memory].view(view.dtype)

    def _run(self, op: Op, scalars: dict[View, torch.Tensor]) -> None:
        views = [one for one in (*op.read, *op.outputs) if one is not None and not _is_scalar(one)]
        box = box_of(views[0], self.view.size)
        assert box is not None, op.func
        where, runs = self._inside(box)
        if any(one.start >= one.stop for one in where):
            return
        local = tuple(one.stop - one.start for one in where)

        def tensor_of(view: View) -> torch.Tensor:
            return scalars[view] if view in scalars else self._of(view)[where]

        args, kwargs = op.with_tensors(tensor_of)
        args = _with_size(op.func, args, local)
        with _LocalDraws([stop - start for start, stop in box], local, runs):
            result = call(op, args, kwargs)
        if op.outputs[0] is not None:
            self.held[op.outputs[0].memory] = result.reshape(self.shape)

    def _inside(self, box: Box) -> tuple[tuple[slice, ...], list[Runs]]:
        """Where this block meets a box: positions in the block, and indices in the box, per dim."""
        where, runs = [], []
        for ranges, (low, high) in zip(self.runs, box, strict=True):
            before = sum(max(0, min(stop, low) - start) for start, stop in ranges)
            inside = [
                (max(start, low) - low, min(stop, high) - low)
                for start, stop in ranges
                if max(start, low) < min(stop, high)
            ]
            where.append(slice(before, before + sum(stop - start for start, stop in inside)))
            runs.append(inside)
        return tuple(where), runs


def _with_size(func: Any, args: tuple, local: tuple[int, ...]) -> tuple:
    """The arguments of an op with a block's size in the place of the size that it makes."""
    for position, one in enumerate(func._schema.arguments):
        if one.name == "size" and position < len(args):
            return (*args[:position], list(local), *args[position + 1 :])
    return args


class _LocalDraws(TorchDispatchMode):
    """Draws a block's random numbers at its own indices.

    Args:
        shape: of the tensor that is drawn.
        local: of the block of it.
        runs: the indices of the block's elements, per dim.
    """

    def __init__(self, shape: Sequence[int], local: Sequence[int], runs: Sequence[Runs]) -> None:
        super().__init__()
        self.shape, self.local, self.runs = list(shape), list(local), pack_runs(runs)

    def __torch_dispatch__(
        self, func: Callable, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (uniform, normal, bits):
            return func(*args, **kwargs)
        key, op, shape = args
        assert math.prod(shape) == math.prod(self.local), f"{list(shape)} drawn for a block of {self.local}"
        kwargs = kwargs | {"global_shape": self.shape, "runs": self.runs}
        return func(key, op, self.local, **kwargs).reshape(shape)
