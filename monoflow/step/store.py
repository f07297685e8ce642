"""Where the state lives between steps: in the user's own modules and optimizers, cut as the plan stores it.

A tensor that the plan replicates stays the plain tensor it was. One that it splits becomes a DTensor under the
same name (the same Parameter object), of which this rank holds its shard. In a simulation the modules keep
whole tensors, which are cut before and joined after every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..compiler import Role, Slot
from ..errors import RunError
from ..mesh import Placement
from ..sbp.layout import Broadcast, NdSbp, shard, text, unshard
from ..tensor import device_mesh, from_placements, to_placements

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
        mesh = self.placement.shape
        return {rank: shard(tensor, layout, mesh, self.placement.coordinate(rank)) for rank in self.ranks}

    def moved(self, tensor: DTensor, layout: NdSbp) -> torch.Tensor:
        """This rank's part of a DTensor under a layout."""
        if from_placements(tensor.placements) == layout:
            return tensor.to_local()
        whole = tensor.full_tensor()
        return shard(
            whole, layout, self.placement.shape, self.placement.coordinate(self.ranks[0])
        ).contiguous()

    def joined(self, values: Mapping[int, torch.Tensor], layout: NdSbp, name: str) -> torch.Tensor:
        """The whole tensor from the shards of all ranks (a simulation). Raises RunError if replicas differ."""
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
                    f"{name} is {text(layout)}, but the replicas at {origin} and {coordinate} differ by {worst:g}"
                )

    # --- live tensors ------------------------------------------------------------------------------

    def settle(self, slot: Slot, layout: NdSbp) -> None:
        """Brings a live tensor into the layout in which a plan stores it, for good."""
        value = slot.get()
        if self.is_whole or value is None:
            return
        if isinstance(value, DTensor):
            if from_placements(value.placements) == layout:
                return
        elif all(isinstance(one, Broadcast) for one in layout):
            return
        local = self.cut(value.detach(), layout)[self.ranks[0]].clone()
        if all(isinstance(one, Broadcast) for one in layout):
            self.replace(slot, local)
        else:
            self.replace(slot, self.wrapped(local, layout, tuple(value.shape)))

    def wrapped(self, local: torch.Tensor, layout: NdSbp, shape: tuple[int, ...]) -> DTensor:
        """This rank's shard as a DTensor of global `shape`."""
        stride = torch.empty(shape, device="meta").stride()
        mesh = device_mesh(self.placement)
        return DTensor.from_local(
            local, mesh, to_placements(layout), run_check=False, shape=torch.Size(shape), stride=stride
        )

    def replace(self, slot: Slot, value: torch.Tensor) -> None:
        """Puts another tensor object in a slot. A parameter stays the same Python object."""
        present = slot.get()
        if slot.role is Role.PARAM:
            assert present is not None
            torch.utils.swap_tensors(present, nn.Parameter(value, requires_grad=present.requires_grad))
        else:
            slot.put(None)
            slot.put(value)

    def read(self, slot: Slot, layout: NdSbp) -> Locals:
        """The hosted ranks' parts of a live tensor; the very memory where it is stored so."""
        value = slot.get()
        assert value is not None, f"{slot.name} is gone; the step was captured when it existed"
        value = value.detach()
        if isinstance(value, DTensor):
            return {self.ranks[0]: self.moved(value, layout)}
        return self.cut(value, layout)

    def write(self, slot: Slot, layout: NdSbp, values: Locals, shape: tuple[int, ...]) -> None:
        """Puts the next value of a live tensor, in place where it is stored so already."""
        if self.simulated:
            slot.put(self.joined(values, layout, slot.name))
            return
        local = next(iter(values.values()))
        present = slot.get()
        held = present.detach() if present is not None else None
        if isinstance(held, DTensor) and from_placements(held.placements) == layout:
            held = held.to_local()
        if held is not None and not isinstance(held, DTensor) and held.shape == local.shape:
            if slot.role is not Role.GRAD:
                if held.data_ptr() != local.data_ptr() or held.numel() == 0:
                    held.copy_(local)
                return
        split = not all(isinstance(one, Broadcast) for one in layout)
        value = self.wrapped(local, layout, shape) if split and not self.is_whole else local
        if isinstance(present, DTensor) or isinstance(value, DTensor):
            self.replace(slot, value)
        else:
            slot.put(value)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict with every tensor whole, on the CPU. All ranks must call it.

    Returns:
        name -> plain tensor, the same on every rank; loads into the same model on one device.
    """
    return {name: whole(value).detach().cpu().clone() for name, value in model.state_dict().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    """A tensor with all its elements, gathered if ranks hold parts of it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
