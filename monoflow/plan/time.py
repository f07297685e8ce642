"""Time as an axis: a plan for the whole batch becomes one that walks it, micro-batch by micro-batch.

Every node gets one more signature, along time, from the rule that gives it those along the axes of devices:
what the batch's tensors go through is S(0), parameters are B, gradients come out P(sum). Accumulation is the
move P -> B. A move off S or P along time waits for the last micro-batch: nothing that forward or backward
still needs may want one, and what does is refused with its line.

What depends on the batch or on constants alone, and not on parameters, is there before the first micro-batch,
whole or cut as its readers like. Of several signatures that are exact for what a node reads, it takes the one
under which least of its results is held for a micro-batch, reading the batch cut along its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..errors import PlanError
from ..graph.step_graph import Phase, Role, is_getitem, op_call, source_of
from ..sbp.layout import B, NdSbp, P, Partial, Sbp, Split, fits, is_even
from ..sbp.registry import OpRule, replicated
from ..sbp.signature import OpCall, Signature
from ..sbp.sources import RuleBook
from .barriers import refuse_barriers, refuse_echoes, told
from .calls import cut, sides
from .facts import NodeFacts, facts_of
from .labels import Value
from .plan import Plan
from .rewrites import FACTORIES, rewritten
from .rows import check_parts, check_rows
from .template import batch_size
from .verify import verify_plan
from .when import arriving

#: The phases of a step that micro-batches go through.
WALKED = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
#: What a step keeps between calls: what depends on it is no matter of the batch alone.
_LEARNT = (Role.PARAM, Role.STATE, Role.GRAD)


def micro_batched(plan: Plan, num: int, rules: Mapping[Callable, OpRule] | None = None) -> Plan:
    """The plan with the batch in `num` micro-batches.

    Args:
        plan: one of the whole batch at once, by a template or a search.
        num: how many; the batch's rows on a rank are cut as torch.chunk does.

    Raises:
        PlanError: the batch has fewer rows, or does not divide over the devices; or an op that backward waits
            for needs the whole batch (the message names it, its line, and what to do).
    """
    if num == 1:
        return plan
    assert not plan.has_time, f"{plan.name} has {plan.micro_batches} micro-batches already"
    check_rows(plan, num)
    rules = RuleBook() if rules is None else rules
    plan = _with_factories(plan, rules)
    found = _walked(plan, num, rules)
    signatures = {node.name: (*plan.signatures[node.name], one) for node, one in found.items()}
    made = replace(plan, signatures=signatures, micro_batches=num, predicted=None)
    return verify_plan(made)


def _with_factories(plan: Plan, rules: Mapping[Callable, OpRule]) -> Plan:
    """The plan without ops that wait for a tensor, such as the loss, only to look at its shape."""
    graph = rewritten(plan.graph, [FACTORIES], rules)
    signatures = dict(plan.signatures)
    for node in graph.calls():
        if not is_getitem(node) and not node.all_input_nodes:
            signatures[node.name] = tuple(Signature((), axis.outputs) for axis in signatures[node.name])
    return replace(plan, graph=graph, signatures=signatures, rewrites=(*plan.rewrites, FACTORIES))


def _walked(plan: Plan, num: int, rules: Mapping[Callable, OpRule]) -> dict[fx.Node, Signature]:
    """The signatures along time. Where devices cut rows that come whole, these are cut so in time as well."""
    axes: frozenset[int] = frozenset()
    while True:
        walk = _Walk(plan, num, rules, axes)
        try:
            return walk.signatures()
        except PlanError:
            if walk.missing <= axes:
                raise
            axes |= walk.missing
            check_parts(plan, num, axes)


class _Walk:
    """The signatures along time of a plan's nodes, found in the order of the graph, then from its end.

    Args:
        axes: axes of devices along which the batch's rows may be cut although they come whole.

    Attributes:
        missing: axes of devices along which rows are cut, which is none of a micro-batch's.
    """

    def __init__(
        self, plan: Plan, num: int, rules: Mapping[Callable, OpRule], axes: frozenset[int] = frozenset()
    ) -> None:
        self.plan, self.num, self.rules, self.axes = plan, num, rules, axes
        self.missing: frozenset[int] = frozenset()
        self.facts = facts_of(plan.graph)
        self.names = {node: name for name, node in plan.graph.placeholders.items()}
        self.chosen: dict[fx.Node, Signature] = {}
        self.given: dict[Value, Sbp] = {}
        self.offers: dict[Value, Split] = {}  # how what is whole would lie if it were cut as the batch is
        self.others: dict[Value, set[Sbp]] = {}  # what else a node that only makes a tensor could give
        self.early: set[fx.Node] = set()  # what depends on no parameter and on no micro-batch
        self.late: dict[fx.Node, fx.Node] = {}  # what runs after the last micro-batch, and what made it so
        self.wholes: dict[fx.Node, OpCall] = {}
        self.calls: dict[fx.Node, OpCall] = {}  # as the axes of devices cut them
        self._known: dict[str, list[Signature]] = {}

    def signatures(self) -> dict[fx.Node, Signature]:
        """One for every node that is an op."""
        self._come_in()
        for node, own in self.facts.items():
            if node.op != "placeholder":
                self._add(node, own)
        refuse_barriers(self)
        self._postpone()
        self._sink()
        refuse_echoes(self)
        return self.chosen

    def _come_in(self) -> None:
        rows = batch_size(self.plan.graph)
        for name, node in self.plan.graph.placeholders.items():
            one = self.plan.graph.input_of[name]
            self.given[node, 0] = B
            if one.role not in _LEARNT:
                self.early.add(node)
            if one.role is Role.BATCH and one.meta.shape and one.meta.shape[0] == rows:
                self.offers[node, 0] = self._rows(self.plan.inputs[name])

    def _rows(self, layout: NdSbp) -> Split:
        """How the batch's rows are cut in time: within the parts in which the devices will hold them."""
        parts = 1
        for axis, (one, size) in enumerate(zip(layout, self.plan.placement.shape, strict=True)):
            parts *= size if axis in self.axes and not (isinstance(one, Split) and one.dim == 0) else 1
        return Split(0, parts)

    # --- in the order of the graph -----------------------------------------------------------------

    def _add(self, node: fx.Node, own: NodeFacts) -> None:
        call = self.calls[node] = self._local(node)
        whole = replicated(call)
        if own.phase is Phase.UPDATE:
            if not all(self._is_there(value) for value in own.sources):
                self.late[node] = self._cause(node, own)
            self._choose(node, whole)
        elif any(source in self.late for source, _ in own.sources):
            self.late[node] = self._cause(node, own)
            self._choose(node, whole)
        elif all(source in self.early for source, _ in own.sources):
            self.early.add(node)
            self._choose(node, whole)
            self._offer(node, own, call)
        elif own.phase is Phase.PROLOGUE:
            self._choose(node, whole)
        else:
            self._choose_walked(node, own, call)

    def _choose_walked(self, node: fx.Node, own: NodeFacts, call: OpCall) -> None:
        offered = self._arriving(node, own, self.offers)
        given = tuple(self._arriving(node, own, self.given))
        found = [one for one in self._signatures(node, call) if self._can_read(node, own, one)]
        whole = replicated(call)
        if None not in given and set(given) <= {B} and not any(offered):
            self._choose(node, whole)
            return
        free = [one for one in found if one.inputs == given != whole.inputs and set(one.outputs) == {B}]
        cutting = [one for one in found if any(part != B for part in (*one.inputs, *one.outputs))]
        if free:  # it only looks at a shape: readers decide
            self._choose(node, free[0])
            for index in range(len(whole.outputs)):
                self.others[node, index] = {one.outputs[index] for one in found} - {B}
        elif cutting:
            self._choose(node, min(cutting, key=lambda one: self._held(call, one, offered)))
        else:
            self.late[node] = node
            self._choose(node, whole)

    def _choose(self, node: fx.Node, signature: Signature) -> None:
        self.chosen[node] = signature
        for index, one in enumerate(signature.outputs):
            self.given[node, index] = one

    def _cause(self, node: fx.Node, own: NodeFacts) -> fx.Node:
        return next((self.late[source] for source, _ in own.sources if source in self.late), node)

    def _arriving(self, node: fx.Node, own: NodeFacts, lies: Mapping[Value, Sbp]) -> list[Sbp | None]:
        """How what a node reads lies along time where it reads it; None for what has no such layout."""
        wanted = self.plan.wanted(node)
        return [
            self._arrives(value, lies[value], one) if value in lies else None
            for value, one in zip(own.sources, wanted, strict=True)
        ]

    def _arrives(self, value: Value, time: Sbp, wanted: NdSbp) -> Sbp | None:
        given, mesh = self.plan.layouts(value[0])[value[1]], self.plan.placement.shape
        found = arriving(time, given, wanted, mesh)
        if found is None:
            assert isinstance(time, Split)
            cut = {
                axis
                for axis, (now, then) in enumerate(zip(given, wanted, strict=True))
                if now != then and isinstance(then, Split) and then.dim == time.dim
            }
            self.missing |= cut
        return found

    def _is_there(self, value: Value) -> bool:
        """Whether a tensor is whole before the last micro-batch is done."""
        return value[0] not in self.late and self.given[value] == B

    def _held(self, call: OpCall, one: Signature, offered: Sequence[Sbp | None]) -> tuple[int, float]:
        """How much of the batch is not read along its rows, then bytes of the results in a micro-batch."""
        astray = sum(
            offer is not None and wanted != offer for offer, wanted in zip(offered, one.inputs, strict=True)
        )
        held = sum(
            meta.num_bytes / (self.num if isinstance(sbp, Split) else 1)
            for meta, sbp in zip(call.outputs, one.outputs, strict=True)
            if meta is not None
        )
        return astray, held

    def _offer(self, node: fx.Node, own: NodeFacts, call: OpCall) -> None:
        """How what an early node makes would lie if the batch were cut along its rows."""
        offered = tuple(one or B for one in self._arriving(node, own, self.offers))
        if set(offered) <= {B}:
            return
        found = next(
            (
                one.outputs
                for one in self._signatures(node, call, offered)
                if one.inputs == offered and any(isinstance(part, Split) for part in one.outputs)
            ),
            (),
        )
        for index, meta in enumerate(call.outputs):
            one = found[index] if found else self._rows_of(call, offered, index)
            if meta is not None and isinstance(one, Split):
                self.offers[node, index] = one

    def _rows_of(self, call: OpCall, offered: Sequence[Sbp], index: int) -> Sbp:
        """Some rows of the batch are rows to cut, too."""
        made = call.outputs[index]
        for meta, one in zip(call.inputs, offered, strict=True):
            if not isinstance(one, Split) or one.dim or one.unit > 1 or made is None or not made.shape:
                continue
            if made.shape[1:] == meta.shape[1:]:
                return one if made.shape[0] >= self.num * one.blocks else B
        return B

    # --- what a node may do ------------------------------------------------------------------------

    def _local(self, node: fx.Node) -> OpCall:
        """The call as the axes of devices cut it."""
        call = self.wholes[node] = op_call(node)
        pairs = zip(self.plan.signatures[node.name], self.plan.placement.shape, strict=True)
        for signature, size in pairs:
            call = cut(call, signature, size)
        return call

    def _signatures(
        self, node: fx.Node, call: OpCall, given: Sequence[Sbp] | None = None
    ) -> Iterator[Signature]:
        """The exact signatures of a call along time, all-B first. Equal calls are asked once."""
        yield replicated(call)
        rule = self.rules.get(node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
        if rule is None:
            return
        forms = [[one for one in comes if isinstance(one, Split)] for comes in self._forms(node, given)]
        key = repr((call.op, call.args, dict(call.kwargs), call.outputs, forms))
        if key not in self._known:
            self._known[key] = rule.signatures(call, self.num, forms)
        for one in self._known[key]:
            if all(self._fits(node, position, one) for position in range(len(sides(call, one)))):
                yield one

    def _forms(self, node: fx.Node, given: Sequence[Sbp] | None) -> list[list[Sbp | None]]:
        """Per tensor that a node reads: how it may come."""
        if given is not None:
            return [[one] for one in given]
        own = self.facts[node]
        pairs = zip(
            self._arriving(node, own, self.given), self._arriving(node, own, self.offers), strict=True
        )
        return [list(pair) for pair in pairs]

    def _fits(self, node: fx.Node, position: int, signature: Signature) -> bool:
        """Whether a tensor can be cut so in time, within what its rank holds of it."""
        meta, one = sides(self.calls[node], signature)[position]
        if meta is None or not isinstance(one, Split):
            return True
        if not fits(meta.shape[one.dim], one, self.num):
            return False
        whole = sides(self.wholes[node], signature)[position][0]
        assert whole is not None
        extent = whole.shape[one.dim]
        for axis, size in zip(self.plan.signatures[node.name], self.plan.placement.shape, strict=True):
            outer = (*axis.inputs, *axis.outputs)[position]
            if isinstance(outer, Split) and outer.dim == one.dim:
                if not is_even(extent, outer, size):
                    return False
                extent //= size
        return True

    def _can_read(self, node: fx.Node, own: NodeFacts, signature: Signature) -> bool:
        """Whether a node can have everything that it reads as a signature wants it."""
        layouts = self.plan.wanted(node)
        return all(
            self._can_have(value, wanted, spatial)
            for value, wanted, spatial in zip(own.sources, signature.inputs, layouts, strict=True)
        )

    def _can_have(self, value: Value, wanted: Sbp, spatial: NdSbp) -> bool:
        given = self.given[value]
        if given == B and (wanted == B or isinstance(wanted, Split)):
            return True
        if self._arrives(value, given, spatial) == wanted:
            return self._can_move(self.plan.layouts(value[0])[value[1]], spatial, given)
        return wanted in self.others.get(value, ())

    def _can_move(self, given: NdSbp, wanted: NdSbp, time: Sbp) -> bool:
        """Whether devices can reduce a micro-batch's partials: a sum of maxima is no maximum of sums."""
        return not isinstance(time, Partial) or all(
            not isinstance(one, Partial) or one.op == time.op
            for now, then in zip(given, wanted, strict=True)
            for one in ((now, then) if now != then else ())
        )

    # --- from the end ------------------------------------------------------------------------------

    def _postpone(self) -> None:
        """Lets what is made of one sum be made of the whole sum, once, where only the end reads it.

        A gradient that is turned or scaled is so once a step, and devices then exchange it once. Not where it
        gets smaller or takes another dtype: a sum in bfloat16 is less exact than one of casts to float32.
        """
        users: dict[Value, list[fx.Node]] = {}
        for node in reversed(list(self.chosen)):
            own, call = self.facts[node], self.calls[node]
            read_late = all(
                user in self.late
                for index in range(len(call.outputs))
                for user in users.get((node, index), ())
            )
            if read_late and node not in self.late and own.phase in WALKED and self._is_of_one_sum(own, call):
                self.late[node] = node
                self._choose(node, replicated(call))
            for value in own.sources:
                users.setdefault(value, []).append(node)

    def _is_of_one_sum(self, own: NodeFacts, call: OpCall) -> bool:
        partials = [
            meta for value, meta in zip(own.sources, call.inputs, strict=True) if self.given[value] == P
        ]
        rest = [value for value in own.sources if self.given[value] != P]
        return (
            len(partials) == len(call.outputs) == 1
            and call.outputs[0] is not None
            and partials[0].dtype == call.outputs[0].dtype
            and partials[0].numel <= call.outputs[0].numel
            and all(self._is_there(value) and value not in self.offers for value in rest)
        )

    def _sink(self) -> None:
        """Lets nodes make only a micro-batch's part where that is all that anybody reads."""
        wants: dict[Value, set[Sbp]] = {}
        for node in self.plan.graph.results:
            wants.setdefault(source_of(node), set()).add(B)
        for node in reversed(list(self.chosen)):
            own, call = self.facts[node], self.calls[node]
            wanted = [wants.get((node, index), set()) for index in range(len(call.outputs))]
            whole = all(one == B for one in self.chosen[node].outputs) and node not in self.late
            if whole and own.phase in WALKED and any(wanted) and all(len(one) < 2 for one in wanted):
                self._sink_one(node, own, call, [next(iter(one), None) for one in wanted])
            for index, one in enumerate(wanted):
                partial = next((sbp for sbp in one if isinstance(sbp, Partial)), None)
                if partial is not None and self.given[node, index] != partial:
                    raise PlanError(told(self, node, f"is read as {' and as '.join(map(str, one))}"))
            layouts = self.plan.wanted(node)
            for value, one, wanted in zip(own.sources, self.chosen[node].inputs, layouts, strict=True):
                given = self.plan.layouts(value[0])[value[1]]
                made = arriving(one, wanted, given, self.plan.placement.shape)
                wants.setdefault(value, set()).add(B if made is None else made)

    def _sink_one(self, node: fx.Node, own: NodeFacts, call: OpCall, wanted: Sequence[Sbp | None]) -> None:
        if all(one in (None, B) for one in wanted):
            return
        forms = [one if isinstance(one, Split) else B for one in wanted]
        found = [
            signature
            for signature in self._sinking(node, call, forms)
            if all(one in (None, made) for one, made in zip(wanted, signature.outputs, strict=True))
            and self._can_read(node, own, signature)
        ]
        if found:
            most = max(found, key=lambda one: sum(isinstance(sbp, Split) for sbp in one.inputs))
            self._choose(node, most)

    def _sinking(self, node: fx.Node, call: OpCall, forms: Sequence[Sbp]) -> Iterator[Signature]:
        """Signatures of a node whose inputs may be cut like its results."""
        yield from self._signatures(node, call)
        shapes = [meta.shape if meta is not None else () for meta in call.outputs]
        for shape, form in zip(shapes, forms, strict=True):
            given = [form if meta.shape == shape else B for meta in call.inputs]
            if isinstance(form, Split) and form not in (B, Split(form.dim)):
                yield from self._signatures(node, call, given)
