"""Eager global tensors: torch's DTensors in OneFlow's vocabulary."""

from .convert import default_placement, device_mesh, from_placements, to_placements
from .global_tensor import from_local, to_global, to_local

__all__ = [
    "default_placement",
    "device_mesh",
    "from_local",
    "from_placements",
    "to_global",
    "to_local",
    "to_placements",
]
