"""The public names, re-exported one by one."""

from .data import progress, stream
from .errors import (
    CaptureError,
    CheckpointError,
    DamagedError,
    FlowError,
    LayoutError,
    NonFiniteError,
    PlacementError,
    PlanError,
    RunError,
)
from .mesh import Placement, placement
from .runtime.launch import stop_on_interrupt
from .runtime.world import simulate
from .sbp import vocabulary as sbp
from .step import (
    Report,
    Restored,
    Step,
    checkpointer,
    full_state_dict,
    graph,
    load,
    materialize,
    save,
    synchronize,
)
from .tensor import from_local, to_global, to_local
from .tensor.lazy import lazy

__all__ = [
    "CaptureError",
    "CheckpointError",
    "DamagedError",
    "FlowError",
    "LayoutError",
    "NonFiniteError",
    "Placement",
    "PlacementError",
    "PlanError",
    "Report",
    "Restored",
    "RunError",
    "Step",
    "checkpointer",
    "from_local",
    "full_state_dict",
    "graph",
    "lazy",
    "load",
    "materialize",
    "placement",
    "progress",
    "save",
    "sbp",
    "simulate",
    "stop_on_interrupt",
    "stream",
    "synchronize",
    "to_global",
    "to_local",
]
