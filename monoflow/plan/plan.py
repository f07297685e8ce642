"""The Plan: for one StepGraph and placement, the signature of every node along every axis."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from ..boxing.route import LinkCost
from ..errors import PlanError
from ..graph.step_graph import StepGraph, is_getitem, metas_of, op_name, source_of, tensor_args
from ..mesh import Placement, placement
from ..sbp.layout import At, B, Broadcast, NdSbp, Partial, Sbp, Split, text
from ..sbp.registry import OpRule
from ..sbp.signature import Signature
from ..sbp.sources import RuleBook
from .around import Around
from .checked import Checked
from .cost import Curve, Device, Machine
from .diff import Difference, diff
from .exact import require_exact
from .explain import Explanation, explain
from .rewrites import Rewrite, rewritten
from .verify import complete

if TYPE_CHECKING:
    from .predict import Prediction


_LETTERS: Mapping[type, str] = {Split: "S", Partial: "P", Broadcast: "B", At: "At"}
_FORMAT = 7

#: The name of the axis of micro-batches.
TIME_AXIS = "time"


@dataclass(frozen=True)
class Search:
    """How a plan was found.

    Attributes:
        bound: no plan for this graph and mesh takes fewer seconds by the same prices when nothing is hidden,
            as far as was proven.
        gap: how far the plan may be above that, relative to its own seconds with all its moves.
        tried: other plans that were considered: name -> predicted seconds, and bytes at the peak.
        limit: bytes that a rank may hold; 0 for no limit.
        left_out: plans that were not looked at, as the budget of work was spent.
    """

    bound: float
    gap: float
    tried: Mapping[str, tuple[float, int]]
    limit: int = 0
    left_out: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout for every tensor of a step.

    Attributes:
        graph: the graph that is planned (ops may have been expanded into simpler ones for it).
        placement: the devices.
        name: the template, or "pins".
        signatures: per node name, one signature per axis of `axes`; getitem nodes have none of their own.
        inputs: how every input is stored on the placement, by input name.
        outputs: how every output is handed out on the placement, by output name.
        unruled: ops that run replicated for want of a rule: node name -> bytes of their inputs and outputs.
        machine: what it was planned for: links decide between routes. None for no machine in particular.
        captured: the fingerprint of the graph as it was captured, before `rewrites`.
        rewrites: what was done to the captured graph for this plan, in order.
        search: what the search for this plan says of it; None for a template's.
        predicted: what a step will cost.
        micro_batches: in how many the batch is walked. With several, "time" is the innermost axis of the
            mesh: of so many coordinates, which every rank goes through one after the other.
        is_pulled: whether ranks pull micro-batches, their own or another's, as they are free (see `balance`).
        is_frugal: whether nothing is held a while longer so that moves can hide behind compute.
        zero_bubble: whether a stage computes the gradients of weights when nobody waits for it.
        memory: what the check of its programs says; None before they are made.
    """

    graph: StepGraph
    placement: Placement
    name: str
    signatures: Mapping[str, tuple[Signature, ...]]
    inputs: Mapping[str, NdSbp]
    outputs: Mapping[str, NdSbp]
    unruled: Mapping[str, int]
    machine: Machine | None = None
    captured: str = ""
    rewrites: tuple[Rewrite, ...] = ()
    search: Search | None = None
    predicted: Prediction | None = None
    micro_batches: int = 1
    is_pulled: bool = False
    is_frugal: bool = False
    zero_bubble: bool = False
    memory: Checked | None = None

    @property
    def has_time(self) -> bool:
        """Whether the mesh has an axis of micro-batches."""
        return self.micro_batches > 1

    @property
    def mesh(self) -> tuple[int, ...]:
        """The extent of every axis: the placement's and, where there is one, time's."""
        return (*self.placement.shape, *((self.micro_batches,) if self.has_time else ()))

    @property
    def axes(self) -> tuple[str, ...]:
        """The name of every axis of `mesh`."""
        return (*self.placement.axes, *((TIME_AXIS,) if self.has_time else ()))

    def on_mesh(self, layout: NdSbp) -> NdSbp:
        """How an input or output lies along all axes: it is whole along time."""
        return (*layout, B) if self.has_time else layout

    @cached_property
    def spatial(self) -> Plan:
        """The same layouts with the whole batch at once."""
        if not self.has_time:
            return self
        signatures = {name: axes[:-1] for name, axes in self.signatures.items()}
        return replace(
            self, signatures=signatures, micro_batches=1, is_pulled=False, predicted=None, memory=None
        )

    @cached_property
    def stage_axis(self) -> int | None:
        """The axis of the placement at whose ranks a pipeline's stages lie."""
        layouts = (*self.inputs.values(), *self.outputs.values())
        return next((axis for one in layouts for axis, sbp in enumerate(one) if isinstance(sbp, At)), None)

    @property
    def has_stages(self) -> bool:
        """Whether some of the state lies at one stage of an axis."""
        return self.stage_axis is not None

    @property
    def overlaps(self) -> bool:
        """Whether moves run beside compute, which holds more; of frugal plans, only those with stages do."""
        return self.placement.size > 1 and (not self.is_frugal or self.has_stages)

    @property
    def links(self) -> tuple[LinkCost, ...] | None:
        """What moves cost, per axis; None where that is not known."""
        return self.machine.links if self.machine is not None else None

    @property
    def made_for(self) -> str:
        """The fingerprint of the captured graph."""
        return self.captured or fingerprint(self.graph)

    def layouts(self, node: fx.Node) -> tuple[NdSbp, ...]:
        """The nd-SBP of every tensor output of a node."""
        if node.op == "placeholder":
            return (self.on_mesh(self.inputs[self._input_names[node]]),)
        if is_getitem(node):
            source, index = source_of(node)
            return (self.layouts(source)[index],)
        axes = self.signatures[node.name]
        return tuple(tuple(axis.outputs[i] for axis in axes) for i in range(len(metas_of(node))))

    def wanted(self, node: fx.Node) -> tuple[NdSbp, ...]:
        """The nd-SBP in which a node takes every tensor input."""
        axes = self.signatures[node.name]
        return tuple(tuple(axis.inputs[i] for axis in axes) for i in range(len(tensor_args(node))))

    @cached_property
    def _input_names(self) -> dict[fx.Node, str]:
        return {node: name for name, node in self.graph.placeholders.items()}

    @cached_property
    def _around(self) -> Around:
        return Around(self, RuleBook())

    def explain(self, pattern: str) -> Explanation:
        """Why a part of the step is laid out as it is: for every op and parameter what was chosen, what else
        there was, and the price of each.

        Args:
            pattern: a module such as "layers.3.mlp", an input, a node, or any of these with `*`.

        Raises:
            PlanError: nothing is called so; the message lists what nearly is.
        """
        return explain(self._around, pattern)

    def diff(self, other: Plan) -> Difference:
        """What another plan of the same captured step does differently, and what both are predicted to cost.

        Raises:
            PlanError: the other plan is of another graph.
        """
        return diff(self, other)

    def text(self) -> str:
        """The plan for people: storage of inputs, then one line a node."""
        walked = f", {self.micro_batches} micro-batches" if self.has_time else ""
        walked += " a rank, pulled by whichever is free" * self.is_pulled
        walked += ", gradients of weights where a stage would idle" * (self.zero_bubble and self.has_time)
        lines = [f"Plan {self.name} of {self.graph.name} on {self.placement}{walked}"]
        for one in self.graph.inputs:
            lines.append(f"  {one.role} {one.name} {one.meta}: {text(self.inputs[one.name])}")
        for node in self.graph.calls():
            if not is_getitem(node):
                wanted = ", ".join(text(one) for one in self.wanted(node))
                given = ", ".join(text(one) for one in self.layouts(node))
                lines.append(f"  %{node.name} = {op_name(node.target)}: {wanted} -> {given}")
        for one in self.graph.outputs:
            lines.append(f"  return {one.name}: {text(self.outputs[one.name])}")
        for name, num_bytes in self.unruled.items():
            lines.append(f"  no rule: %{name} runs replicated, {num_bytes:,} bytes")
        if self.memory is not None:
            lines += [f"  {line}" for line in self.memory.text().splitlines()]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.dumps())

    def dumps(self) -> str:
        """The plan as the text of a JSON document."""
        data = {
            "format": _FORMAT,
            "graph": self.made_for,
            "name": self.name,
            "micro_batches": self.micro_batches,
            "is_pulled": self.is_pulled,
            "is_frugal": self.is_frugal,
            "zero_bubble": self.zero_bubble,
            "placement": {
                "device_type": self.placement.device_type,
                "ranks": self.placement.ranks,
                "shape": self.placement.shape,
                "axes": self.placement.axes,
            },
            "signatures": {
                name: [[_list(one.inputs), _list(one.outputs)] for one in axes]
                for name, axes in self.signatures.items()
            },
            "inputs": {name: _list(one) for name, one in self.inputs.items()},
            "outputs": {name: _list(one) for name, one in self.outputs.items()},
            "unruled": dict(self.unruled),
            "machine": None if self.machine is None else asdict(self.machine),
            "rewrites": [[kind, list(names)] for kind, names in self.rewrites],
            "search": None if self.search is None else asdict(self.search),
        }
        return json.dumps(data, indent=1)

    @staticmethod
    def load(path: str | Path, graph: StepGraph, rules: Mapping[Callable, OpRule] | None = None) -> Plan:
        """Reads a saved plan for the captured graph that it was made for.

        Args:
            rules: the ops' rules, which must call every signature exact; those of `RuleBook` if left out.

        Raises:
            PlanError: the file is no plan, it was made for another graph, or what it says is not exact.
        """
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanError(f"no plan can be read from {path} ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise PlanError(f"{path} is not a saved plan ({error})") from None
        rules = RuleBook() if rules is None else rules
        read = Plan.parse(text, graph, str(path), rules)
        try:
            complete(read)
        except (AssertionError, LookupError, ValueError) as error:
            raise PlanError(f"{path} is damaged: {error}") from error
        return require_exact(read, rules, f"the plan in {path}")

    @staticmethod
    def parse(
        text: str, graph: StepGraph, origin: str, rules: Mapping[Callable, OpRule] | None = None
    ) -> Plan:
        """The plan in a saved plan's text; `origin` names where it comes from in errors. See `load`."""
        try:
            data: dict[str, Any] = json.loads(text)
            made_for = data["graph"]
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{origin} is not a saved plan ({error})") from None
        if data.get("format") != _FORMAT:
            raise PlanError(
                f"{origin} has format {data.get('format')!r}, this version reads {_FORMAT}; plan again"
            )
        if made_for != fingerprint(graph):
            raise PlanError(
                f"the plan in {origin} was made for graph {made_for}, this step is {fingerprint(graph)}; "
                "model, batch shapes or optimizer differ. Plan again for this step"
            )
        try:
            return _built(data, graph, RuleBook() if rules is None else rules)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise PlanError(f"{origin} is damaged: {type(error).__name__} {error}") from error


def _built(data: Mapping[str, Any], graph: StepGraph, rules: Mapping[Callable, OpRule]) -> Plan:
    where = data["placement"]
    rewrites = tuple((kind, tuple(names)) for kind, names in data["rewrites"])
    search = data["search"]
    return Plan(
        rewritten(graph, rewrites, rules),
        placement(where["device_type"], np.reshape(where["ranks"], where["shape"]).tolist(), where["axes"]),
        data["name"],
        {
            name: tuple(Signature(_tuple(one[0]), _tuple(one[1])) for one in axes)
            for name, axes in data["signatures"].items()
        },
        {name: _tuple(one) for name, one in data["inputs"].items()},
        {name: _tuple(one) for name, one in data["outputs"].items()},
        data["unruled"],
        _machine(data["machine"]),
        data["graph"],
        rewrites,
        None
        if search is None
        else Search(
            search["bound"],
            search["gap"],
            {k: tuple(v) for k, v in search["tried"].items()},
            search["limit"],
            search["left_out"],
        ),
        micro_batches=data["micro_batches"],
        is_pulled=data["is_pulled"],
        is_frugal=data["is_frugal"],
        zero_bubble=data["zero_bubble"],
    )


def _machine(data: Mapping[str, Any] | None) -> Machine | None:
    if data is None:
        return None
    device = data["device"]
    curves = {key: _curve(one) for key, one in device["curves"].items()}
    links = (
        LinkCost(alpha, beta, launch, tuple((kind, _curve(one)) for kind, one in measured))
        for alpha, beta, launch, measured in data["links"]
    )
    return Machine(Device(**{**device, "curves": curves}), tuple(links))


def _curve(data: Mapping[str, Any]) -> Curve:
    return Curve(tuple((amount, seconds) for amount, seconds in data["points"]))


def fingerprint(graph: StepGraph) -> str:
    """A short hash of what the graph computes: ops, arguments, shapes and roles."""
    lines = [f"{one.name} {one.role} {one.meta}" for one in graph.inputs]
    lines += [f"{n.name} {op_name(n.target)} {n.args} {n.kwargs} {metas_of(n)}" for n in graph.calls()]
    lines += [
        f"{one.name} {one.replaces} {node}" for one, node in zip(graph.outputs, graph.results, strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _list(layout: tuple[Sbp, ...]) -> list:
    return [[_LETTERS[type(one)], *astuple(one)] for one in layout]


def _tuple(layout: list) -> tuple[Sbp, ...]:
    made = {letter: kind for kind, letter in _LETTERS.items()}
    return tuple(made[one[0]](*one[1:]) for one in layout)
