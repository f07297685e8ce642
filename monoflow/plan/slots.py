"""How many micro-batches of a tensor a stage keeps at a time.

What forward of a micro-batch leaves for its backward waits, at stage s of S, while the stages after it work:
for S - s micro-batches there is room, so that many are under way at once. One-forward-one-backward follows
(Narayanan et al., "PipeDream", 2019): a stage without room for another forward waits for a backward. All
other tensors are read before the next micro-batch makes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.step_graph import Phase
from ..sbp.layout import At
from .plan import Plan
from .schedule import LaidOut, Schedule

_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)


def kept(plan: Plan, own: Schedule, coordinate: Sequence[int]) -> dict[LaidOut, int]:
    """The slots of what one rank keeps for backward; what is left out has one.

    Args:
        own: the rank's part of the schedule.
        coordinate: its place in the placement.
    """
    depth = _depth(plan, own, coordinate)
    if depth == 1:
        return {}
    made: set[LaidOut] = set()
    found: dict[LaidOut, int] = {}
    for item in own.items:
        if item.phase in _BACKWARD:
            found |= {value: depth for value in item.inputs if value in made}
        elif item.walked:
            made.update(item.outputs)
    return found


def _depth(plan: Plan, own: Schedule, coordinate: Sequence[int]) -> int:
    """The micro-batches that are under way at a rank's stage; 1 without stages."""
    for item in own.items if plan.has_time else ():
        for value in item.outputs:
            for axis, one in enumerate(value.layout):
                if isinstance(one, At):
                    return min(plan.placement.shape[axis] - coordinate[axis], plan.micro_batches)
    return 1
