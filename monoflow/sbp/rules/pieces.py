"""Rules of ops that take dims apart and put them together: slice, split, cat, stack, select, roll, tril.

Along the dim itself a piece can be taken from, or put into, a split dim only where its ends lie on the
ends of blocks: of `S(d, 6)` a slice of the last two blocks is `S(d, 2)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..layout import B, P, Split, canonical, fits
from ..registry import Forms, OpRule, letters, splits_of
from ..signature import LocalCall, LocalOp, OpCall, Signature
from .common import argument, has_argument, with_arguments
from .moves import held_before, moved, names, output_shape, partials, result_shape, rules, unique, wrap

#: A piece of a dim: its first element and its number of elements.
Piece = tuple[int, int]


def slice_range(call: OpCall | LocalCall, size: int) -> tuple[Piece, int]:
    """The piece that (start, end) of a slicing op name in a dim of `size` elements, and the step."""
    start, end = argument(call, "start"), argument(call, "end")
    start, stop, step = slice(start, end, argument(call, "step")).indices(size)
    return (start, max(stop - start, 0)), step


def blocked_splits(
    size: int, pieces: Sequence[Piece], given: Iterable[Split], axis_size: int
) -> list[tuple[Split, list[Split]]]:
    """Splits of a dim under which every piece is whole blocks, each with the splits of the pieces.

    Tries the `given` splits (all of one dim) and the one with the largest blocks that the pieces allow.
    """
    given = list(given)
    dim = given[0].dim
    if all(piece == (0, size) for piece in pieces):
        whole = [canonical(size, one, axis_size) for one in given if fits(size, one, axis_size)]
        return [(one, [one] * len(pieces)) for one in whole]
    if any(length == 0 for _, length in pieces):
        return []
    largest = math.gcd(size, *(edge for piece in pieces for edge in piece))
    found = []
    for blocks in sorted({size // largest, *(one.blocks for one in given)}):
        whole = Split(dim, blocks)
        if fits(size, whole, axis_size) and largest % (size // blocks) == 0:
            found.append((whole, [Split(dim, length * blocks // size) for _, length in pieces]))
    return found


def _splits_of_whole(forms: Forms, index: int, dim: int, length: int, size: int) -> list[Split]:
    """Splits of a dim of `size` in the blocks that the forms of a piece of `length` have."""
    if length == size:
        return splits_of(forms, index, dim)
    found = [one.blocks * size for one in splits_of(forms, index, dim) if one.unit == 1]
    return [
        Split(dim),
        *(Split(dim, blocks // length) for blocks in found if length and blocks % length == 0),
    ]


def sliced(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A slice keeps the splits of other dims, and those of which it takes whole blocks."""
    shape = call.inputs[0].shape
    dim = wrap(argument(call, "dim"), len(shape))
    piece, step = _slice_of(call, shape[dim])
    dims = names(len(shape), [dim])
    found = moved(call, axis_size, forms, [dims], [dims])
    if step == 1:
        for whole, (part,) in blocked_splits(shape[dim], [piece], splits_of(forms, 0, dim), axis_size):
            found.append(Signature((whole,), (part,)))
    return unique(found)


def _slice_of(call: OpCall | LocalCall, size: int) -> tuple[Piece, int]:
    if not has_argument(call, "length"):
        return slice_range(call, size)
    start = argument(call, "start")
    return (start + size if start < 0 else start, argument(call, "length")), 1


def local_slice(call: LocalCall) -> LocalOp:
    """The slice between what the rank holds before its ends."""
    shard = call.inputs[0]
    dim = wrap(argument(call, "dim"), len(shard.shape))
    if not shard.is_split(dim):
        return call.op, call.args, call.kwargs
    (start, length), _ = _slice_of(call, shard.meta.shape[dim])
    ends = held_before(shard, dim, start), held_before(shard, dim, start + length)
    return torch.ops.aten.slice.Tensor, (call.args[0], dim, *ends), {}


def sliced_back(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """The gradient of a slice goes back to where the slice came from."""
    (grad,), result = call.inputs, result_shape(call)
    dim = wrap(argument(call, "dim"), len(result))
    piece, step = slice_range(call, result[dim])
    dims = names(len(result), [dim])
    found = moved(call, axis_size, forms, [dims], [dims])
    if step == 1:
        given = _splits_of_whole(forms, 0, dim, grad.shape[dim], result[dim])
        for whole, (part,) in blocked_splits(result[dim], [piece], given, axis_size):
            found.append(Signature((part,), (whole,)))
    return unique(found)


def local_slice_back(call: LocalCall) -> LocalOp:
    """The same, into the local shape."""
    shard = call.outputs[0]
    assert shard is not None
    dim = wrap(argument(call, "dim"), len(shard.shape))
    changed: dict[str, Any] = {"input_sizes": list(shard.shape)}
    if shard.is_split(dim):
        (start, length), _ = slice_range(call, shard.meta.shape[dim])
        changed["start"] = held_before(shard, dim, start)
        changed["end"] = held_before(shard, dim, start + length)
    return (call.op, *with_arguments(call, **changed))


def slice_scattered(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A piece is replaced: both tensors lie alike."""
    shape, source = (one.shape for one in call.inputs)
    dim = wrap(argument(call, "dim"), len(shape))
    piece, step = slice_range(call, shape[dim])
    dims = names(len(shape), [dim])
    found = moved(call, axis_size, forms, [dims, dims], [dims])
    if step == 1 and source[dim] == piece[1]:
        given = [*splits_of(forms, 0, dim), *_splits_of_whole(forms, 1, dim, piece[1], shape[dim])]
        for whole, (part,) in blocked_splits(shape[dim], [piece], given, axis_size):
            found.append(Signature((whole, part), (whole,)))
    return unique(found)


def local_slice_scatter(call: LocalCall) -> LocalOp:
    """The same between what the rank holds before the ends."""
    shard = call.inputs[0]
    dim = wrap(argument(call, "dim"), len(shard.shape))
    if not shard.is_split(dim):
        return call.op, call.args, call.kwargs
    (start, length), _ = slice_range(call, shard.meta.shape[dim])
    start, end = held_before(shard, dim, start), held_before(shard, dim, start + length)
    return (call.op, *with_arguments(call, start=start, end=end))


def split_apart(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Pieces of whole blocks keep the split."""
    shape = call.inputs[0].shape
    dim = wrap(argument(call, "dim"), len(shape))
    dims = names(len(shape), [dim])
    found = moved(call, axis_size, forms, [dims], [dims] * len(call.outputs))
    pieces = _consecutive([one.shape[dim] for one in call.outputs if one is not None])
    for whole, parts in blocked_splits(shape[dim], pieces, splits_of(forms, 0, dim), axis_size):
        found.append(Signature((whole,), tuple(parts)))
    return unique(found)


def local_split(call: LocalCall) -> LocalOp:
    """Pieces of the local sizes."""
    dim = wrap(argument(call, "dim"), len(call.inputs[0].shape))
    sizes = [output_shape(call, index)[dim] for index in range(len(call.outputs))]
    return torch.ops.aten.split_with_sizes.default, (call.args[0], sizes, dim), {}


def joined(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Pieces that are split become blocks of the result."""
    result = result_shape(call)
    dim = wrap(argument(call, "dim"), len(result))
    dims = names(len(result), [dim])
    # An old convention lets empty tensors of one dim stand among others: they stay whole.
    real = [index for index, one in enumerate(call.inputs) if len(one.shape) == len(result)]
    spec = ",".join("".join(dims if i in real else ["_"]) for i in range(len(call.inputs)))
    found = letters(call, axis_size, forms, f"{spec}->{''.join(dims)}") + partials(call, real)
    sizes = [call.inputs[index].shape[dim] for index in real]
    given = [
        one
        for index, size in zip(real, sizes, strict=True)
        for one in _splits_of_whole(forms, index, dim, size, result[dim])
    ]
    for whole, parts in blocked_splits(result[dim], _consecutive(sizes), given, axis_size):
        split = dict(zip(real, parts, strict=True))
        found.append(Signature(tuple(split.get(i, B) for i in range(len(call.inputs))), (whole,)))
    return unique(found)


def _consecutive(lengths: Sequence[int]) -> list[Piece]:
    """Pieces that follow one another."""
    return [(sum(lengths[:index]), length) for index, length in enumerate(lengths)]


def stacked(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A new dim, of one element per input."""
    ndim = len(call.inputs[0].shape)
    dim = wrap(argument(call, "dim"), ndim + 1)
    dims = names(ndim)
    return moved(call, axis_size, forms, [dims] * len(call.inputs), [[*dims[:dim], "_", *dims[dim:]]])


def selected(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """One element of a dim (or every one, each by itself) is taken out."""
    ndim = len(call.inputs[0].shape)
    dim = wrap(argument(call, "dim"), ndim)
    dims = names(ndim, [dim])
    return moved(call, axis_size, forms, [dims], [dims[:dim] + dims[dim + 1 :]] * len(call.outputs))


def selected_back(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A slice of one element is put into a dim, alone or in place of the one that is there."""
    result = result_shape(call)
    dim = wrap(argument(call, "dim"), len(result))
    dims = names(len(result), [dim])
    part = dims[:dim] + dims[dim + 1 :]
    return moved(call, axis_size, forms, [part] if len(call.inputs) == 1 else [dims, part], [dims])


def local_sizes(call: LocalCall) -> LocalOp:
    """The op into the local shape."""
    return (call.op, *with_arguments(call, input_sizes=output_shape(call)))


def diagonals(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Two dims are read, or written, along their diagonal, which is a new last dim."""
    back = has_argument(call, "input_sizes")
    shape = result_shape(call) if back else call.inputs[0].shape
    fixed = {wrap(argument(call, name), len(shape)) for name in ("dim1", "dim2")}
    dims = names(len(shape), fixed)
    line = [*(c for c in dims if c != "_"), "_"]
    if back:
        return moved(call, axis_size, forms, [line], [dims])
    if len(call.inputs) == 2:
        return moved(call, axis_size, forms, [dims, line], [dims])
    return moved(call, axis_size, forms, [dims], [line])


def diagonal_made(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """The last dim becomes the diagonal of two dims."""
    ndim = len(result_shape(call))
    fixed = {wrap(argument(call, name), ndim) for name in ("dim1", "dim2")}
    dims = names(ndim, fixed)
    return moved(call, axis_size, forms, [[*(c for c in dims if c != "_"), "_"]], [dims])


def windowed(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Windows over a dim become a new last dim."""
    shape = call.inputs[0].shape
    dims = names(len(shape), [wrap(argument(call, "dimension"), len(shape))] if shape else [])
    return moved(call, axis_size, forms, [dims], [[*dims, "_"]])


def windowed_back(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """The gradient of windows adds up where they overlap, so only sums are partial."""
    shape = result_shape(call)
    dims = names(len(shape), [wrap(argument(call, "dim"), len(shape))] if shape else [])
    spec = f"{''.join(dims)}_->{''.join(dims)}"
    return letters(call, axis_size, forms, spec, linear=[(0,)])


def shuffled_along(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Elements move along the given dims (all when none is given) and nowhere else."""
    ndim = len(call.inputs[0].shape)
    dims = argument(call, "dims") or range(ndim)
    kept = names(ndim, [wrap(dim, ndim) for dim in dims])
    return moved(call, axis_size, forms, [kept], [kept])


def rotated(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Two dims turn into one another; the others stay."""
    ndim = len(call.inputs[0].shape)
    kept = names(ndim, [wrap(dim, ndim) for dim in argument(call, "dims")])
    return moved(call, axis_size, forms, [kept], [kept])


def on_a_diagonal(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Matrices on a diagonal with zeros around them: sums of parts only, as zeros are no extremum."""
    return [Signature((P,) * len(call.inputs), (P,))]


def traced(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A sum over the diagonal, of which a rank holds what its own rows or columns cross."""
    runs = [[one for one in given if one.blocks == 1] for given in forms]
    return letters(call, axis_size, runs, "m_->", linear=[(0,)]) + letters(call, axis_size, runs, "_n->")


def local_trace(call: LocalCall) -> LocalOp:
    """The sum over the whole matrix's diagonal as seen from the rank's first row and column."""
    shard = call.inputs[0]
    if not (shard.is_split(0) or shard.is_split(1)):
        return call.op, call.args, call.kwargs
    return trace_part, (call.args[0], shard.start(0) - shard.start(1)), {}


def trace_part(matrix: torch.Tensor, offset: int) -> torch.Tensor:
    """The sum over the diagonal that lies `offset` to the right of the main one; 0 where there is none."""
    rows, columns = matrix.shape
    if offset >= columns or -offset >= rows:
        return matrix.new_zeros(0).sum()
    return torch.diagonal(matrix, offset).sum()


def shuffled_channels(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """channel_shuffle: channels (groups, n) become (n, groups); a split of every group is one of n."""
    shape, groups = call.inputs[0].shape, argument(call, "groups")
    dims = names(len(shape), [1])
    found = moved(call, axis_size, forms, [dims], [dims])
    here, there = Split(1, groups), Split(1, 1, groups)
    if fits(shape[1], here, axis_size) and fits(shape[1], there, axis_size):
        found.append(Signature((here,), (canonical(shape[1], there, axis_size),)))
    return unique(found)


def triangle(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Rows and columns that a rank holds in one run shift the diagonal."""
    dims = names(len(call.inputs[0].shape))
    runs = [[one for one in given if one.blocks == 1 or one.dim < len(dims) - 2] for given in forms]
    return moved(call, axis_size, runs, [dims], [dims])


def local_triangle(call: LocalCall) -> LocalOp:
    """The diagonal as seen from the rank's first row and column."""
    shard = call.inputs[0]
    ndim = len(shard.shape)
    diagonal = argument(call, "diagonal") + shard.start(ndim - 2) - shard.start(ndim - 1)
    return (call.op, *with_arguments(call, diagonal=diagonal))


_SPLITS = ["split.Tensor", "split_with_sizes", "split_copy.Tensor", "split_with_sizes_copy", "chunk"]
_UNSAFE_SPLITS = ["unsafe_split.Tensor", "unsafe_split_with_sizes", "unsafe_chunk"]

RULES: Mapping[Callable, OpRule] = {
    **rules(["slice.Tensor", "slice_copy.Tensor", "narrow", "narrow_copy"], sliced, local_slice),
    **rules(["slice_backward"], sliced_back, local_slice_back),
    **rules(["slice_scatter"], slice_scattered, local_slice_scatter),
    **rules([*_SPLITS, *_UNSAFE_SPLITS], split_apart, local_split),
    **rules(["cat", "concat", "concatenate"], joined),
    **rules(["stack"], stacked),
    **rules(["select.int", "select_copy.int", "unbind.int", "unbind_copy.int"], selected),
    **rules(["select_backward"], selected_back, local_sizes),
    **rules(["select_scatter"], selected_back),
    **rules(["diagonal", "diagonal_copy", "diagonal_scatter"], diagonals),
    **rules(["diagonal_backward"], diagonals, local_sizes),
    **rules(["diag_embed"], diagonal_made),
    **rules(["unfold", "unfold_copy"], windowed),
    **rules(["unfold_backward"], windowed_back, local_sizes),
    **rules(["roll", "flip"], shuffled_along),
    **rules(["rot90"], rotated),
    **rules(["block_diag"], on_a_diagonal),
    **rules(["trace"], traced, local_trace),
    **rules(["channel_shuffle", "native_channel_shuffle"], shuffled_channels),
    **rules(["tril", "triu"], triangle, local_triangle),
}
