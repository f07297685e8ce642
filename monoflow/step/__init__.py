"""flow.graph: the decorator and the compiled step, the face that users meet."""

from .decorator import Step, graph, intercept
from .report import Deviation, Report
from .store import full_state_dict

__all__ = ["Deviation", "Report", "Step", "full_state_dict", "graph", "intercept"]
