"""When in a step a node runs: once before the micro-batches, for each of them, or once after the last.

A node is walked when something that it reads or makes lies split or partial along time, or when it reads
what another walked node made. A move off S or P along time waits for the last micro-batch, so its reader runs
after it, and so does all that reads that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

from torch import fx

from ..sbp.layout import Broadcast, NdSbp, Sbp, Split
from .facts import Facts

if TYPE_CHECKING:
    from .plan import Plan


class When(IntEnum):
    """In the order of a step."""

    BEFORE = 0
    WALKED = 1
    AFTER = 2


def arriving(time: Sbp, given: NdSbp, wanted: NdSbp, mesh: Sequence[int]) -> Sbp | None:
    """How a tensor lies along time once the devices have exchanged it; None if no name says it.

    A micro-batch has the same rows however the devices lay them: S(0) of what a device holds is S(0, 2) of
    what two of them hold together.

    Args:
        time: how it lies along time before.
        given, wanted: how it lies along the axes of devices before and after.
        mesh: the extent of these axes.
    """
    if not isinstance(time, Split):
        return time
    blocks, parts = time.blocks, 1
    for now, then, size in zip(given, wanted, mesh, strict=False):
        blocks *= size if isinstance(now, Split) and now.dim == time.dim else 1
        parts *= size if isinstance(then, Split) and then.dim == time.dim else 1
    if blocks == parts * time.blocks:
        return time
    return replace(time, blocks=blocks // parts) if blocks % parts == 0 and time.unit == 1 else None


def when_of(plan: Plan, facts: Facts) -> dict[fx.Node, When]:
    """When every node of a plan with micro-batches runs; what depends on no micro-batch is BEFORE."""
    found = dict.fromkeys(plan.graph.placeholders.values(), When.BEFORE)
    for node, own in facts.items():
        if node.op == "placeholder":
            continue
        signature = plan.signatures[node.name][-1]
        lies_along = any(not isinstance(one, Broadcast) for one in (*signature.inputs, *signature.outputs))
        reads = max(
            (
                _read(plan, found, value, wanted)
                for value, wanted in zip(own.sources, signature.inputs, strict=True)
            ),
            default=When.BEFORE,
        )
        found[node] = When.WALKED if lies_along else reads
    return found


def _read(plan: Plan, found: dict[fx.Node, When], value: tuple[fx.Node, int], wanted: Sbp) -> When:
    """When a tensor is there for a reader that takes it as `wanted` along time."""
    node, index = value
    given = plan.layouts(node)[index][-1]
    is_folded = isinstance(wanted, Broadcast) and not isinstance(given, Broadcast)
    return When.AFTER if is_folded else found[node]
