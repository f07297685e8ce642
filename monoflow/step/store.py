"""Where the state lives between steps: in the user's own modules and optimizers, cut as the plan stores it.

A tensor that the plan replicates stays the plain tensor it was. In the place of one that it splits comes a
DTensor, of which this rank holds its shard: in modules, optimizers and optimizer state alike. So it does in
the place of one that lies at one stage of a pipeline: ranks of other stages hold nothing of it. (It cannot be
the same Parameter object: torch swaps no plain tensor with a DTensor. The old object keeps no memory.) In a
simulation the modules keep whole tensors, which are cut before and joined after every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ..compiler import Role, Slot
from ..errors import RunError
from ..mesh import Placement
from ..sbp.layout import Broadcast, NdSbp, shard, text, unshard
from ..tensor import from_placements, home_of, mesh_of, on_mesh, sent_to_all, to_placements

Locals = dict[int, torch.Tensor]  # by hosted rank


@dataclass(frozen=True)
class Store:
    """Reads and writes live tensors as shards.

    Args:
        ranks: the ranks of the placement that this process hosts.
        simulated: whether it hosts all of them.
    """

    placement: Placement
    ranks: tuple[int, ...]
    simulated: bool

    @property
    def is_whole(self) -> bool:
        """Whether tensors stay plain: one rank, or a simulation."""
        return self.simulated or self.placement.size == 1

    def cut(self, tensor: torch.Tensor, layout: NdSbp) -> Locals:
        """The hosted ranks' shards of a whole tensor (or of a DTensor, moved if it lies otherwise)."""
        if isinstance(tensor, DTensor):
            return {self.ranks[0]: self.moved(tensor, layout)}
        if self.placement.size == 1 or is_whole(layout):
            return dict.fromkeys(self.ranks, tensor)
        mesh = self.placement.shape
        return {rank: shard(tensor, layout, mesh, self.placement.coordinate(rank)) for rank in self.ranks}

    def moved(self, tensor: DTensor, layout: NdSbp) -> torch.Tensor:
        """This rank's part of a DTensor under a layout."""
        if self._lies_so(tensor, layout):
            return tensor.to_local()
        own = self.placement.coordinate(self.ranks[0])
        return shard(whole(tensor), layout, self.placement.shape, own).contiguous()

    def _lies_so(self, tensor: DTensor, layout: NdSbp) -> bool:
        same = from_placements(tensor.placements) == on_mesh(layout)
        return same and tensor.device_mesh == mesh_of(self.placement, layout)

    def joined(self, values: Mapping[int, torch.Tensor], layout: NdSbp, name: str) -> torch.Tensor:
        """The whole tensor from the shards of all ranks (a simulation).

        Raises:
            RunError: replicas differ.
        """
        by_coordinate = {self.placement.coordinate(rank): value for rank, value in values.items()}
        self._check_replicas(by_coordinate, layout, name)
        return unshard(by_coordinate, layout, self.placement.shape)

    def _check_replicas(self, values: Mapping[tuple, torch.Tensor], layout: NdSbp, name: str) -> None:
        for coordinate, value in values.items():
            origin = tuple(
                0 if isinstance(one, Broadcast) else c for one, c in zip(layout, coordinate, strict=True)
            )
            first = values[origin]
            if first.shape != value.shape or not torch.equal(first.nan_to_num(), value.nan_to_num()):
                worst = (first - value).abs().max().item() if first.shape == value.shape else float("nan")
                raise RunError(
                    f"{name} is {text(layout)}, but the replicas at {origin} and {coordinate} "
                    f"differ by {worst:g}"
                )

    # --- live tensors ------------------------------------------------------------------------------

    def settle(self, slot: Slot, layout: NdSbp, is_written: bool) -> None:
        """Brings a live tensor into the layout in which a plan stores it, for good.

        Args:
            is_written: whether the step writes it. What it only reads stays as another step may have cut it.
        """
        value = slot.get()
        if self.is_whole or value is None:
            return
        if isinstance(value, DTensor):
            if not is_written or self._lies_so(value, layout):
                return
        elif is_whole(layout):
            return
        local = self.cut(value.detach(), layout)[self.ranks[0]].clone()
        self._replace(slot, layout, local, tuple(value.shape))

    def wrapped(self, local: torch.Tensor, layout: NdSbp, shape: tuple[int, ...]) -> DTensor:
        """This rank's shard as a DTensor of global `shape`."""
        mesh, placements = mesh_of(self.placement, layout), to_placements(on_mesh(layout))
        if not shape:  # which from_local takes for a shape that is not given
            one = local if local.numel() else local.new_empty(())
            return distribute_tensor(one, mesh, placements, src_data_rank=None)
        size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)

    def _replace(self, slot: Slot, layout: NdSbp, local: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Puts another tensor object in a slot; a parameter's gradient comes along."""
        present = slot.get()
        grad = present.grad if slot.role is Role.PARAM and present is not None else None
        slot.replace(self._stored(local, layout, shape))
        now = slot.get()
        if grad is not None and now is not None:
            now.grad = self._stored(self.cut(grad, layout)[self.ranks[0]].clone(), layout, shape)

    def _stored(self, local: torch.Tensor, layout: NdSbp, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as modules and optimizers hold it: plain where it is whole, else a DTensor."""
        return local if self.is_whole or is_whole(layout) else self.wrapped(local, layout, shape)

    def read(self, slot: Slot, layout: NdSbp) -> Locals:
        """The hosted ranks' parts of a live tensor; the very memory where it is stored so."""
        value = slot.get()
        assert value is not None, f"{slot.name} is gone; the step was captured when it existed"
        return self.cut(value.detach(), layout)

    def held(self, slot: Slot, layout: NdSbp) -> torch.Tensor | None:
        """The memory that the next value of a live tensor can be written to, if it is stored so already."""
        value = slot.get()
        if value is None or self.simulated:
            return None
        if not isinstance(value, DTensor):
            return value.detach() if self.is_whole or is_whole(layout) else None
        return value.to_local().detach() if self._lies_so(value, layout) else None

    def is_in_place(self, slot: Slot, layout: NdSbp, values: Locals) -> bool:
        """Whether the next value is already where it shall be: the program wrote the state that it read."""
        if slot.role is Role.GRAD or self.simulated:
            return False
        held, local = slot.get(), values[self.ranks[0]]
        if held is local:
            return True
        if isinstance(held, DTensor):
            held = self.held(slot, layout)
        if held is None:
            return False
        return held.data_ptr() == local.data_ptr() and held.shape == local.shape and held.numel() > 0

    def pointers(self, slot: Slot | None) -> list[int]:
        """The memory that a live tensor is in now."""
        value = slot.get() if slot is not None else None
        if value is None:
            return []
        local = value.to_local() if isinstance(value, DTensor) else value
        return [local.untyped_storage().data_ptr()] if local.numel() else []

    def write(self, slot: Slot, layout: NdSbp, values: Locals, shape: tuple[int, ...]) -> None:
        """Puts the next value of a live tensor, in place where it is stored so already."""
        if self.simulated:
            slot.put(self.joined(values, layout, slot.name))
            return
        local = values[self.ranks[0]]
        held = self.held(slot, layout)
        if held is not None and held.shape == local.shape and slot.role is not Role.GRAD:
            held.copy_(local)
            return
        if slot.get() is None or self.is_whole:
            slot.put(self._stored(local, layout, shape))
        else:
            self._replace(slot, layout, local, shape)


def is_whole(layout: NdSbp) -> bool:
    """Whether every rank holds the whole tensor."""
    return all(isinstance(one, Broadcast) for one in layout)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict with every tensor whole, on the CPU. All ranks must call it.

    Returns:
        name -> plain tensor, the same on every rank; loads into the same model on one device.
    """
    return {name: whole(value).detach().cpu().clone() for name, value in model.state_dict().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    """A tensor with all its elements, gathered if ranks hold parts of it, or sent by those that hold it."""
    if not isinstance(value, DTensor):
        return value
    for axis in reversed(range(value.device_mesh.ndim)):  # torch warns of several axes at once
        placements = list(value.placements)
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    home = home_of(value.device_mesh)
    return value.to_local() if home is None else sent_to_all(value, value.to_local(), home)
