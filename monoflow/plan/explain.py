"""Why a plan lays a part of a step out as it does: what was chosen, what else there was, at what prices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import fx

from ..errors import PlanError
from ..graph.passes.recompute import AGAIN
from ..graph.step_graph import info_of, is_getitem, op_name, source_of, tensor_args
from ..sbp.layout import B, NdSbp, local_shape, text
from ..sbp.signature import Signature
from .around import Around
from .facts import may_share_memory
from .labels import Label, Value
from .names import matching, near
from .order import IN_PLACE
from .problem import needed_nodes
from .tabulate import aligned, brief, duration, size


@dataclass(frozen=True)
class Option:
    """One way to run an op or to store an input.

    Attributes:
        axes: along every axis, outermost first: a signature, or an SBP.
        seconds: of all that depends on it: `work`, and the moves of what it reads and makes to all readers.
        work: seconds of the op itself.
    """

    axes: tuple[str, ...]
    seconds: float
    work: float


@dataclass(frozen=True)
class Moved:
    """A tensor that an op reads in another layout than it comes in.

    Attributes:
        source, target: how it comes and how it is read.
        seconds: of the move; other readers that want the same share it.
    """

    tensor: str
    source: str
    target: str
    seconds: float


@dataclass(frozen=True)
class Choice:
    """An op or an input, and what was chosen for it.

    Attributes:
        name: of the op's node, or of the input.
        op: what it computes; of an input, its role.
        meta: shape and dtype of what it makes.
        phase: the part of the step; "" of an input.
        source: "file:line" of the user's own code.
        chosen: as the plan has it.
        runner_up: the best other option with all else as it is; None if there is none.
        num_options: how many there were.
        moved: what it reads in another layout than it comes in.
        held: bytes that a rank holds of what it makes; none for views and updates in place.
        until: the phase that reads it last; "the end" for what stays.
        again: whether backward computes it again instead of keeping it; prices are of once.
        copies: how many of its kind, one a repeated layer, were decided together; prices are of one.
        has_rule: False where it runs whole for want of a rule.
    """

    name: str
    op: str
    meta: str
    phase: str
    module: str
    source: str
    chosen: Option
    runner_up: Option | None
    num_options: int
    moved: tuple[Moved, ...]
    held: int
    until: str
    again: bool
    copies: int
    has_rule: bool


@dataclass(frozen=True)
class Explanation:
    """The choices of one part of a plan.

    Attributes:
        pattern: what was asked for.
        plan: the plan's name.
        axes: the names of the mesh axes.
        choices: inputs, then ops in the order of the graph.
    """

    pattern: str
    plan: str
    axes: tuple[str, ...]
    choices: tuple[Choice, ...]

    def as_data(self) -> dict[str, Any]:
        """As JSON has it: dicts, lists and numbers."""
        return asdict(self)

    def text(self) -> str:
        """The choices as a table for people."""
        copies = sorted({one.copies for one in self.choices if one.copies > 1})
        alike = f", as in {' or '.join(map(str, copies))} layers" if copies else ""
        head = f"{self.pattern} in plan {self.plan!r}{alike}: all else as it is, a step of one rank takes"
        columns = ("", "", *self.axes, "price", "work", "runner-up", "costs", "holds", "until", "source")
        lines: list[Sequence[str] | str] = [columns]
        for one in self.choices:
            lines.append(self._row(one))
            lines += [
                f"    moves {moved.tensor} from {moved.source} to {moved.target}: {duration(moved.seconds)}"
                for moved in one.moved
            ]
        return "\n".join([head, *aligned(lines, right=(len(self.axes) + 2, len(self.axes) + 3))])

    def _row(self, one: Choice) -> Sequence[str]:
        chosen, other = one.chosen, one.runner_up
        what = one.op if not one.phase else f"{one.phase} {one.op}"
        marks = " again" * one.again + " (no rule)" * (not one.has_rule)
        until = one.until if one.held else ""
        return (
            one.name if not one.phase else f"%{one.name}",
            what + marks,
            *map(brief, chosen.axes),
            duration(chosen.seconds),
            duration(chosen.work) if one.phase else "",
            "; ".join(self._differs(chosen, other)) if other else "none",
            _against(chosen, other) if other else "",
            size(one.held) if one.held else "",
            until,
            one.source,
        )

    def _differs(self, chosen: Option, other: Option) -> Iterator[str]:
        """Where the runner-up is another: by the axis' name, if there are several."""
        for axis, now, then in zip(self.axes, chosen.axes, other.axes, strict=True):
            if now != then:
                yield f"{axis}: {brief(then)}" if len(self.axes) > 1 else brief(then)


def explain(around: Around, pattern: str) -> Explanation:
    """Explains the choices for a part of a step.

    Args:
        around: the plan among its alternatives.
        pattern: a module such as "layers.3.mlp", with all that it holds; the name of an input or a node; or
            any of these with `*`.

    Raises:
        PlanError: nothing is called so; the message lists what is called nearly so.
    """
    plan = around.plan
    teller = _Teller(around)
    choices = [teller.choice(node) for node in matching(around.graph, pattern) if teller.is_run(node)]
    if not choices:
        listed = ", ".join(near(around.graph, pattern))
        raise PlanError(
            f"nothing in {around.graph.name} is called {pattern!r}: no module, input or node"
            f"{f'; near it are {listed}' if listed else ''}. The plan's text() lists all of them"
        )
    return Explanation(pattern, plan.name, around.whole.axes, tuple(choices))


# --- one choice ----------------------------------------------------------------------------------------


class _Teller:
    """Looks up what is said of one node."""

    def __init__(self, around: Around) -> None:
        self.around, self.problem, self.plan, self.whole = around, around.problem, around.plan, around.whole
        calls = [node for node in self.plan.graph.calls() if not is_getitem(node)]
        self.dropped = {node.meta[AGAIN] for node in calls if AGAIN in node.meta}
        self.views: set[tuple[str, int]] = set()
        self.last = self._last_readers(calls)

    def _last_readers(self, calls: Sequence[fx.Node]) -> dict[tuple[str, int], str]:
        """By name and output of an op or an input: the phase that reads it or a view of it last."""
        graph = self.plan.graph
        needed = needed_nodes(graph)
        root: dict[Value, Value] = {}
        found: dict[tuple[str, int], str] = {}
        for node in calls:
            sources = [source_of(one) for one in tensor_args(node)]
            if sources and may_share_memory(node.target):
                for index in range(len(self.plan.signatures[node.name][0].outputs)):
                    root[node, index] = root.get(sources[0], sources[0])
                    self.views.add((node.name, index))
            for value in sources if node in needed else ():
                first, index = root.get(value, value)
                found[first.name, index] = str(info_of(node).phase)
        for one, node in zip(graph.outputs, graph.results, strict=True):
            if not one.observed:
                first, index = root.get(source_of(node), source_of(node))
                found[first.name, index] = "the end"
        return found

    def is_run(self, node: fx.Node) -> bool:
        """Whether it is part of every step: not if it only serves those who observe gradients."""
        return node.op == "placeholder" or node in self.problem.needed

    def choice(self, node: fx.Node) -> Choice:
        around, options = self.around, self.around.options(node)
        prices, work, at = around.prices(node), around.work(node), around.position(node)
        others = prices.copy()
        others[at] = np.inf
        second = int(others.argmin())
        info, is_input = info_of(node), node.op == "placeholder"
        name = self.problem.names[node] if is_input else node.name
        values = self._values(node)
        return Choice(
            name,
            str(around.graph.input_of[name].role) if is_input else _short_op(node),
            ", ".join(str(self.problem.labels.metas[value]) for value in values),
            "" if is_input else str(info.phase),
            "" if is_input else info.module,
            "" if is_input else "/".join(PurePath(info.source).parts[-2:]),
            self._option(node, options[at], prices[at], work[at]),
            self._option(node, options[second], prices[second], work[second])
            if np.isfinite(others[second])
            else None,
            int(np.isfinite(prices).sum()),
            () if is_input else tuple(self._moved(node)),
            sum(map(self._held, values)),
            "the end" if is_input else self._until(values),
            node.name in self.dropped or AGAIN in node.meta,
            len(around.folding.members[around.folding.first[node]]),
            name not in self.plan.unruled,
        )

    def _in_time(self, node: fx.Node) -> tuple[Signature, ...]:
        """How a node runs along time, if the plan has such an axis."""
        if not self.whole.has_time:
            return ()
        if node.op == "placeholder":
            return (Signature((), (B,)),)
        return (self.whole.signatures[node.name][-1],)

    def _option(self, node: fx.Node, one: Label | NdSbp, seconds: float, work: float) -> Option:
        """One way to lay a node out on the devices, with how it runs along time in any."""
        time = ["B" if node.op == "placeholder" else str(signature) for signature in self._in_time(node)]
        return Option((*map(str, one), *time), float(seconds), float(work))

    def _until(self, values: Sequence[Value]) -> str:
        phases = (self.last.get((node.name, index), "") for node, index in values)
        return max(phases, key=_when, default="")

    def _values(self, node: fx.Node) -> list[Value]:
        metas = self.problem.labels.metas
        count = 1 if node.op == "placeholder" else len(self.plan.signatures[node.name][0].outputs)
        return [(node, index) for index in range(count) if metas[node, index] is not None]

    def _given(self, value: Value) -> NdSbp:
        node, index = value
        if node.op == "placeholder":
            return self.plan.inputs[self.problem.names[node]]
        return tuple(axis.outputs[index] for axis in self.plan.signatures[node.name])

    def _moved(self, node: fx.Node) -> Iterator[Moved]:
        seen = set()
        signatures = self.plan.signatures[node.name]
        for position, value in enumerate(self.problem.labels.sources[node]):
            given, wanted = self._given(value), tuple(axis.inputs[position] for axis in signatures)
            if given != wanted and (value, wanted) not in seen:
                seen.add((value, wanted))
                seconds = self.around.move_seconds(value, given, wanted)
                name = self.problem.names.get(value[0]) or f"%{value[0].name}"
                yield Moved(name, text(given), text(wanted), seconds)

    def _held(self, value: Value) -> int:
        """Bytes of the largest shard, if the tensor has memory of its own."""
        if (value[0].name, value[1]) in self.views or value[0].target in IN_PLACE:
            return 0
        meta, mesh = self.problem.labels.metas[value], self.whole.mesh
        assert meta is not None
        given = (*self._given(value), *(one.outputs[value[1]] for one in self._in_time(value[0])))
        shape = local_shape(meta.shape, given, mesh, (0,) * len(mesh))
        return int(np.prod(shape)) * meta.dtype.itemsize


def _short_op(node: fx.Node) -> str:
    return op_name(node.target).removeprefix("aten.").removesuffix(".default")


_PHASES = ("", "prologue", "forward", "recompute", "backward", "update", "the end")


def _when(phase: str) -> int:
    return _PHASES.index(phase)


def _against(chosen: Option, other: Option) -> str:
    """What another option costs more; or less, where something else decides: a limit, a template, a pin."""
    more = other.seconds - chosen.seconds
    shown = duration(abs(more))
    return "the same" if shown == duration(0.0) else f"{'+' if more > 0 else '-'}{shown}"
