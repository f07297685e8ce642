"""monoflow: a training step written for one device, run on any number of them, with the same numbers."""

from .data import stream
from .errors import CaptureError, FlowError, LayoutError, PlacementError, PlanError, RunError
from .mesh import Placement, placement
from .runtime.launch import stop_on_interrupt
from .runtime.world import simulate
from .sbp import vocabulary as sbp
from .step import Report, Step, full_state_dict, graph
from .tensor import from_local, to_global, to_local

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "FlowError",
    "LayoutError",
    "Placement",
    "PlacementError",
    "PlanError",
    "Report",
    "RunError",
    "Step",
    "from_local",
    "full_state_dict",
    "graph",
    "placement",
    "sbp",
    "simulate",
    "stop_on_interrupt",
    "stream",
    "to_global",
    "to_local",
]
