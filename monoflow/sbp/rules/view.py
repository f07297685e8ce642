"""Rules of ops that name the same elements anew: reshapes, permutations, expansions.

A split is followed through a reshape on the flattened tensor, where it is K blocks, each cut into chunks
of c elements. Input dim i of size s with A elements before it and Z after it, split S(i, k, u) over n
ranks, has K = A k and c = ceil(s / (k u) / n) u Z; an output dim can carry it where A and Z divide out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ..layout import B, P, Split, canonical, fits, num_units
from ..registry import Forms, OpRule, letters, own_op, splits_of
from ..signature import LocalCall, LocalOp, OpCall, Signature, TensorMeta
from .common import argument, has_argument
from .moves import ALPHABET, moved, names, output_shape, partials, result_shape, rules, unique, wrap


def carry(shape: Sequence[int], split: Split, into: Sequence[int], axis_size: int) -> Split | None:
    """The split of the shape `into` that holds the same elements, in the same order, as `split` of `shape`.

    None where no dim of `into` can carry it. Both shapes have the same number of elements.
    """
    size = shape[split.dim]
    if 0 in shape or not fits(size, split, axis_size):
        return None
    blocks = math.prod(shape[: split.dim]) * split.blocks
    chunk = -(-num_units(size, split) // axis_size) * split.unit * math.prod(shape[split.dim + 1 :])
    for dim, extent in enumerate(into):
        before, after = math.prod(into[:dim]), math.prod(into[dim + 1 :])
        if blocks % before or chunk % after or extent == 1:
            continue
        found = _named(extent, dim, blocks // before, chunk // after, axis_size)
        if found is not None:
            return found
    return None


def _named(size: int, dim: int, blocks: int, chunk: int, axis_size: int) -> Split | None:
    """The split of a dim into blocks that are cut in chunks of so many elements, under its smallest unit."""
    if size % blocks:
        return None
    if chunk * axis_size == size // blocks:
        return Split(dim, blocks)
    if blocks > 1:
        return None
    # ceil(size / (u n)) u == chunk, for a unit u that divides both, is (chunk - u) n < size <= chunk n.
    units = [
        u for u in _divisors(math.gcd(size, chunk)) if (chunk - u) * axis_size < size <= chunk * axis_size
    ]
    return canonical(size, Split(dim, 1, units[0]), axis_size) if units else None


def _divisors(number: int) -> list[int]:
    low = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})


def reshaped(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Every split of an input dim that an output dim can carry, and those that plain output splits want."""
    pairs = _carried(call.inputs[0].shape, result_shape(call), forms, 0, axis_size)
    return [*(Signature((here,), (there,)) for here, there in pairs), *partials(call)]


def _carried(
    source: Sequence[int], result: Sequence[int], forms: Forms, index: int, axis_size: int
) -> list[tuple[Split, Split]]:
    """The splits of input `index`, of shape `source`, with those of the result that hold the same."""
    found = {}
    for dim, size in enumerate(source):
        for one in splits_of(forms, index, dim):
            there = carry(source, one, result, axis_size)
            if there is not None:
                found[canonical(size, one, axis_size), there] = None
    for dim in range(len(result)):
        back = carry(result, Split(dim), source, axis_size)
        there = back and carry(source, back, result, axis_size)
        if back is not None and there is not None:
            found[back, there] = None
    return list(found)


def local_reshape(call: LocalCall) -> LocalOp:
    """A reshape to the local shape. Not a view: a shard's strides need not be those of the whole."""
    return torch.ops.aten.reshape.default, (call.args[0], output_shape(call)), {}


def permuted(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Dims change places; the op itself, run on a shape of distinct sizes, says which."""
    ndim = len(call.inputs[0].shape)
    probe = torch.empty([2 + dim for dim in range(ndim)], device="meta")
    order = [extent - 2 for extent in call.op(probe, *call.args[1:], **call.kwargs).shape]
    return moved(call, axis_size, forms, [names(ndim)], [[ALPHABET[dim] for dim in order]])


def same_dims(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """The result is the input."""
    dims = names(len(call.inputs[0].shape))
    return moved(call, axis_size, forms, [dims], [dims])


def same_elements(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Every element changes by itself, and sums of parts with it."""
    dims = "".join(names(len(call.inputs[0].shape)))
    return letters(call, axis_size, forms, f"{dims}->{dims}", linear=[(0,)])


def local_conj(call: LocalCall) -> LocalOp:
    """The conjugate itself: what is sent to other ranks is memory, which a lazy conjugate has not changed."""
    return torch.ops.aten.conj_physical.default, call.args, call.kwargs


def local_neg(call: LocalCall) -> LocalOp:
    """The negative itself, for the same reason."""
    return torch.ops.aten.neg.default, call.args, call.kwargs


def squeezed(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Dims of one element go."""
    shape = call.inputs[0].shape
    chosen = argument(call, "dim") if has_argument(call, "dim") else range(len(shape))
    dims = {wrap(dim, len(shape)) for dim in ([chosen] if isinstance(chosen, int) else chosen)}
    gone = {dim for dim in dims if shape and shape[dim] == 1}
    kept = names(len(shape), gone)
    return moved(call, axis_size, forms, [kept], [[c for dim, c in enumerate(kept) if dim not in gone]])


def unsqueezed(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A dim of one element comes."""
    ndim = len(call.inputs[0].shape)
    dims = names(ndim)
    at = wrap(argument(call, "dim"), ndim + 1)
    return moved(call, axis_size, forms, [dims], [[*dims[:at], "_", *dims[at:]]])


def expanded(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Repeated dims can be split in the result while the input is whole along them."""
    source, result = call.inputs[0].shape, result_shape(call)
    new = len(result) - len(source)
    dims = names(len(result), [dim for dim, extent in enumerate(result) if extent == 1])
    ins = ["_" if source[dim] != result[new + dim] else dims[new + dim] for dim in range(len(source))]
    return moved(call, axis_size, forms, [ins], [dims])


def local_expand(call: LocalCall) -> LocalOp:
    """An expansion to the local shape."""
    return torch.ops.aten.expand.default, (call.args[0], output_shape(call)), {}


def repeated(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Copies of a split dim are blocks of the result; whole copies can be split while the input is whole."""
    source, result = call.inputs[0].shape, result_shape(call)
    new = len(result) - len(source)
    found = partials(call)
    for dim, extent in enumerate(result):
        size = source[dim - new] if dim >= new else 1
        copies = extent // size if size else 1
        by_copy = Split(dim, 1, max(size, 1))
        if copies > 1 and fits(extent, by_copy, axis_size):
            found.append(Signature((B,), (canonical(extent, by_copy, axis_size),)))
        for one in splits_of(forms, 0, dim - new) if dim >= new else []:
            there = Split(dim, copies * one.blocks, one.unit)
            if copies and fits(size, one, axis_size) and fits(extent, there, axis_size):
                here = canonical(size, one, axis_size)
                found.append(Signature((here,), (canonical(extent, there, axis_size),)))
    return unique(found)


def local_repeat(call: LocalCall) -> LocalOp:
    """As many copies of every dim as the local shapes say."""
    shape, held = output_shape(call), call.inputs[0].shape
    held = (1,) * (len(shape) - len(held)) + held
    counts = [extent // size if size else 1 for extent, size in zip(shape, held, strict=True)]
    return call.op, (call.args[0], counts), {}


def retyped(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """The same bytes under another dtype: a reshape of items, which travel whole, at the last dim."""
    (meta,), result = call.inputs, result_shape(call)
    itemsize = argument(call, "dtype").itemsize
    grow, shrink = max(1, meta.dtype.itemsize // itemsize), max(1, itemsize // meta.dtype.itemsize)
    found = []
    for dim, size in enumerate(meta.shape):
        for one in splits_of(forms, 0, dim):
            there = carry((*meta.shape, grow), one, (*result, shrink), axis_size)
            if there is not None and there.dim < len(result):
                found.append(Signature((canonical(size, one, axis_size),), (there,)))
    return found


def complex_parts(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A last dim of two elements, real and imaginary, comes or goes."""
    dims = names(min(len(call.inputs[0].shape), len(result_shape(call))))
    ins, outs = ([*dims, "_"][: len(shape)] for shape in (call.inputs[0].shape, result_shape(call)))
    found = letters(call, axis_size, forms, f"{''.join(ins)}->{''.join(outs)}")
    return [*found, Signature((P,), (P,))]


def restrided(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Layouts of an as_strided that is a reshape; parts in any case."""
    if _is_reshape(call, call.inputs[0], result_shape(call)):
        return reshaped(call, axis_size, forms)
    return partials(call)


def local_restride(call: LocalCall) -> LocalOp:
    """A reshape where it is one; else the op, whose input is then whole."""
    (result,) = call.outputs
    assert result is not None
    meta = call.inputs[0].meta
    return local_reshape(call) if _is_reshape(call, meta, result.meta.shape) else own_op(call)


def overwritten(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Layouts of an as_strided_scatter that replaces every element: those of a reshape of the source."""
    target, source = call.inputs
    if not _is_reshape(call, target, source.shape):
        return partials(call)
    pairs = _carried(source.shape, target.shape, forms, 1, axis_size)
    found = [Signature((old, here), (there,)) for here, there in pairs for old in (B, there)]
    return [*found, *partials(call), *partials(call, [1])]


def local_overwrite(call: LocalCall) -> LocalOp:
    """The source in the shape of the target, where all of that is replaced."""
    target, source = (one.meta for one in call.inputs)
    if not _is_reshape(call, target, source.shape):
        return own_op(call)
    return torch.ops.aten.reshape.default, (call.args[1], output_shape(call)), {}


def _is_reshape(call: OpCall | LocalCall, base: TensorMeta, shape: Sequence[int]) -> bool:
    """Whether the (size, stride) of an as_strided name all elements of `base` in their own order.

    What strides mean depends on those of the base, which a layout does not fix. They are known to be
    dense and in order only for a base of one dim, and taken to be so where the shape stays the same.
    """
    wide = [extent for extent in base.shape if extent != 1]
    same = wide == [extent for extent in shape if extent != 1]
    if argument(call, "storage_offset") or math.prod(shape) != base.numel or not (len(wide) < 2 or same):
        return False
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(argument(call, "stride")), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


RULES: Mapping[Callable, OpRule] = {
    **rules(
        [
            "view",
            "view_copy",
            "_unsafe_view",
            "reshape",
            "_reshape_copy",
            "_reshape_alias",
            "_reshape_alias_copy",
            "flatten.using_ints",
            "unflatten.int",
        ],
        reshaped,
        local_reshape,
    ),
    **rules(
        [
            "permute",
            "permute_copy",
            "transpose.int",
            "transpose_copy.int",
            "t",
            "t_copy",
            "swapaxes",
            "swapdims",
            "movedim.int",
            "movedim.intlist",
            "moveaxis.int",
            "moveaxis.intlist",
            "numpy_T",
            "mT",
            "adjoint",
        ],
        permuted,
    ),
    **rules(["alias_copy", "detach_copy", "lift"], same_dims),
    **rules(["_conj", "_conj_copy"], same_elements, local_conj),
    **rules(["_neg_view", "_neg_view_copy"], same_elements, local_neg),
    **rules(["squeeze", "squeeze.dim", "squeeze.dims"], squeezed, local_reshape),
    **rules(["squeeze_copy", "squeeze_copy.dim", "squeeze_copy.dims"], squeezed, local_reshape),
    **rules(["unsqueeze", "unsqueeze_copy"], unsqueezed),
    **rules(["expand", "expand_copy"], expanded, local_expand),
    **rules(["as_strided", "as_strided_copy"], restrided, local_restride),
    **rules(["as_strided_scatter"], overwritten, local_overwrite),
    **rules(["repeat"], repeated, local_repeat),
    **rules(["view.dtype", "view_copy.dtype"], retyped),
    **rules(["view_as_real", "view_as_real_copy", "view_as_complex", "view_as_complex_copy"], complex_parts),
}
