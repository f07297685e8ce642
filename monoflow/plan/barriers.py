"""The law of barriers: what forward and backward need may not wait for the last micro-batch.

A plan's walk along time says what runs after it, and why; here is what of that is refused, and how.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import fx

from ..errors import PlanError
from ..graph.step_graph import NodeInfo, Phase, info_of, op_name
from ..sbp.layout import B, Broadcast, Sbp, Split, text
from ..sbp.signature import Signature
from .facts import Facts
from .labels import Value
from .plan import Plan


class Walked(Protocol):
    """What is known of a walk along time.

    Attributes:
        num: how many micro-batches.
        names: of inputs, by placeholder.
        chosen: the signatures along time.
        given: how every tensor lies along time.
        offers: how what comes from the batch alone would be cut as the batch is.
        late: what runs after the last micro-batch, and what made it so.
    """

    plan: Plan
    num: int
    facts: Facts
    names: dict[fx.Node, str]
    chosen: dict[fx.Node, Signature]
    given: dict[Value, Sbp]
    offers: dict[Value, Split]
    late: dict[fx.Node, fx.Node]


def refuse_barriers(walk: Walked) -> None:
    """Nothing that forward or backward still needs may wait for the last micro-batch.

    Raises:
        PlanError: something does.
    """
    for node, cause in walk.late.items():
        own = walk.facts[node]
        if own.phase not in (Phase.RECOMPUTE, Phase.BACKWARD):
            continue
        forward = info_of(cause).phase is Phase.FORWARD
        reads_rows = any(
            isinstance(walk.given[value], Split) or value in walk.offers for value in own.sources
        )
        if forward or reads_rows:
            blamed = cause if forward else node
            raise PlanError(told(walk, blamed, _needs(walk, blamed)))


def refuse_echoes(walk: Walked) -> None:
    """What is the same in every micro-batch, but made in each, is not there after them.

    Raises:
        PlanError: something reads it then.
    """
    for node, signature in walk.chosen.items():
        walked = node not in walk.late and any(one != B for one in signature.inputs)
        if walked and set(signature.outputs) == {B}:
            for user in _users(walk, node):
                if user in walk.late:
                    what = f"is read by %{user.name} after the last micro-batch, and is of one only"
                    raise PlanError(told(walk, node, what))


def _users(walk: Walked, node: fx.Node) -> Iterator[fx.Node]:
    for user, own in walk.facts.items():
        if any(source is node for source, _ in own.sources):
            yield user


def _needs(walk: Walked, node: fx.Node) -> str:
    """In which layouts a node would have to have what it reads."""
    own, layouts = walk.facts[node], []
    for value, wanted in zip(own.sources, walk.plan.wanted(node), strict=True):
        given = walk.given[value]
        if not isinstance(given, Broadcast) or value in walk.offers:
            comes = text((*walk.plan.layouts(value[0])[value[1]], walk.offers.get(value, given)))
            layouts.append(f"{_name(walk, value)} comes as {comes} and is wanted {text((*wanted, B))}")
    along = ", ".join((*walk.plan.placement.axes, "time"))
    return f"needs all of the batch at once, and backward waits for it: along ({along}) " + "; ".join(
        layouts or ["what it reads is whole only after the last micro-batch"]
    )


def _name(walk: Walked, value: Value) -> str:
    return walk.names.get(value[0]) or f"%{value[0].name}"


def told(walk: Walked, node: fx.Node, what: str) -> str:
    info: NodeInfo = info_of(node)
    where = f" at {info.source}" * bool(info.source) + f" in {info.module!r}" * bool(info.module)
    return (
        f"micro_batches={walk.num}: %{node.name} = {op_name(node.target)}{where} {what}. Use "
        "micro_batches=1, take a statistic over the batch out of the step or of what backward needs "
        "(.detach() does not help: forward waits for it too), or for batch norm in training "
        'batch_stats="local"'
    )
