"""flow.graph: the decorator and the compiled step, the face that users meet."""

from .checkpoint import checkpointer, load, save
from .decorator import Step, graph
from .intercept import intercept
from .materialize import materialize
from .pending import synchronize
from .report import Deviation, Report
from .restore import Restored
from .store import full_state_dict

__all__ = [
    "Deviation",
    "Report",
    "Restored",
    "Step",
    "checkpointer",
    "full_state_dict",
    "graph",
    "intercept",
    "load",
    "materialize",
    "save",
    "synchronize",
]
