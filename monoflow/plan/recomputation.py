"""Which activations to compute again, for layouts that are chosen: an integer program of their own.

Every forward op whose results wait for backward may be dropped, at the price of doing its work again from
what is kept, or computed again in turn within the same unit (a layer: everything under the first index of a
module path). What crosses units is kept for that, so that no layer's backward computes the layers before it
again, and what is computed again is held no longer than its unit's backward takes. So many bytes must come
free at every moment that is given. HiGHS solves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np
from torch import fx

from ..graph.step_graph import Phase, info_of
from ..sbp.layout import local_shape
from .donate import IN_PLACE
from .facts import may_share_memory
from .highs import quiet_solver
from .holding import Spans
from .labels import Value
from .problem import Choice, Problem

_GAP = 0.01  # relative; closer costs more time than it saves
_SECONDS = 20.0  # a guard, not a budget: the programs here take a second or two


@dataclass(frozen=True)
class _Activation:
    """One forward op that may be computed again.

    Attributes:
        seconds: its work.
        size: bytes of what it makes.
        unit: the layer it belongs to.
        waits: between these positions it only waits for its unit's backward; None if no backward reads it.
        stays: between these positions it would have to be kept for others that are computed again.
        sources: other forward ops whose results it needs.
    """

    node: fx.Node
    unit: tuple[str, ...]
    seconds: float
    size: float
    waits: tuple[int, int] | None
    stays: tuple[int, int]
    sources: tuple[fx.Node, ...]


class Recomputation:
    """The activations of one step under chosen layouts."""

    def __init__(self, problem: Problem, spans: Spans, choice: Choice) -> None:
        self.problem, self.spans, self.choice = problem, spans, choice
        self.found: dict[fx.Node, _Activation] = {}
        ops = [node for node in spans.position if info_of(node).phase is Phase.FORWARD]
        ops = [node for node in ops if node.target not in IN_PLACE and not may_share_memory(node.target)]
        own = set(ops)
        consumers: dict[fx.Node, list[fx.Node]] = {}
        for node in ops:
            for root in self._roots(node):
                consumers.setdefault(root[0], []).append(node)
        spans_of = {
            node: [spans.of((node, index)) for index in range(self._num_outputs(node))] for node in ops
        }
        waiting = {
            node: min(one.backward for one in held if one.backward > one.forward)
            for node, held in spans_of.items()
            if any(one.backward > one.forward for one in held)
        }
        starts: dict[tuple[str, ...], int] = {}  # when a unit's backward begins
        for node, backward in waiting.items():
            unit = unit_of(node)
            starts[unit] = min(backward, starts.get(unit, backward))
        asks: dict[fx.Node, int] = {}  # when an op would be computed again
        for node in reversed(ops):
            unit = unit_of(node)
            asked = [asks[one] for one in consumers.get(node, ()) if one in asks]
            if node not in waiting and not asked:
                continue
            asks[node] = starts.get(unit, max(asked, default=0))
            forward = max(one.forward for one in spans_of[node]) + 1
            self.found[node] = _Activation(
                node,
                unit,
                self._seconds(node),
                self._size(node),
                (forward, starts[unit] - 1) if node in waiting else None,
                (forward, max(asked, default=0)),
                tuple(dict.fromkeys(root[0] for root in self._roots(node) if root[0] in own)),
            )

    def freed(self, dropped: frozenset[str], moments: np.ndarray) -> np.ndarray:
        """Bytes that come free at some moments when some ops are computed again."""
        total = np.zeros(len(moments))
        for one in self.found.values():
            if one.node.name in dropped and one.waits:
                total += one.size * ((moments >= one.waits[0]) & (moments <= one.waits[1]))
        return total

    def cheapest(self, needed: Mapping[int, float]) -> tuple[frozenset[str], float]:
        """The ops to compute again so that so many bytes come free at every moment, and their seconds.

        Where that much cannot come free, as much as can.
        """
        ops = list(self.found.values())
        number = {one.node: i for i, one in enumerate(ops)}
        # Columns: an op is computed again; one that backward does not read is kept; a moment's missing part.
        again, kept, missing = 0, len(ops), 2 * len(ops)
        seconds = np.array([one.seconds for one in ops])
        costs = np.concatenate(
            [seconds, [one.size * 1e-18 for one in ops], np.full(len(needed), 1e3 * seconds.sum())]
        )
        upper = np.ones(len(costs))
        rows: list[tuple[float, dict[int, float]]] = []
        for i, one in enumerate(ops):
            if one.waits is not None:
                upper[kept + i] = 0.0
            for source in one.sources:
                at = number[source]
                inside = ops[at].unit == one.unit
                if ops[at].waits is None:  # available only if it is kept, or computed again in the same unit
                    rows.append((0.0, {again + at: float(inside), kept + at: 1.0, again + i: -1.0}))
                elif not inside:
                    rows.append((-1.0, {again + at: -1.0, again + i: -1.0}))
        for m, (moment, amount) in enumerate(needed.items()):
            row = {missing + m: 1.0}
            for i, one in enumerate(ops):
                if one.waits is not None and one.waits[0] <= moment <= one.waits[1]:
                    row[again + i] = one.size / max(amount, 1.0)
                if one.waits is None and one.stays[0] <= moment <= one.stays[1]:
                    row[kept + i] = -one.size / max(amount, 1.0)
            rows.append((1.0, row))
        solution = _solved(costs, upper, rows, missing)
        dropped = [one for i, one in enumerate(ops) if solution[again + i] > 0.5]
        return frozenset(one.node.name for one in dropped), sum(one.seconds for one in dropped)

    # --- one op ------------------------------------------------------------------------------------

    def _roots(self, node: fx.Node) -> list[Value]:
        """What an op reads, seen through views."""
        return [self.spans.root.get(value, value) for value in self.problem.labels.sources[node]]

    def _num_outputs(self, node: fx.Node) -> int:
        return len(self.choice.labels[self.problem.folding.first[node]][0].outputs)

    def _seconds(self, node: fx.Node) -> float:
        first = self.problem.folding.first[node]
        label = self.problem.labels.of[first].index(self.choice.labels[first])
        return float(self.problem.work[first][label]) / len(self.problem.folding.members[first])

    def _size(self, node: fx.Node) -> float:
        label, mesh = self.choice.labels[self.problem.folding.first[node]], self.problem.mesh
        total = 0.0
        for index in range(self._num_outputs(node)):
            meta = self.problem.labels.metas[node, index]
            if meta is not None:
                layout = [axis.outputs[index] for axis in label]
                shape = local_shape(meta.shape, layout, mesh, (0,) * len(mesh))
                total += float(np.prod(shape)) * meta.dtype.itemsize
        return total


def unit_of(node: fx.Node) -> tuple[str, ...]:
    """The module path up to its first index; all of it where it has none."""
    path = info_of(node).module.split(".")
    at = next((i for i, part in enumerate(path) if part.isdigit()), len(path) - 1)
    return tuple(path[: at + 1])


def _solved(
    costs: np.ndarray, upper: np.ndarray, rows: list[tuple[float, dict[int, float]]], num_integers: int
) -> np.ndarray:
    """The cheapest numbers from 0 to `upper`, some of them integers, that bring every row to its bound."""
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(costs), len(rows)
    scale = max(float(costs.max(initial=0.0)), 1e-30)
    program.col_cost_, program.col_lower_, program.col_upper_ = costs / scale, np.zeros(len(costs)), upper
    program.row_lower_ = np.array([bound for bound, _ in rows])
    program.row_upper_ = np.full(len(rows), highspy.kHighsInf)
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.cumsum([0, *(len(row) for _, row in rows)])
    matrix.index_ = np.array([column for _, row in rows for column in row], dtype=np.int32)
    matrix.value_ = np.array([value for _, row in rows for value in row.values()], dtype=float)
    program.integrality_ = [
        highspy.HighsVarType.kInteger if i < num_integers else highspy.HighsVarType.kContinuous
        for i in range(len(costs))
    ]
    solver = quiet_solver()
    solver.setOptionValue("mip_rel_gap", _GAP)
    solver.setOptionValue("time_limit", _SECONDS)
    solver.passModel(program)
    solver.run()
    return np.array(solver.getSolution().col_value)
