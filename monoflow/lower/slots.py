"""How many micro-batches of a tensor a stage keeps at a time.

What forward of a micro-batch leaves for its backward waits, at stage s of S, while the stages after it work:
for S - s micro-batches there is room, so that many are under way at once. One-forward-one-backward follows
(Narayanan et al., "PipeDream", 2019): a stage without room for another forward waits for a backward. All
other tensors are read before the next micro-batch makes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.step_graph import Phase
from ..plan.parts import Parts
from ..plan.plan import Plan
from ..plan.schedule import LaidOut, Schedule

_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)


def kept(plan: Plan, parts: Parts, coordinate: Sequence[int]) -> dict[LaidOut, int]:
    """The slots of what the rank at a coordinate keeps for backward; what is left out has one."""
    if not parts.axes:
        return {}
    (axis,) = parts.axes
    depth = min(plan.placement.shape[axis] - coordinate[axis], plan.micro_batches)
    return dict.fromkeys(_for_backward(parts.of(coordinate)), depth)


def _for_backward(own: Schedule) -> set[LaidOut]:
    """Values of walked items before backward that backward reads."""
    made: set[LaidOut] = set()
    found: set[LaidOut] = set()
    for item in own.items:
        if item.phase in _BACKWARD:
            found.update(value for value in item.inputs if value in made)
        elif item.walked:
            made.update(item.outputs)
    return found
