"""Tensors that lie at one stage of a placement, as DTensors on the device mesh of that stage's ranks.

The mesh has the axes of the placement, that of the stages with one rank. Ranks of other stages hold such a
DTensor too, with an empty local tensor; torch's own collectives on it are the stage's ranks' alone.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..mesh import Placement
from ..sbp.layout import At, B, NdSbp
from .convert import device_mesh


class Home(NamedTuple):
    """Where a stage's mesh comes from: the placement, its axis of stages, and the stage."""

    placement: Placement
    axis: int
    stage: int


# Known as long as the group that the meshes are cut from lives.
_HOMES: WeakKeyDictionary[ProcessGroup, dict[DeviceMesh, Home]] = WeakKeyDictionary()


def mesh_of(placement: Placement, sbp: NdSbp) -> DeviceMesh:
    """The device mesh on which a tensor of a layout lies: the placement's, or that of a stage.

    Collective over the whole job the first time.
    """
    axis = next((axis for axis, one in enumerate(sbp) if isinstance(one, At)), None)
    whole = device_mesh(placement)
    if axis is None:
        return whole
    one = sbp[axis]
    assert isinstance(one, At)
    ranks = tuple(rank for rank in placement.ranks if placement.coordinate(rank)[axis] == one.stage)
    shape = (*placement.shape[:axis], 1, *placement.shape[axis + 1 :])
    mesh = device_mesh(Placement(placement.device_type, ranks, shape, placement.axes))
    group = dist.group.WORLD
    assert group is not None, "a device mesh leaves a default group"
    _HOMES.setdefault(group, {})[mesh] = Home(placement, axis, one.stage)
    return mesh


def on_mesh(sbp: NdSbp) -> NdSbp:
    """How a tensor of a layout lies on the mesh that `mesh_of` gives: an axis of one rank is B."""
    return tuple(B if isinstance(one, At) else one for one in sbp)


def home_of(mesh: DeviceMesh) -> Home | None:
    """Where the mesh of a stage comes from; None for another mesh."""
    group = dist.group.WORLD
    return _HOMES.get(group, {}).get(mesh) if group is not None else None


def sent_to_all(value: DTensor, held: torch.Tensor, home: Home) -> torch.Tensor:
    """The whole of a tensor of one stage on the ranks of all stages. All ranks of the placement call it.

    Args:
        value: the tensor.
        held: the whole of it at its stage; anything elsewhere.
    """
    rank = dist.get_rank()
    group = home.placement.group(home.axis, rank)
    source = group[home.stage]
    if rank != source:
        held = torch.empty(value.shape, dtype=value.dtype, device=held.device)
    held = held.detach().contiguous()
    # As bytes: not every back end sends every dtype.
    flat = held.flatten().view(torch.uint8)
    dist.broadcast(flat, source, group=device_mesh(home.placement).get_group(home.axis))
    return held
