"""Rules of ops that read or write where an index tensor says.

A dim that is indexed can be split too: a rank shifts the index to what it holds. A read of what others
hold gives zero, so the ranks' results add up; a write to what others hold goes to a spare row that is
dropped. An index outside the *whole* dim is an IndexError on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..layout import B, P, Partial, Split, canonical, fits
from ..registry import Forms, OpRule, aten, letters, splits_of
from ..signature import LocalCall, LocalOp, OpCall, Signature, TensorShard
from .common import argument, broadcast_letters
from .embedding import check_index, shard_index
from .moves import names, partials, rules, unique, wrap

_INDEX_LETTERS = "nopqrstuvwxyz"  # `names` takes the first letters, for the dims of the indexed tensor


class Held(NamedTuple):
    """What a rank holds of an indexed dim: the dim, its global size, and the global runs, flat."""

    dim: int
    size: int
    runs: tuple[int, ...]


# Ops with one dim and one index tensor: gather, scatter, index_select, index_add and their like.


def read_shard(
    op: Callable, held: Sequence[Any], tensor: torch.Tensor, index: torch.Tensor, kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """`op(tensor, dim, index)` where the rank holds part of `dim`; zeros for what others hold."""
    dim, size, runs = held
    local = shard_index(check_index(index, size), runs)
    values = op(_at_least_one(tensor, dim), dim, local.clamp(min=0), **kwargs)
    mine = local >= 0
    if index.ndim != values.ndim:
        mine = mine.reshape([-1] + [1] * (values.ndim - dim - 1))
    return _zero_unless(mine, values)


def write_shard(
    op: Callable,
    held: Sequence[Any],
    tensor: torch.Tensor,
    index: torch.Tensor,
    rest: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """`op(tensor, dim, index, *rest)` where the rank holds part of `dim`; drops what goes elsewhere."""
    dim, size, runs = held
    rows = tensor.shape[dim]
    local = shard_index(check_index(index, size), runs)
    local = torch.where(local < 0, torch.full_like(local, rows), local)
    return op(_with_spare(tensor, dim), dim, local, *rest, **kwargs).narrow(dim, 0, rows)


def _at_least_one(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor, or one row of zeros where it is empty along `dim`."""
    if tensor.shape[dim]:
        return tensor
    return tensor.new_zeros([*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]])


def _with_spare(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with one more row along `dim`."""
    spare = tensor.new_zeros([*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]])
    return torch.cat([tensor, spare], dim)


def _zero_unless(mine: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(mine, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _held(shard: TensorShard, dim: int) -> Held:
    return Held(dim, shard.meta.shape[dim], tuple(edge for run in shard.runs(dim) for edge in run))


def gathered(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Other dims are split with the index's; along the dim, index and result, or the tensor alone."""
    source, index = (one.shape for one in call.inputs)
    if not source:
        return partials(call, [0])
    dim = wrap(argument(call, "dim"), len(source))
    if len(index) != len(source):  # torch lets an empty index have other dims
        return partials(call, [0])
    at = _paired(source, index, dim)
    along = _put(at, dim, "z")
    found = letters(call, axis_size, forms, f"{''.join(at)},{''.join(along)}->{''.join(along)}")
    return [*found, *partials(call, [0]), *_read_splits(call, axis_size, forms, dim)]


def selected_by_index(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """As a gather whose index is the same all over the other dims."""
    source, index = (one.shape for one in call.inputs)
    if not source:
        return partials(call, [0])
    dim = wrap(argument(call, "dim"), len(source))
    at = names(len(source), [dim])
    spec = f"{''.join(at)},{'z' * len(index)}->{''.join(_put(at, dim, 'z' if index else '_'))}"
    found = letters(call, axis_size, forms, spec)
    return [*found, *partials(call, [0]), *_read_splits(call, axis_size, forms, dim)]


def _read_splits(call: OpCall, axis_size: int, forms: Forms, dim: int) -> list[Signature]:
    size = call.inputs[0].shape[dim]
    here = [one for one in splits_of(forms, 0, dim) if fits(size, one, axis_size)]
    others = (B,) * (len(call.inputs) - 1)
    return [Signature((canonical(size, one, axis_size), *others), (P,)) for one in here]


def local_read(call: LocalCall) -> LocalOp:
    """A masked read where the dim is split."""
    shard = call.inputs[0]
    dim = wrap(argument(call, "dim"), len(shard.shape))
    if not shard.shape or not shard.is_split(dim):
        return call.op, call.args, call.kwargs
    return read_shard, (call.op, _held(shard, dim), call.args[0], argument(call, "index"), call.kwargs), {}


def scattered(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Other dims are split together; along the dim the tensor alone, or, if it adds, all that is added."""
    target, index, *source = (one.shape for one in call.inputs)
    if not target or len(index) != len(target):  # torch lets an empty index have other dims
        return []
    dim = wrap(argument(call, "dim"), len(target))
    at = _paired(target, index, dim)
    for shape in source:
        at = ["_" if index[d] != shape[d] else c for d, c in enumerate(at)]
    spec = ",".join(["".join(at)] * len(call.inputs)) + f"->{''.join(at)}"
    found = letters(call, axis_size, forms, spec) + _write_splits(call, axis_size, forms, dim)
    return unique([*found, *_additions(call, axis_size, forms, dim, dim)])


def added_by_index(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """As a scatter whose index, one-dimensional, is the same all over the other dims."""
    target, index, *source = (one.shape for one in call.inputs)
    if not target or len(index) != 1:
        return []
    dim = wrap(argument(call, "dim"), len(target))
    at = "".join(names(len(target), [dim]))
    rest = [at if len(shape) == len(target) else "_" * len(shape) for shape in source]
    found = letters(call, axis_size, forms, f"{','.join([at, '_', *rest])}->{at}")
    found += _write_splits(call, axis_size, forms, dim)
    return unique([*found, *_additions(call, axis_size, forms, 0, dim)])


def _write_splits(call: OpCall, axis_size: int, forms: Forms, dim: int) -> list[Signature]:
    return [Signature(one.inputs, (one.inputs[0],)) for one in _read_splits(call, axis_size, forms, dim)]


def _additions(call: OpCall, axis_size: int, forms: Forms, index_dim: int, dim: int) -> list[Signature]:
    """Partial layouts of an op that accumulates: parts of what is added, added to parts of the target."""
    if _multiplies(call):
        return [Signature((P, *[B] * (len(call.inputs) - 1)), (P,))]
    op = _accumulates(call)
    if op is None or len(call.inputs) != 3:
        return []
    part = Partial("sum" if op == "mean" else op)
    found = [Signature((part, B, part), (part,))]
    size = call.inputs[1].shape[index_dim]
    given = [*splits_of(forms, 1, index_dim), *splits_of(forms, 2, dim)]
    for blocks, unit in dict.fromkeys((one.blocks, one.unit) for one in given):
        own = Split(index_dim, blocks, unit)
        if op != "mean" and size == call.inputs[2].shape[dim] and fits(size, own, axis_size):
            own = canonical(size, own, axis_size)
            found.append(Signature((part, own, replace(own, dim=dim)), (part,)))
    return found


def _multiplies(call: OpCall) -> bool:
    """Whether an op multiplies what is there, in which it is then linear."""
    if call.op in aten("scatter_reduce.two", "index_reduce"):
        return argument(call, "include_self") and argument(call, "reduce") == "prod"
    return (
        call.op in aten("scatter.reduce", "scatter.value_reduce") and argument(call, "reduce") == "multiply"
    )


def _accumulates(call: OpCall) -> str | None:
    """How an op accumulates onto what is there ("sum", "mean", "max", "min"), None if it does not."""
    if call.op in aten("scatter_add", "index_add"):
        return "sum"
    if call.op in aten("scatter_reduce.two", "index_reduce") and argument(call, "include_self"):
        return {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}.get(argument(call, "reduce"))
    if call.op in aten("scatter.reduce"):
        return {"add": "sum"}.get(argument(call, "reduce"))
    return None


def filled_by_index(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """As an index_copy of one value, of which all copies are equal: parts of it fill parts of the target."""
    found = added_by_index(call, axis_size, forms)
    if len(call.inputs) == 3:
        return found + partials(call, [0, 2])
    return [*found, Signature((P, B), (P,))] if argument(call, "value") == 0 else found


def scattered_value(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """As a scatter; a zero may be written into every part of a sum."""
    found = scattered(call, axis_size, forms)
    return [*found, Signature((P, B), (P,))] if argument(call, "value") == 0 else found


def scattered_number(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """As a scatter; a number that is added at every index is added at each part of them."""
    found = scattered(call, axis_size, forms)
    target, index = (one.shape for one in call.inputs)
    if not target or argument(call, "reduce") != "add":
        return found
    dim = wrap(argument(call, "dim"), len(target))
    here = [one for one in splits_of(forms, 1, dim) if fits(index[dim], one, axis_size)]
    return [*found, *(Signature((P, canonical(index[dim], one, axis_size)), (P,)) for one in here)]


def local_write(call: LocalCall) -> LocalOp:
    """A write with a spare row where the dim is split."""
    shard = call.inputs[0]
    dim = wrap(argument(call, "dim"), len(shard.shape))
    if not shard.shape or not shard.is_split(dim):
        return call.op, call.args, call.kwargs
    target, _, index, *rest = call.args
    return write_shard, (call.op, _held(shard, dim), target, index, rest, call.kwargs), {}


def local_fill(call: LocalCall) -> LocalOp:
    """As `local_write`, for an op that counts negative indices from the end."""
    op, args, kwargs = local_write(call)
    if op is not write_shard:
        return op, args, kwargs
    return write_wrapped_shard, args, kwargs


def write_wrapped_shard(
    op: Callable,
    held: Sequence[Any],
    tensor: torch.Tensor,
    index: torch.Tensor,
    rest: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    """`write_shard` for an index that may count from the end."""
    return write_shard(op, held, tensor, _from_front(index, held[1]), rest, kwargs)


def _from_front(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)


def _paired(shape: Sequence[int], index: Sequence[int], dim: int) -> list[str]:
    """Letters of the dims in which a tensor and its index have the same size, without `dim`."""
    unpaired = [d for d, (a, b) in enumerate(zip(shape, index, strict=True)) if a != b or d == dim]
    return names(len(shape), unpaired)


def _put(group: Sequence[str], at: int, letter: str) -> list[str]:
    return [*group[:at], letter, *group[at + 1 :]]


# index.Tensor and index_put: any number of index tensors, broadcast against each other.


class Indexing(NamedTuple):
    """How `tensor[indices]` names dims.

    Attributes:
        dims: the indexed dims of the tensor, one per index tensor.
        shape: the shape that the index tensors broadcast to.
        at: where that shape stands in the result.
        own: letters of the tensor, "_" for indexed dims.
        indices: letters of each index tensor.
        result: letters of the result.
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    own: str
    indices: tuple[str, ...]
    result: str


def indexing(call: OpCall) -> Indexing:
    """The dims of an index.Tensor or index_put with integer indices."""
    ndim = len(call.inputs[0].shape)
    given = argument(call, "indices")
    dims = tuple(dim for dim, one in enumerate(given) if one is not None)
    shapes = [given[dim].shape for dim in dims]
    shape = tuple(torch.broadcast_shapes(*shapes))
    adjacent = dims == tuple(range(dims[0], dims[0] + len(dims)))
    at = dims[0] if adjacent else 0
    block = _INDEX_LETTERS[: len(shape)]
    own = names(ndim, dims)
    kept = [c for c in own if c != "_"]
    result = "".join([*kept[:at], block, *kept[at:]])
    return Indexing(
        dims,
        shape,
        at,
        "".join(own),
        tuple(broadcast_letters(one, block, shape) for one in shapes),
        result,
    )


def indexed(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Dims that are not indexed and dims of the index keep their splits; split indexed dims add up."""
    if _has_mask(call):
        return []
    where = indexing(call)
    spec = ",".join([where.own, *where.indices]) + f"->{where.result}"
    found = letters(call, axis_size, forms, spec) + partials(call, [0])
    for dim in where.dims:
        found += _read_splits(call, axis_size, forms, dim)
    return unique(found)


def written_by_index(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Dims that are not indexed are split with the values'; sums can be added in parts."""
    if _has_mask(call):
        return _masked_fill(call, axis_size, forms)
    where = indexing(call)
    sizes = [call.inputs[0].shape[where.own.index(c)] if c in where.own else None for c in where.result]
    for dim, extent in enumerate(where.shape):
        sizes[where.at + dim] = extent
    values = broadcast_letters(call.inputs[-1].shape, where.result, [size or 0 for size in sizes])
    kept = "".join(c if c in where.own else "_" for c in values)
    none = ["_" * len(one) for one in where.indices]
    found = letters(call, axis_size, forms, f"{','.join([where.own, *none, kept])}->{where.own}")
    for dim in where.dims:
        found += _write_splits(call, axis_size, forms, dim)
    if argument(call, "accumulate"):
        found += [Signature((P, *[B] * len(where.indices), P), (P,))]
        added = "".join("_" if c in where.own else c for c in values)
        spec = ",".join(["_" * len(where.own), *where.indices, added]) + "->" + "_" * len(where.own)
        split = letters(call, axis_size, forms, spec)
        found += [Signature((P, *one.inputs[1:]), (P,)) for one in split]
    return unique(found)


def _has_mask(call: OpCall) -> bool:
    """Whether an index is a mask (what it reads has a size that depends on data)."""
    given = argument(call, "indices")
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in given)


def _masked_fill(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """One value written where one mask says: pointwise over the dims of the mask, and all others."""
    given = argument(call, "indices")
    dims = [dim for dim, one in enumerate(given) if one is not None]
    value = call.inputs[-1]
    if len(dims) != 1 or value.numel != 1:
        return []
    own = "".join(names(len(call.inputs[0].shape)))
    mask = own[dims[0] : dims[0] + len(call.inputs[1].shape)]
    return letters(call, axis_size, forms, f"{own},{mask},{'_' * len(value.shape)}->{own}")


def read_indexed_shard(
    op: Callable, tensor: torch.Tensor, indices: Sequence[Any], held: Sequence[Sequence[Any]], at: int
) -> torch.Tensor:
    """`tensor[indices]` where the rank holds part of some indexed dims; zeros for what others hold."""
    indices, mine = list(indices), None
    for dim, size, runs in held:
        local = shard_index(check_index(_from_front(indices[dim], size), size), runs)
        tensor, indices[dim] = _at_least_one(tensor, dim), local.clamp(min=0)
        mine = local >= 0 if mine is None else mine & (local >= 0)
    assert mine is not None, "no indexed dim is split"
    values = op(tensor, indices)
    shape = torch.broadcast_shapes(*(one.shape for one in indices if one is not None))
    mine = mine.expand(shape).reshape([*shape, *[1] * (values.ndim - at - len(shape))])
    return _zero_unless(mine, values)


def write_indexed_shard(
    op: Callable,
    tensor: torch.Tensor,
    indices: Sequence[Any],
    values: torch.Tensor,
    accumulate: bool,
    held: Sequence[Sequence[Any]],
) -> torch.Tensor:
    """`index_put` where the rank holds part of some indexed dims; drops what goes elsewhere."""
    indices, shape = list(indices), tensor.shape
    for dim, size, runs in held:
        local = shard_index(check_index(_from_front(indices[dim], size), size), runs)
        indices[dim] = torch.where(local < 0, torch.full_like(local, shape[dim]), local)
        tensor = _with_spare(tensor, dim)
    result = op(tensor, indices, values, accumulate)
    for dim, *_ in held:
        result = result.narrow(dim, 0, shape[dim])
    return result


def local_indexed(call: LocalCall) -> LocalOp:
    """A masked read where indexed dims are split."""
    held = _held_indexed(call)
    if not held:
        return call.op, call.args, call.kwargs
    (output,) = call.outputs
    assert output is not None
    dims = [dim for dim, one in enumerate(call.args[1]) if one is not None]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    return read_indexed_shard, (call.op, *call.args[:2], held, dims[0] if adjacent else 0), {}


def local_written(call: LocalCall) -> LocalOp:
    """A write with spare rows where indexed dims are split."""
    held = [] if len(call.inputs) == 3 and call.inputs[1].meta.dtype == torch.bool else _held_indexed(call)
    if not held:
        return call.op, call.args, call.kwargs
    target, indices, values = call.args[:3]
    return write_indexed_shard, (call.op, target, indices, values, argument(call, "accumulate"), held), {}


def _held_indexed(call: LocalCall) -> list[Held]:
    shard = call.inputs[0]
    dims = [dim for dim, one in enumerate(call.args[1]) if one is not None]
    return [_held(shard, dim) for dim in dims if shard.is_split(dim)]


# Ops that look every element up in something whole.


def taken(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Elements of a flattened tensor: the result lies like the index."""
    source, index = (len(one.shape) for one in call.inputs)
    dims = "".join(names(index))
    return [*letters(call, axis_size, forms, f"{'_' * source},{dims}->{dims}"), *partials(call, [0])]


def put(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Writes into a flattened tensor; what is added can be parts of a sum, or some of the values."""
    target, index, source = (one.shape for one in call.inputs)
    if not argument(call, "accumulate"):
        return []
    dims = "".join(names(len(index)))
    found = [Signature((P, B, P), (P,))]
    if source == index:
        split = letters(call, axis_size, forms, f"{'_' * len(target)},{dims},{dims}->{'_' * len(target)}")
        found += [Signature((P, *one.inputs[1:]), (P,)) for one in split]
    return found


def bucketized(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Every element by itself; its bucket is a count, so counts among parts of the boundaries add up."""
    dims = "".join(names(len(call.inputs[0].shape)))
    return letters(call, axis_size, forms, f"{dims},z->{dims}")


def searched(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """As bucketize, with a row of boundaries for every row where they have more than one dim."""
    boundaries, values, *sorter = (one.shape for one in call.inputs)
    dims = "".join(names(len(values)))
    rows = dims[:-1] if len(boundaries) > 1 else ""
    # A sorter holds global positions, which a part of the boundaries cannot use.
    spec = f"{rows}_,{dims},{rows}_" if sorter else f"{rows}z,{dims}"
    return letters(call, axis_size, forms, f"{spec}->{dims}")


def searched_one(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """One number among boundaries: its place is a count."""
    return letters(call, axis_size, forms, "z->") if len(call.inputs) == 1 else []


def among(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Every element by itself; found among parts of the test elements is found among all."""
    dims = "".join(names(len(call.inputs[0].shape)))
    if len(call.inputs) == 1:
        return letters(call, axis_size, forms, f"{dims}->{dims}")
    test = "".join(reversed(_INDEX_LETTERS))[: len(call.inputs[1].shape)]
    how = "min" if argument(call, "invert") else "max"
    return letters(call, axis_size, forms, f"{dims},{test}->{dims}", reduce_op=how)


def scattered_by_mask(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Where an element of the source goes depends on the whole mask, so only sums of parts are exact."""
    return partials(call, [0, 2])


RULES: Mapping[Callable, OpRule] = {
    **rules(["gather"], gathered, local_read),
    **rules(["index_select"], selected_by_index, local_read),
    **rules(["scatter.src", "scatter_add", "scatter_reduce.two"], scattered, local_write),
    **rules(["scatter.value"], scattered_value, local_write),
    **rules(["scatter.reduce"], scattered, local_write),
    **rules(["scatter.value_reduce"], scattered_number, local_write),
    **rules(["put"], put),
    **rules(["index_add", "index_copy", "index_reduce"], added_by_index, local_write),
    **rules(["index_fill.int_Scalar", "index_fill.int_Tensor"], filled_by_index, local_fill),
    **rules(["index.Tensor", "_unsafe_index.Tensor"], indexed, local_indexed),
    **rules(["index_put", "_unsafe_index_put"], written_by_index, local_written),
    **rules(["masked_scatter"], scattered_by_mask),
    **rules(["take"], taken),
    **rules(["bucketize.Tensor"], bucketized),
    **rules(["isin.Tensor_Tensor", "isin.Tensor_Scalar"], among),
    **rules(["searchsorted.Tensor"], searched),
    **rules(["searchsorted.Scalar"], searched_one),
}
