"""What two plans of one step do differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from ..errors import PlanError
from ..graph.passes.recompute import AGAIN
from ..graph.step_graph import info_of, is_getitem, metas_of, op_name
from ..sbp.layout import text
from .tabulate import aligned, brief, duration, pattern_of, size

if TYPE_CHECKING:
    from .plan import Plan
    from .predict import Prediction

_MOST_ROWS = 40  # of one kind in the text form
ABSENT = "-"


@dataclass(frozen=True)
class Figure:
    """One number of both plans; None where a plan is not predicted, or has no such axis."""

    name: str
    unit: str
    ours: float | None
    theirs: float | None


@dataclass(frozen=True)
class Change:
    """Tensors or ops of the same name (but for numbers), shape and kind that both plans treat alike.

    Attributes:
        name: with `*` for the numbers in it: of an input or output, or of the module of an op.
        what: role and shape of an input or output, or phase and op.
        ours, theirs: the layout or, one an axis, the signatures; "-" where a plan has no such thing.
    """

    name: str
    what: str
    count: int
    ours: str
    theirs: str


@dataclass(frozen=True)
class Difference:
    """Where one plan ("ours") differs from another ("theirs").

    Attributes:
        step: the step's name.
        ours, theirs: the plans' names.
        placements: the devices of both.
        machines: what both were planned for.
        micro_batches: in how many both walk the batch.
        figures: what both are predicted to cost, equal or not.
        stored: inputs and outputs that lie otherwise.
        run: ops that run otherwise.
        again: ops that one of them computes again in backward.
    """

    step: str
    ours: str
    theirs: str
    placements: tuple[str, str]
    machines: tuple[str, str]
    micro_batches: tuple[int, int]
    figures: tuple[Figure, ...]
    stored: tuple[Change, ...]
    run: tuple[Change, ...]
    again: tuple[Change, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both do the same on the same devices."""
        changed = self.stored or self.run or self.again
        pairs = self.placements, self.micro_batches
        return not changed and all(ours == theirs for ours, theirs in pairs)

    def as_data(self) -> dict[str, Any]:
        """As JSON has it: dicts, lists and numbers."""
        return {"is_equal": self.is_equal, **asdict(self)}

    def text(self) -> str:
        """The difference for people."""
        lines = [f"plans of {self.step}: {self.ours!r} (ours) and {self.theirs!r} (theirs)"]
        if self.is_equal:
            lines.append("they are equal: every tensor lies, and every op runs, the same")
        walked = (f"{num} micro-batches" for num in self.micro_batches)
        pairs = (("on", *self.placements), ("walked in", *walked), ("planned for", *self.machines))
        rows = [("", "ours", "theirs"), *(pair for pair in pairs if pair[1] != pair[2])]
        rows += [
            (one.name, _figure(one.ours, one.unit), _figure(one.theirs, one.unit)) for one in self.figures
        ]
        lines += aligned(rows) if len(rows) > 1 else []
        for title, changes in (("stored", self.stored), ("run", self.run), ("computed again", self.again)):
            if changes:
                lines += ["", f"{title} otherwise: {sum(one.count for one in changes)}"]
                shown = [
                    (
                        f"  {one.name}",
                        one.what,
                        f"x {one.count}" if one.count > 1 else "",
                        one.ours,
                        one.theirs,
                    )
                    for one in changes[:_MOST_ROWS]
                ]
                lines += aligned(shown)
                rest = changes[_MOST_ROWS:]
                lines += [f"  and {sum(one.count for one in rest)} more (as_data has all)"] if rest else []
        return "\n".join(lines)


def diff(ours: Plan, theirs: Plan) -> Difference:
    """Compares two plans of one captured step.

    Raises:
        PlanError: they are plans of different graphs.
    """
    if ours.made_for != theirs.made_for:
        raise PlanError(
            f"these plans are of different graphs, {ours.made_for} and {theirs.made_for}: "
            f"{_first_difference(ours, theirs)}. Compare plans of one model, batch shape and optimizer"
        )
    return Difference(
        ours.graph.name,
        ours.name,
        theirs.name,
        (str(ours.placement), str(theirs.placement)),
        (_machine(ours), _machine(theirs)),
        (ours.micro_batches, theirs.micro_batches),
        tuple(_figures(ours.predicted, theirs.predicted)),
        _gathered(_stored(ours, theirs)),
        _gathered(_run(ours, theirs)),
        _gathered(_again(ours, theirs)),
    )


def _first_difference(ours: Plan, theirs: Plan) -> str:
    left, right = ours.graph.input_of, theirs.graph.input_of
    for name in (*left, *right):
        metas = [str(one[name].meta) if name in one else "absent" for one in (left, right)]
        if metas[0] != metas[1]:
            return f"input {name} is {metas[0]} and {metas[1]}"
    return "they compute something else from the same inputs"


def _machine(plan: Plan) -> str:
    return plan.machine.device.name if plan.machine is not None else "no machine in particular"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ABSENT
    return {"seconds": duration, "bytes": size}.get(unit, "{:.0f}".format)(value)


def _figures(ours: Prediction | None, theirs: Prediction | None) -> Iterator[Figure]:
    rows = [dict(_of_one(one)) if one is not None else {} for one in (ours, theirs)]
    for name, unit in dict.fromkeys([*rows[0], *rows[1]]):
        yield Figure(name, unit, *(row.get((name, unit)) for row in rows))


def _of_one(predicted: Prediction) -> Iterator[tuple[tuple[str, str], float]]:
    yield ("a step", "seconds"), predicted.seconds
    yield ("memory at its peak", "bytes"), predicted.peak_bytes
    for axis, num_bytes in predicted.sent.items():
        yield (f"sent along {axis}", "bytes"), num_bytes
    for kind, count in sorted(predicted.collectives.items()):
        yield (kind, "collectives"), count


# --- what differs --------------------------------------------------------------------------------------


def _gathered(changes: Iterator[Change]) -> tuple[Change, ...]:
    """Changes that are alike as one with their number, the most of a kind first."""
    counts: dict[Change, int] = {}
    for one in changes:
        counts[one] = counts.get(one, 0) + 1
    found = [Change(one.name, one.what, count, one.ours, one.theirs) for one, count in counts.items()]
    return tuple(sorted(found, key=lambda one: -one.count))


def _stored(ours: Plan, theirs: Plan) -> Iterator[Change]:
    for one in ours.graph.inputs:
        now, then = text(ours.inputs[one.name]), text(theirs.inputs[one.name])
        if now != then:
            yield Change(pattern_of(one.name), f"{one.role} {one.meta}", 1, now, then)
    for one in ours.graph.outputs:
        now, then = text(ours.outputs[one.name]), text(theirs.outputs[one.name])
        if now != then and not one.replaces and not one.observed:  # what replaces an input is stored as that
            yield Change(pattern_of(one.name), f"returned {one.meta}", 1, now, then)


def _run(ours: Plan, theirs: Plan) -> Iterator[Change]:
    """Ops that differ, and those that only one plan has: simpler forms of what the other runs whole."""
    left, right = _ops(ours), _ops(theirs)
    for name in dict.fromkeys([*left, *right]):
        nodes = left.get(name), right.get(name)
        said = [
            ABSENT if node is None else _signature(plan, node)
            for node, plan in zip(nodes, (ours, theirs), strict=True)
        ]
        if said[0] != said[1] or None in nodes:
            yield Change(*_described(nodes[0] or nodes[1]), 1, *said)


def _again(ours: Plan, theirs: Plan) -> Iterator[Change]:
    left, right = _repeated(ours), _repeated(theirs)
    for name in dict.fromkeys([*left, *right]):
        if (name in left) != (name in right):
            said = ("again" if name in side else "kept" for side in (left, right))
            yield Change(*_described(left.get(name) or right.get(name)), 1, *said)


def _ops(plan: Plan) -> Mapping[str, fx.Node]:
    """The ops of a plan, each once, by the name that it has without recomputation."""
    calls = [node for node in plan.graph.calls() if not is_getitem(node)]
    copies = {node.meta[AGAIN]: node for node in calls if AGAIN in node.meta}
    return copies | {node.name: node for node in calls if AGAIN not in node.meta}


def _repeated(plan: Plan) -> Mapping[str, fx.Node]:
    """What is computed again, by the name of what it repeats."""
    return {
        node.meta[AGAIN]: node for node in plan.graph.calls() if AGAIN in node.meta and not is_getitem(node)
    }


def _signature(plan: Plan, node: fx.Node) -> str:
    return "; ".join(brief(str(axis)) for axis in plan.spatial.signatures[node.name])


def _described(node: fx.Node | None) -> tuple[str, str]:
    assert node is not None
    info = info_of(node)
    op = op_name(node.target).removeprefix("aten.").removesuffix(".default")
    meta = next((str(one) for one in metas_of(node) if one is not None), "")
    return pattern_of(info.module) or "(no module)", f"{info.phase} {op} {meta}"
