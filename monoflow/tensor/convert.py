"""Our placements and layouts as torch's device meshes and DTensor placements, and back.

The only file of this part that touches torch's private names.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .. import mesh as _mesh
from ..config import Settings
from ..errors import LayoutError, PlacementError
from ..sbp import layout

# Meshes of 2 axes own communicators: one each, for as long as the group they are cut from lives.
_MESHES: WeakKeyDictionary[ProcessGroup, dict[_mesh.Placement, DeviceMesh]] = WeakKeyDictionary()


def default_placement(device_type: str) -> _mesh.Placement:
    """All ranks of this job in one line."""
    return _mesh.placement(device_type, range(world_size()), axes=("data",))


def world_size() -> int:
    """The number of ranks of this job, whether or not they have joined yet."""
    return dist.get_world_size() if dist.is_initialized() else Settings.from_env(os.environ).world_size


def device_mesh(placement: _mesh.Placement) -> DeviceMesh:
    """The torch device mesh of a placement. Collective over the whole job the first time.

    Raises:
        PlacementError: the placement names a rank that this job does not have, or its ranks descend.
    """
    _check_ascending(placement)
    if placement.ranks and max(placement.ranks) >= world_size():
        raise PlacementError(
            f"{placement} needs rank {max(placement.ranks)}, but the job has {world_size()}: "
            f"start it with `monoflow run -n {max(placement.ranks) + 1}`"
        )
    _join(placement.device_type)
    group = dist.group.WORLD
    assert group is not None, "joining leaves a default group"
    meshes = _MESHES.setdefault(group, {})
    if placement not in meshes:
        grid = torch.tensor(placement.ranks).reshape(placement.shape)
        meshes[placement] = DeviceMesh(placement.device_type, grid, mesh_dim_names=placement.axes)
    return meshes[placement]


def _check_ascending(placement: _mesh.Placement) -> None:
    """torch sorts a process group's ranks, and a DTensor gathers in that order: rows would change places."""
    for axis, rank in itertools.product(range(placement.num_axes), placement.ranks):
        members = placement.group(axis, rank)
        if list(members) != sorted(members):
            raise PlacementError(
                f"{placement} has ranks {list(members)} along axis {placement.axes[axis]!r}, in which order "
                f"torch's DTensor cannot gather; name the ranks of every axis in ascending order"
            )


def _join(device_type: str) -> None:
    """Make a default process group if there is none: of all ranks, or of this process alone."""
    if dist.is_initialized():
        return
    backend = dist.get_default_backend_for_device(device_type)
    if world_size() == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def to_placements(sbp: Sequence[layout.Sbp]) -> tuple[Placement, ...]:
    """DTensor's placements of an nd-SBP, axis by axis.

    Raises:
        LayoutError: a DTensor cannot express it: a stage (that is another mesh, see `stages`), a unit, or a
            dim split by blocks and then again (torch reads that as splits made from the last axis to the
            first, and gathers a wrong order).
    """
    for axis, one in enumerate(sbp):
        again = [other for other in sbp[axis + 1 :] if isinstance(other, layout.Split)]
        if isinstance(one, layout.Split) and one.blocks > 1 and one.dim in {other.dim for other in again}:
            raise LayoutError(
                f"{layout.text(sbp)} splits dim {one.dim} by blocks and then again, which a DTensor cannot; "
                f"put the blocked split on the last axis"
            )
    return tuple(_to_placement(one) for one in sbp)


def _to_placement(one: layout.Sbp) -> Placement:
    if isinstance(one, layout.Broadcast):
        return Replicate()
    if isinstance(one, layout.Partial):
        return Partial(one.op)
    if isinstance(one, layout.At):
        raise LayoutError(f"{one} puts a tensor on one coordinate of an axis, which a DTensor cannot; use B")
    if one.unit != 1:
        raise LayoutError(
            f"{one} moves {one.unit} elements at a time, which a DTensor cannot; use S({one.dim})"
        )
    return Shard(one.dim) if one.blocks == 1 else _StridedShard(one.dim, split_factor=one.blocks)


def from_placements(placements: Sequence[Placement]) -> layout.NdSbp:
    """The nd-SBP of DTensor's placements.

    Raises:
        LayoutError: a placement has no SBP (a masked partial, an average).
    """
    return tuple(_from_placement(one) for one in placements)


def _from_placement(one: Placement) -> layout.Sbp:
    if isinstance(one, Replicate):
        return layout.B
    if isinstance(one, _StridedShard):
        return layout.Split(one.dim, int(one.split_factor))
    if isinstance(one, Shard):
        return layout.Split(one.dim)
    if type(one) is Partial and one.reduce_op in ("sum", "max", "min"):
        return layout.Partial(one.reduce_op)
    raise LayoutError(f"the DTensor placement {one!r} is none of split, broadcast and partial sum, max, min")
