"""The Plan: for one StepGraph and placement, the signature of every node along every axis."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import fx

from ..errors import PlanError
from ..graph.step_graph import StepGraph, is_getitem, metas_of, op_name, source_of, tensor_args
from ..mesh import Placement
from ..sbp.layout import Broadcast, NdSbp, Partial, Sbp, Split, text
from ..sbp.signature import Signature


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout for every tensor of a step.

    Attributes:
        graph: the graph that is planned (ops may have been expanded into simpler ones for it).
        placement: the devices.
        name: the template, or "pins".
        signatures: per node name, one signature per axis; getitem nodes have none of their own.
        inputs: how every input is stored, by input name.
        outputs: how every output is handed out, by output name.
        unruled: ops that run replicated for want of a rule: node name -> bytes of their inputs and outputs.
    """

    graph: StepGraph
    placement: Placement
    name: str
    signatures: Mapping[str, tuple[Signature, ...]]
    inputs: Mapping[str, NdSbp]
    outputs: Mapping[str, NdSbp]
    unruled: Mapping[str, int]

    def layouts(self, node: fx.Node) -> tuple[NdSbp, ...]:
        """The nd-SBP of every tensor output of a node."""
        if node.op == "placeholder":
            return (self.inputs[self._input_names[node]],)
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

    def text(self) -> str:
        """The plan for people: storage of inputs, then one line a node."""
        lines = [f"Plan {self.name} of {self.graph.name} on {self.placement}"]
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
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        data = {
            "format": 1,
            "graph": fingerprint(self.graph),
            "name": self.name,
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
        }
        Path(path).write_text(json.dumps(data, indent=1))

    @staticmethod
    def load(path: str | Path, graph: StepGraph) -> Plan:
        """Reads a saved plan for the graph that it was made for.

        Raises:
            PlanError: the file is no plan, or it was made for another graph.
        """
        try:
            data: dict[str, Any] = json.loads(Path(path).read_text())
            made_for = data["graph"]
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{path} is not a saved plan ({error})") from None
        if made_for != fingerprint(graph):
            raise PlanError(
                f"the plan in {path} was made for graph {made_for}, this step is {fingerprint(graph)}; "
                "model, batch shapes or optimizer differ. Plan again for this step"
            )
        where = data["placement"]
        return Plan(
            graph,
            Placement(
                where["device_type"], tuple(where["ranks"]), tuple(where["shape"]), tuple(where["axes"])
            ),
            data["name"],
            {
                name: tuple(Signature(_tuple(one[0]), _tuple(one[1])) for one in axes)
                for name, axes in data["signatures"].items()
            },
            {name: _tuple(one) for name, one in data["inputs"].items()},
            {name: _tuple(one) for name, one in data["outputs"].items()},
            data["unruled"],
        )


def fingerprint(graph: StepGraph) -> str:
    """A short hash of what the graph computes: ops, arguments, shapes and roles."""
    lines = [f"{one.name} {one.role} {one.meta}" for one in graph.inputs]
    lines += [f"{n.name} {op_name(n.target)} {n.args} {n.kwargs} {metas_of(n)}" for n in graph.calls()]
    lines += [
        f"{one.name} {one.replaces} {node}" for one, node in zip(graph.outputs, graph.results, strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _list(layout: tuple[Sbp, ...]) -> list:
    return [
        ["S", one.dim, one.blocks, one.unit] if isinstance(one, Split) else ["P", one.op]
        if isinstance(one, Partial) else ["B"]
        for one in layout
    ]  # fmt: skip


def _tuple(layout: list) -> tuple[Sbp, ...]:
    made = {"S": Split, "P": Partial, "B": Broadcast}
    return tuple(made[one[0]](*one[1:]) for one in layout)
