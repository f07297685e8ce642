"""The search for the best plan of a step: layouts, state sharding and recomputation by one objective.

Layouts on all axes at once come from one problem (`problem.py`, `solve.py`). Under a byte limit its bytes get
prices, moment by moment: a linear program over the plans found so far (column generation; Dantzig and Wolfe,
"Decomposition principle for linear programs", 1960) says what a byte is worth where, and the problem is
solved again at these prices, until that brings nothing new. What still does not fit computes activations
again (`recomputation.py`). The prediction, which walks the very schedule that runs, judges every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import highspy
import numpy as np

from ..errors import PlanError
from ..graph.passes.recompute import AGAIN
from ..graph.step_graph import StepGraph, info_of, is_getitem, metas_of
from ..log import stage_logger
from ..mesh import Placement
from ..sbp.registry import OpRule
from .calls import bytes_around
from .cost import Machine
from .fold import fold
from .highs import quiet_solver
from .holding import Holding, Spans
from .plan import Plan, Search, fingerprint
from .predict import Prediction, Prices, predict
from .problem import Choice, Problem
from .recomputation import Recomputation
from .rewrites import LOSSES, PREPARE, Rewrite, expansion, rewritten
from .schedule import Op, schedule
from .solve import Solved, solve
from .storages import free_goal
from .template import Pins
from .verify import verify_plan

log = stage_logger("plan")

#: What the plan is called that is the fastest without a limit.
FASTEST = "fastest"
_ROUNDS = 8  # of pricing, and of fitting one plan into a limit
_MOMENTS = 12  # that a limit is held at, a round
_NEARLY = 0.02  # what one form of the graph costs more by its tables may be less by its schedule
_MOSTLY = 0.9  # of what may be hidden is: what else it takes is worth something still
_DEAR = 1e4  # steps that a rank would rather wait than hold twice the limit


@dataclass(frozen=True)
class Candidate:
    """A plan with what it is predicted to cost."""

    name: str
    plan: Plan
    predicted: Prediction


class Space:
    """All plans of one form of the graph on one placement."""

    def __init__(
        self,
        captured: StepGraph,
        rewrites: tuple[Rewrite, ...],
        placement: Placement,
        machine: Machine,
        pins: Pins,
        rules: Mapping[Callable, OpRule],
    ) -> None:
        self.captured, self.rewrites, self.placement, self.rules = captured, rewrites, placement, rules
        self.machine = machine.on(placement.num_axes)
        self.graph = rewritten(captured, rewrites, rules)
        self.goal = free_goal(self.graph, placement, pins)
        self.problem = Problem(self.graph, placement, fold(self.graph), self.goal, rules, self.machine)
        self.tables = self.problem.tables()
        self.components = self.problem.components()
        self.prices = Prices(self.machine)

    @cached_property
    def spans(self) -> Spans:
        return Spans(self.problem)

    @cached_property
    def fastest(self) -> Solved:
        """The best choices without a limit."""
        return solve(self.tables, self.components)

    @cached_property
    def fastest_beside(self) -> Solved | None:
        """The best choices without a limit if compute hides all moves that it may; None if it hides none."""
        hiding = self.machine.device.hiding
        if not hiding or not self.problem.beside:
            return None
        tables = self.problem.tables(_MOSTLY * hiding)
        return solve(tables, self.components, starts=[self.fastest.choices])

    def unlimited(self, name: str) -> Iterator[Candidate]:
        """The fastest plans without a limit: of moves that count in full, and of moves that are hidden."""
        yield self.candidate(self.problem.choice(self.fastest.choices), name)
        beside = self.fastest_beside
        if beside is not None and beside.choices != self.fastest.choices:
            yield self.candidate(self.problem.choice(beside.choices), f"{name} beside compute")

    def candidate(
        self,
        choice: Choice,
        name: str,
        dropped: frozenset[str] = frozenset(),
        is_frugal: bool = False,
    ) -> Candidate:
        """The plan that a choice means, with some ops computed again in backward."""
        again: tuple[Rewrite, ...] = (("recompute", tuple(sorted(dropped))),) if dropped else ()
        graph = rewritten(self.graph, again, self.rules)
        signatures, inputs, outputs = self.problem.spread(choice)
        for node in graph.calls():
            if AGAIN in node.meta and not is_getitem(node):
                signatures[node.name] = signatures[node.meta[AGAIN]]
        own = {node.name for node in graph.calls()}
        unruled = {
            node.name: bytes_around(node)
            for one in self.problem.labels.unruled
            for node in self.problem.folding.members[one]
        }
        plan = Plan(
            graph,
            self.placement,
            "auto",
            {key: one for key, one in signatures.items() if key in own},
            inputs,
            outputs,
            unruled,
            self.machine,
            fingerprint(self.captured),
            self.rewrites + again,
            is_frugal=is_frugal,
        )
        return Candidate(name, plan, predict(plan, self.machine, prices=None if dropped else self.prices))

    # --- under a limit -----------------------------------------------------------------------------

    def within(self, limit: int) -> Iterator[tuple[Candidate, float]]:
        """Plans under a limit of bytes (and, where none is found, the smallest), each with a lower bound."""
        solved = self.fastest
        bound = solved.bound
        fits = False
        for one in self.unlimited(FASTEST):
            yield one, bound
            fits = fits or one.predicted.peak_bytes <= limit
        if fits:
            return
        plain = self.candidate(self.problem.choice(solved.choices), f"{FASTEST}, frugal", is_frugal=True)
        yield plain, bound
        if plain.predicted.peak_bytes <= limit:
            return
        yield self.fitted(solved, limit), bound
        excess = dict(self._excess(plain, limit))
        columns: dict[tuple[int, ...], None] = {solved.choices: None}
        # What the prediction sees and the tables do not, by moment: workspace, a move's two ends.
        unseen: dict[int, float] = {}
        prices = np.zeros(0)
        for _ in range(_ROUNDS):
            moments = list(dict.fromkeys([*unseen, *excess]))
            prices = np.concatenate([prices, np.zeros(len(moments) - len(prices))])
            holding = Holding(self.problem, self.spans, moments)
            known = holding.held(solved.choices, prices)[0]
            for at, held in zip(moments, known, strict=True):
                if at not in unseen:
                    unseen[at] = max(0.0, limit + excess[at] - held)
            beside = np.array([unseen[at] for at in moments])
            model = []
            for one in columns:
                held, again = holding.held(one, prices)
                model.append((held + beside, self.tables.cost(one) + again))
            prices = _worth(model, limit)
            solved = solve(
                holding.priced(self.tables, prices), self.components, starts=list(columns), max_sweeps=60
            )
            # What the tables do not see is this plan's: another may hold nothing beside them.
            bound = max(bound, solved.bound - limit * float(prices.sum()))
            if solved.choices in columns:
                return
            columns[solved.choices] = None
            found = self.fitted(solved, limit)
            yield found, bound
            excess = {at: over for at, over in self._excess(found, limit)[:2] if at not in unseen}

    def fitted(self, solved: Solved, limit: int) -> Candidate:
        """A choice's plan with as little recomputation as fits the limit; else the one that holds least."""
        choice = self.problem.choice(solved.choices)
        found = least = self.candidate(choice, "sharded", is_frugal=True)
        if found.predicted.peak_bytes <= limit:
            return found
        recomputation = Recomputation(self.problem, self.spans, choice)
        dropped: frozenset[str] = frozenset()
        needed: dict[int, float] = {}
        for _ in range(_ROUNDS):
            excess = self._excess(found, limit)
            freed = recomputation.freed(dropped, np.array([at for at, _ in excess]))
            for (at, over), already in zip(excess, freed, strict=True):
                needed[at] = max(needed.get(at, 0.0), over + already)
            cheapest = recomputation.cheapest(needed)
            if cheapest[0] == dropped:
                break
            dropped = cheapest[0]
            found = self.candidate(choice, "recomputed", dropped, is_frugal=True)
            if found.predicted.peak_bytes < least.predicted.peak_bytes:
                least = found
            if found.predicted.peak_bytes <= limit:
                break
        return least

    def _excess(self, found: Candidate, limit: int) -> list[tuple[int, float]]:
        """Moments at which a plan holds more than the limit, the worst first, with how much more."""
        position = {node.name: at for node, at in self.spans.position.items()}
        worst: dict[int, float] = {}
        following = len(position) - 1
        rows = found.predicted.memory.held
        made = schedule(found.plan)
        for number in range(len(rows) - 1, -1, -1):
            item = made.items[number]
            if isinstance(item, Op):
                following = position.get(item.node.name, following)
            over = float(sum(rows[number]) - limit)
            if over > 0:
                worst[following] = max(worst.get(following, 0.0), over)
        ranked = sorted(worst.items(), key=lambda pair: -pair[1])
        apart: list[tuple[int, float]] = []
        distance = max(1, len(position) // (4 * _MOMENTS))
        for at, over in ranked:
            if all(abs(at - other) >= distance for other, _ in apart):
                apart.append((at, over))
            if len(apart) == _MOMENTS:
                break
        return apart


def search(
    captured: StepGraph,
    placement: Placement,
    machine: Machine,
    pins: Pins,
    rules: Mapping[Callable, OpRule],
    limit: int = 0,
    others: Sequence[Plan] = (),
) -> Plan:
    """The fastest plan that is found for a step on a placement.

    Args:
        machine: what ops and moves cost.
        pins: per pattern of input or output names, one SBP per axis.
        limit: bytes that a rank may hold at any time; 0 for no limit.
        others: plans made otherwise, with what they are predicted to cost, to choose from as well.

    Raises:
        PlanError: nothing fits the limit.
        LayoutError: a pin does not fit.
    """
    spaces = [
        Space(captured, rewrites, placement, machine, pins, rules)
        for rewrites in _forms(captured, rules, placement.size)
    ]
    best, smallest = _searched(spaces, limit, others)
    if best is not None:
        return verify_plan(best)
    works = smallest.predicted.peak_bytes
    for _ in range(_ROUNDS):  # a limit that is said to work has been tried
        found, least = _searched(spaces, works, others)
        if found is not None:
            break
        works = max(works, least.predicted.peak_bytes) + works // 100
    raise PlanError(_too_small(smallest, limit, works))


def _searched(spaces: Sequence[Space], limit: int, others: Sequence[Plan]) -> tuple[Plan | None, Candidate]:
    """The fastest plan within a limit, if one was found, and the one that holds the least."""
    best: Candidate | None = None
    smallest: Candidate | None = None
    bounds: list[float] = []
    tried: dict[str, tuple[float, int]] = {}

    def consider(one: Candidate) -> None:
        nonlocal best, smallest
        held, seconds = one.predicted.peak_bytes, one.predicted.seconds
        if one.name not in tried or seconds < tried[one.name][0]:
            tried[one.name] = seconds, held
        if smallest is None or held < smallest.predicted.peak_bytes:
            smallest = one
        if (not limit or held <= limit) and (best is None or seconds < best.predicted.seconds):
            best = one

    for plan in others:
        assert plan.predicted is not None
        consider(Candidate(plan.name, plan, plan.predicted))
        if limit and plan.predicted.peak_bytes > limit:
            consider(_at_pace(plan, f"{plan.name}, frugal", is_frugal=True))
    least = min(space.fastest.cost for space in spaces)
    for space in spaces:
        if limit:
            reached = list(space.within(limit))
            for found, _ in reached:
                consider(found)
            bounds.append(reached[-1][1])
        else:
            bounds.append(space.fastest.bound)
            if space.fastest.cost <= least * (1 + _NEARLY):
                for one in space.unlimited("auto"):
                    consider(one)
        log.info("searched %d classes of nodes: bound %.4g s", space.problem.folding.num_classes, bounds[-1])
    assert smallest is not None
    if best is None:
        return None, smallest
    if best.plan.is_frugal and not best.name.endswith(", frugal"):
        consider(_at_pace(best.plan, f"{best.name}, with room", is_frugal=False))
    bound = min(bounds)
    gap = gap_of(best.predicted, bound)
    made = replace(best.plan, search=Search(bound, gap, tried, limit), predicted=best.predicted)
    return made, smallest


def gap_of(predicted: Prediction, bound: float) -> float:
    """How far a plan may be above a bound, relative to its own seconds; what it hides counts for both."""
    seconds = predicted.seconds + predicted.hidden
    return max(0.0, 1 - bound / seconds) if seconds > 0 else 0.0


def _at_pace(plan: Plan, name: str, is_frugal: bool) -> Candidate:
    """A plan with its moves as near to what needs them as can be, or with room to hide them."""
    assert plan.machine is not None
    made = replace(plan, is_frugal=is_frugal)
    return Candidate(name, made, predict(made, plan.machine))


def _forms(
    captured: StepGraph, rules: Mapping[Callable, OpRule], num_ranks: int
) -> Iterator[tuple[Rewrite, ...]]:
    """The forms of the graph that are searched: as it is, and with the loss in simpler ops."""
    yield (PREPARE,) if num_ranks > 1 else ()
    losses = [node.name for node in captured.calls() if node.target in LOSSES and expansion(node, rules)]
    if losses and num_ranks > 1:
        yield (PREPARE, ("expand", tuple(sorted(losses))))


def _worth(columns: Sequence[tuple[np.ndarray, float]], limit: int) -> np.ndarray:
    """What a byte is worth at every moment: the duals of the best mixture of plans under the limit.

    What no mixture fits is let through at a price that no plan would pay.
    """
    num_moments = len(columns[0][0])
    dear = _DEAR * max(cost for _, cost in columns)
    held = np.stack([one for one, _ in columns]) / limit
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(columns) + 1, num_moments + 1
    program.col_cost_ = np.array([*(cost for _, cost in columns), dear])
    program.col_lower_ = np.zeros(len(columns) + 1)
    program.col_upper_ = np.full(len(columns) + 1, highspy.kHighsInf)
    program.row_lower_ = np.array([*[-highspy.kHighsInf] * num_moments, 1.0])
    program.row_upper_ = np.ones(num_moments + 1)
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    dense = np.zeros((num_moments + 1, len(columns) + 1))
    dense[:num_moments, :-1], dense[:num_moments, -1] = held.T, -1.0
    dense[-1, :-1] = 1.0
    matrix.start_ = np.arange(0, dense.size + 1, dense.shape[1])
    matrix.index_ = np.tile(np.arange(dense.shape[1], dtype=np.int32), dense.shape[0])
    matrix.value_ = dense.flatten()
    solver = quiet_solver()
    solver.passModel(program)
    solver.run()
    duals = np.array(solver.getSolution().row_dual)[:num_moments]
    return np.maximum(-duals, 0.0) / limit


def _too_small(least: Candidate, limit: int, works: int) -> str:
    """By how much nothing fits, what holds the memory, and what would do."""
    predicted, plan = least.predicted, least.plan
    over = predicted.peak_bytes - limit
    parts = ", ".join(
        f"{kind} {size:,}" for kind, size in sorted(predicted.peak_split.items(), key=lambda p: -p[1]) if size
    )
    sizes = [
        (metas_of(item.node)[0], item.node)
        for item in schedule(plan).items[max(0, predicted.peak_at - 2) : predicted.peak_at + 1]
        if isinstance(item, Op)
    ]
    where = next((f", at {info_of(node).source} {info_of(node).module}" for _, node in reversed(sizes)), "")
    largest = sorted(plan.graph.inputs, key=lambda one: -one.meta.num_bytes)[:3]
    names = ", ".join(f"{one.name} {one.meta}" for one in largest)
    return (
        f"no plan on {plan.placement} holds at most {limit:,} bytes a rank: the smallest found needs "
        f"{predicted.peak_bytes:,}, {over:,} more, at its peak {predicted.peak_item}{where} ({parts}). The "
        f"largest inputs are {names}. A limit of {works:,} works; or use more ranks, or a "
        "smaller batch"
    )
