"""Eager global tensors: torch's DTensors in OneFlow's vocabulary."""

from .convert import default_placement, device_mesh, from_placements, to_placements
from .global_tensor import from_local, to_global, to_local
from .stages import home_of, mesh_of, on_mesh, sent_to_all

__all__ = [
    "default_placement",
    "device_mesh",
    "from_local",
    "from_placements",
    "home_of",
    "mesh_of",
    "on_mesh",
    "sent_to_all",
    "to_global",
    "to_local",
    "to_placements",
]
