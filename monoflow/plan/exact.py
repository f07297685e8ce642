"""Whether a plan runs every op as a rule calls exact: what a plan that is read from a file must show.

A file may be damaged, edited, or written by a version whose rules were others. A signature that is almost
right would be a wrong number that nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from ..errors import PlanError
from ..graph.step_graph import info_of, is_getitem, op_call, op_name
from ..sbp.layout import At, Split, fits, is_even
from ..sbp.registry import OpRule, replicated, staged
from ..sbp.signature import OpCall, Signature
from .calls import cut, sides

if TYPE_CHECKING:
    from .plan import Plan


def require_exact(plan: Plan, rules: Mapping[Callable, OpRule], origin: str) -> Plan:
    """Returns the plan if every signature is one that a rule gives for its call.

    Raises:
        PlanError: one is not; the message names `origin`, the op and its line.
    """
    checker = _Checker(plan, rules)
    for node in plan.graph.calls():
        if not is_getitem(node):
            found = checker.inexact(node)
            if found is not None:
                axis, signature = found
                info = info_of(node)
                raise PlanError(
                    f"{origin} runs %{node.name} = {op_name(node.target)} along axis "
                    f"{plan.axes[axis]} as {signature}, which no rule of this version calls exact "
                    f"(at {info.source} {info.module}); plan again"
                )
    return plan


class _Checker:
    def __init__(self, plan: Plan, rules: Mapping[Callable, OpRule]) -> None:
        self.plan, self.rules = plan, rules
        self._known: dict[Any, bool] = {}

    def inexact(self, node: fx.Node) -> tuple[int, Signature] | None:
        """The first axis along which an op is not run as its rule says, and how it is."""
        call = op_call(node)
        before: dict[tuple[int, int], bool] = {}  # (which tensor, dim) that outer axes split: whether evenly
        for axis, signature in enumerate(self.plan.signatures[node.name]):
            size = self.plan.mesh[axis]
            counts = len(signature.inputs) == len(call.inputs), len(signature.outputs) == len(call.outputs)
            if not all(counts) or not self._is_exact(call, signature, size):
                return axis, signature
            split = dict(_splits(call, signature, size))
            is_time = axis == self.plan.placement.num_axes  # cuts last, so what it leaves may be uneven
            for key, evenly in split.items():
                if key in before and not (before[key] and (evenly or is_time)):
                    return axis, signature  # a dim that several axes split is even on all of them
            before |= split
            call = cut(call, signature, size)
        return None

    def _is_exact(self, call: OpCall, signature: Signature, size: int) -> bool:
        key = repr((call.op, call.args, dict(call.kwargs), call.outputs, signature, size))
        if key not in self._known:
            stages = {one.stage for one in (*signature.inputs, *signature.outputs) if isinstance(one, At)}
            runs_once = len(stages) == 1 and max(stages) < size and signature == staged(call, *stages)
            self._known[key] = (
                runs_once or signature == replicated(call) or self._is_listed(call, signature, size)
            )
        return self._known[key]

    def _is_listed(self, call: OpCall, signature: Signature, size: int) -> bool:
        rule = self.rules.get(call.op)
        if rule is None:
            return False
        forms = [[one] if isinstance(one, Split) else [] for one in signature.inputs]
        fitting = all(
            0 <= one.dim < len(meta.shape) and fits(meta.shape[one.dim], one, size)
            for meta, one in sides(call, signature)
            if isinstance(one, Split) and meta is not None
        )
        return fitting and signature in rule.signatures(call, size, forms)


def _splits(call: OpCall, signature: Signature, size: int) -> Iterator[tuple[tuple[int, int], bool]]:
    """(which tensor, dim) that a signature splits, and whether evenly."""
    for number, (meta, one) in enumerate(sides(call, signature)):
        if meta is not None and isinstance(one, Split):
            yield (number, one.dim), is_even(meta.shape[one.dim], one, size)
