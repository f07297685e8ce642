"""The verifier of plans: what lowering may rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..boxing.route import fits_mesh
from ..config import SETTINGS
from ..graph.step_graph import is_getitem, metas_of, op_name, source_of, tensor_args
from ..sbp.layout import Broadcast, NdSbp, Partial, Split, text
from ..sbp.signature import TensorMeta
from .facts import facts_of
from .when import When, arriving, when_of

if TYPE_CHECKING:
    from .plan import Plan


def verify_plan(plan: Plan) -> Plan:
    """Returns the plan if it says how every tensor lies, and every layout fits; asserts otherwise."""
    return complete(plan) if SETTINGS.verify else plan


def complete(plan: Plan) -> Plan:
    """As `verify_plan`, whatever the settings."""
    _Check(plan).everything()
    return plan


class _Check:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.mesh = plan, plan.mesh
        self.fitting: set[tuple[tuple[int, ...], NdSbp]] = set()  # shapes and layouts, seen already

    def everything(self) -> None:
        plan, graph = self.plan, self.plan.graph
        assert plan.inputs.keys() == graph.input_of.keys(), "the plan's inputs are not the graph's"
        assert plan.outputs.keys() == {one.name for one in graph.outputs}, (
            "the plan's outputs are not the graph's"
        )
        for one in graph.inputs:
            self.layout(f"input {one.name}", one.meta, plan.on_mesh(plan.inputs[one.name]))
        for node in graph.calls():
            if is_getitem(node):
                continue
            where = f"%{node.name} = {op_name(node.target)}"
            axes = plan.signatures.get(node.name, ())
            assert len(axes) == len(self.mesh), f"{where} has {len(axes)} signatures on a mesh of {self.mesh}"
            sources = [metas_of(source)[0] for source in tensor_args(node)]
            for metas, layouts in ((sources, plan.wanted(node)), (metas_of(node), plan.layouts(node))):
                for meta, layout in zip(metas, layouts, strict=True):
                    if meta is not None:
                        self.layout(where, meta, layout)
        for one in graph.outputs:
            layout = plan.outputs[one.name]
            self.layout(f"output {one.name}", one.meta, plan.on_mesh(layout))
            if one.replaces in plan.inputs:
                before = plan.inputs[one.replaces]
                assert layout == before, (
                    f"{one.replaces} is stored {text(before)}, its next value {text(layout)}"
                )
            held = any(isinstance(part, Partial) for part in layout)
            assert not held or one.observed, f"output {one.name} is handed out as {text(layout)}"
        if plan.has_time:
            self.barriers()

    def barriers(self) -> None:
        """Nothing that is walked reads what is there only after the last micro-batch, nor what runs after
        reads what is of one micro-batch; a move along time goes from B to S, or from S or P to B."""
        when = when_of(self.plan, facts_of(self.plan.graph))
        for node in when:
            if node.op == "placeholder":
                continue
            where = f"%{node.name} = {op_name(node.target)}"
            for source, wanted in zip(tensor_args(node), self.plan.wanted(node), strict=True):
                given, then = self.plan.layouts(source)[0], wanted[-1]
                comes = arriving(given[-1], given, wanted, self.plan.placement.shape)
                giver = when[source_of(source)[0]]
                moves = f"{where} reads {source.name}, {text(given)}, as {text(wanted)}"
                is_folded = comes != then and isinstance(then, Broadcast)
                if comes == then:
                    of_one = isinstance(then, Broadcast) and giver is When.WALKED
                    assert not of_one or when[node] is When.WALKED, f"{moves} after the last micro-batch"
                elif not is_folded:
                    assert isinstance(comes, Broadcast) and isinstance(then, Split), moves
                is_after = is_folded or giver is When.AFTER
                assert not is_after or when[node] is When.AFTER, f"{moves} before the last micro-batch"

    def layout(self, where: str, meta: TensorMeta, layout: NdSbp) -> None:
        if (meta.shape, layout) in self.fitting:
            return
        assert len(layout) == len(self.mesh), f"{where}: {text(layout)} on a mesh of {self.mesh}"
        assert fits_mesh(meta.shape, layout, self.mesh), f"{where}: {text(layout)} does not fit {meta}"
        self.fitting.add((meta.shape, layout))
