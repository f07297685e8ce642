"""Global tensors made from whole tensors or from each rank's part, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..errors import LayoutError, PlacementError
from ..mesh import Placement
from ..sbp import layout, vocabulary
from ..sbp.layout import NdSbp, Sbp, Split
from .convert import default_placement, device_mesh, from_placements, to_placements, world_size

SbpLike = str | Sbp | Sequence[Sbp]
#: Per tensor of a nested batch: shape and dtype.
_Metas = list[tuple[tuple[int, ...], torch.dtype]]


def as_nd_sbp(sbp: SbpLike, placement: Placement) -> NdSbp:
    """One SBP per axis of the placement, from text, one SBP or several.

    Raises:
        LayoutError: the number of SBPs differs from the number of axes.
    """
    nd_sbp = vocabulary.parse(sbp) if isinstance(sbp, str) else sbp
    nd_sbp = tuple(nd_sbp) if isinstance(nd_sbp, Sequence) else (nd_sbp,)
    if len(nd_sbp) != placement.num_axes:
        raise LayoutError(
            f"{layout.text(nd_sbp)} lays a tensor along {len(nd_sbp)} axes, "
            f"{placement} has {placement.num_axes}"
        )
    return nd_sbp


def to_global(x: torch.Tensor, placement: Placement, sbp: SbpLike) -> DTensor:
    """The global tensor `x` on `placement`, laid out as `sbp`.

    Args:
        x: a plain tensor holding the whole value, the same on every rank (each takes its part, nothing is
            sent), or a global tensor, which is moved. The result of a plain tensor is a new autograd leaf.
        placement: where it shall be; this rank must be in it.
        sbp: one SBP per axis, as objects or text.

    Raises:
        LayoutError: the layout does not fit the tensor.
        PlacementError: this rank is not in the placement.
    """
    nd_sbp = as_nd_sbp(sbp, placement)
    check_fits(x.shape, nd_sbp, placement)
    mesh = device_mesh(placement)
    if isinstance(x, DTensor):
        blocked = any(_blocks(one) > 1 for one in (*nd_sbp, *from_placements(x.placements)))
        if x.device_mesh == mesh and not blocked:
            return x.redistribute(mesh, to_placements(nd_sbp))
        whole = x.full_tensor()  # torch moves neither between meshes nor from S to a blocked split
    else:
        whole = x.detach()
    rank = dist.get_rank()
    if rank not in placement.ranks:
        raise PlacementError(f"rank {rank} is not in {placement}, so it can hold no part of the tensor")
    part = layout.shard(whole, nd_sbp, placement.shape, placement.coordinate(rank))
    made = _from_part(part.clone(), whole.shape, nd_sbp, placement)
    made.requires_grad_(x.requires_grad)
    return made


def _blocks(one: Sbp) -> int:
    return one.blocks if isinstance(one, Split) else 1


def check_fits(shape: Sequence[int], nd_sbp: NdSbp, placement: Placement) -> None:
    """Raises LayoutError if a tensor of a shape cannot be laid out so."""
    for axis, one in enumerate(nd_sbp):
        if isinstance(one, Split):
            if one.dim >= len(shape):
                raise LayoutError(f"{one} splits dim {one.dim} of a tensor of shape {tuple(shape)}")
            if not layout.fits(shape[one.dim], one, placement.shape[axis]):
                raise LayoutError(
                    f"{one} does not divide dim {one.dim} of {tuple(shape)} "
                    f"over {placement.shape[axis]} ranks"
                )


def _from_part(part: torch.Tensor, shape: Sequence[int], nd_sbp: NdSbp, placement: Placement) -> DTensor:
    """A DTensor around the part that this rank holds. Sends nothing."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    mesh, placements = device_mesh(placement), to_placements(nd_sbp)
    return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False, shape=size, stride=stride)


def to_local(x: torch.Tensor) -> torch.Tensor:
    """The part of a global tensor that this rank holds (a plain tensor is its own part)."""
    return x.to_local() if isinstance(x, DTensor) else x


def from_local(parts: Any, sbp: SbpLike = "S(0)", placement: Placement | None = None) -> Any:
    """The global tensors of which every rank brings its part, such as a rank-local loader's batch.

    Along an unblocked split the parts may have different sizes: the global size is their sum, and rows
    move between ranks only if the parts are not already those of the layout. In a job of one rank the
    parts are whole and come back as they are.

    Args:
        parts: a tensor, or a nested container of tensors, with the same structure on every rank.
        sbp: one SBP per axis, as objects or text.
        placement: where the result lies; all ranks in one line when left out.

    Raises:
        LayoutError: the ranks' structures, dtypes or other sizes differ; the message names both.
    """
    leaves, spec = pytree.tree_flatten(parts)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | None):
            raise LayoutError(f"a batch holds tensors; from_local got a {type(leaf).__name__}: {leaf!r}")
    tensors = [leaf for leaf in leaves if leaf is not None]
    if not tensors or (world_size() == 1 and placement is None):
        return parts
    placement = placement or default_placement(tensors[0].device.type)
    nd_sbp = as_nd_sbp(sbp, placement)
    metas = _gather_metas(tensors, str(spec), placement)
    made = iter([_join_parts(x, [m[i] for m in metas], nd_sbp, placement, i) for i, x in enumerate(tensors)])
    return pytree.tree_unflatten([None if leaf is None else next(made) for leaf in leaves], spec)


def _gather_metas(tensors: Sequence[torch.Tensor], structure: str, placement: Placement) -> list[_Metas]:
    """What every rank of the placement brings, in the order of its ranks."""
    device_mesh(placement)
    mine: tuple[str, _Metas] = (structure, [(tuple(x.shape), x.dtype) for x in tensors])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first = everyone[placement.ranks[0]]
    for rank in placement.ranks:
        if everyone[rank][0] != first[0]:
            raise LayoutError(
                f"the batches differ in structure: rank {placement.ranks[0]} brings {first[0]}, "
                f"rank {rank} brings {everyone[rank][0]}"
            )
    return [everyone[rank][1] for rank in placement.ranks]


def _join_parts(
    part: torch.Tensor,
    metas: Sequence[tuple[tuple[int, ...], torch.dtype]],
    nd_sbp: NdSbp,
    placement: Placement,
    index: int,
) -> DTensor:
    """One global tensor from this rank's part and the shapes of all parts."""
    splits = [(axis, one) for axis, one in enumerate(nd_sbp) if isinstance(one, Split)]
    may_differ = splits[0][1].dim if len(splits) == 1 and _blocks(splits[0][1]) == 1 else None
    _check_same(metas, may_differ, placement, index)
    shape = list(part.shape)
    if may_differ is None:
        for axis, one in splits:
            shape[one.dim] *= placement.shape[axis]
        return _from_part(part, shape, nd_sbp, placement)
    axis = splits[0][0]
    rank = dist.get_rank()
    members = placement.group(axis, rank)
    sizes = [metas[placement.ranks.index(member)][0][may_differ] for member in members]
    shape[may_differ] = sum(sizes)
    part = _rechunk(part, may_differ, sizes, members.index(rank), device_mesh(placement).get_group(axis))
    return _from_part(part, shape, nd_sbp, placement)


def _check_same(
    metas: Sequence[tuple[tuple[int, ...], torch.dtype]],
    may_differ: int | None,
    placement: Placement,
    index: int,
) -> None:
    def fixed(meta: tuple[tuple[int, ...], torch.dtype]) -> tuple[Any, ...]:
        shape, dtype = meta
        return (dtype, len(shape), *(size for dim, size in enumerate(shape) if dim != may_differ))

    for rank, meta in zip(placement.ranks, metas, strict=True):
        if fixed(meta) != fixed(metas[0]):
            other = f"only dim {may_differ} may differ" if may_differ is not None else "all sizes must agree"
            raise LayoutError(
                f"tensor {index} of the batch: rank {placement.ranks[0]} brings {_describe(metas[0])}, "
                f"rank {rank} brings {_describe(meta)}; {other} (pad in the loader)"
            )


def _describe(meta: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{str(meta[1]).removeprefix('torch.')}{list(meta[0])}"


def _rechunk(
    part: torch.Tensor, dim: int, sizes: Sequence[int], index: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Move slices between ranks until each holds torch.chunk's part of the joined dim."""
    wanted = [layout.chunk_range(sum(sizes), len(sizes), i) for i in range(len(sizes))]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    held = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if held == wanted:
        return part
    send = [_overlap(held[index], other) for other in wanted]
    receive = [_overlap(other, wanted[index]) for other in held]
    rows = part.movedim(dim, 0).contiguous()
    result = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(result, rows, receive, send, group=group)
    return result.movedim(0, dim)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
