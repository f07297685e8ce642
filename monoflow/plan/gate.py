"""Updates come behind the scalars that say whether state may change, wherever other orders put them."""

from __future__ import annotations

from collections.abc import Sequence

from .items import Box, LaidOut, Op, Schedule
from .order import IN_PLACE


def behind_gate(items: Sequence[Op | Box], outputs: Schedule) -> list[Op | Box]:
    """The items with updates, and what reads them, put off until all that is checked is there.

    Where what is checked depends on an update itself (a step with two optimizers), nothing is put off: such
    an update does not run in place.

    Args:
        outputs: a schedule of these items, for what it gives out.
    """
    late: set[LaidOut] = set()
    before: list[Op | Box] = []
    behind: list[Op | Box] = []
    for item in items[: outputs.gate]:
        if (isinstance(item, Op) and item.node.target in IN_PLACE) or not late.isdisjoint(item.inputs):
            late.update(item.outputs)
            behind.append(item)
        else:
            before.append(item)
    if any(one.checked and value in late for one, value in outputs.outputs):
        return list(items)
    return [*before, *behind, *items[outputs.gate :]]
