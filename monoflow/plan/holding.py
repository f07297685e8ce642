"""Bytes that are held at some moments of a step, as tables over the same variables as its costs.

A moment is a position in the graph's order. A tensor is held from the op that makes it to the last that
reads it or a view of it; brought elsewhere, its copy is held from the first reader on. What comes in is held
all the time, what is updated in place adds nothing. An activation that only waits for backward may be dropped
and computed again for at least the work of its op: where that costs less than holding it, it counts as
dropped. So with a price on bytes the tables bound what any plan with recomputation pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from ..graph.step_graph import Phase, info_of, is_getitem, source_of
from ..sbp.layout import NdSbp, local_shape
from ..sbp.signature import TensorMeta
from .donate import IN_PLACE
from .facts import may_share_memory
from .labels import Value
from .messages import Tables
from .problem import Edge, Hub, Problem


@dataclass(frozen=True)
class Span:
    """When one tensor, with its views, is there: positions in the graph's order.

    Attributes:
        made, first, last: where it is computed, read for the first and for the last time.
        forward, backward: the last reader of forward and the first of backward; equal where it does not wait.
    """

    made: int
    first: int
    last: int
    forward: int
    backward: int


class Spans:
    """When every tensor of a graph is there."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        ops = [node for node in graph.calls() if not is_getitem(node) and node in problem.needed]
        self.position = {node: number for number, node in enumerate(ops)}
        self.end = len(ops)
        self.root: dict[Value, Value] = {}
        self.reads: dict[Value, list[fx.Node]] = {}
        for node in ops:
            sources = problem.labels.sources[node]
            for value in dict.fromkeys(sources):
                self.reads.setdefault(self.root.get(value, value), []).append(node)
            if sources and may_share_memory(node.target):
                self.root[node, 0] = self.root.get(sources[0], sources[0])
        self.results = {
            self.root.get(value, value)
            for one, value in zip(graph.outputs, map(source_of, graph.results), strict=True)
            if not one.observed
        }

    def of(self, value: Value, phase: str = "") -> Span:
        """The span of a tensor; for the readers of one phase alone, if one is named."""
        made = self.position.get(value[0], -1)
        readers = [one for one in self.reads.get(value, ()) if phase in ("", str(info_of(one).phase))]
        positions = [self.position[one] for one in readers] or [made]
        before = [self.position[one] for one in readers if info_of(one).phase is not Phase.BACKWARD]
        after = [self.position[one] for one in readers if info_of(one).phase is Phase.BACKWARD]
        last = self.end if value in self.results and not phase else max(positions)
        waits = after and value not in self.results and info_of(value[0]).phase is Phase.FORWARD
        forward = max([made, *(one for one in before if one < min(after, default=0))]) if waits else made
        return Span(made, min(positions), last, forward, min(after) if waits else forward)


@dataclass(frozen=True)
class _Term:
    """Bytes by the choices of one or two variables, and how often they are held at every moment."""

    variables: tuple[int, ...]
    held: np.ndarray  # choices... x moments
    waiting: np.ndarray  # the part of it that only waits for backward
    work: np.ndarray  # choices...: seconds to compute it again


class Holding:
    """The bytes of a problem's choices at some moments."""

    def __init__(self, problem: Problem, spans: Spans, moments: Sequence[int]) -> None:
        self.problem, self.spans = problem, spans
        self.moments = np.array(moments)
        self.terms: list[_Term] = []
        hubs: dict[Value, list[Hub]] = {}
        for hub in problem.hubs:
            hubs.setdefault(hub.value, []).append(hub)
        for node, number in problem.variable.items():
            for index, meta in self._metas(node):
                value = node, index
                if meta is None or value in spans.root or not self._is_held(node):
                    continue
                own = hubs.get(value, [])
                if node.op == "placeholder":
                    self._always(value, number)
                elif not own:
                    self._alone(value, number)
                else:
                    self._brought(value, number, own[0])
        self._next_values()
        for edge in problem.edges:
            self._taken(edge)
        for hub in problem.hubs:
            if hub.value[0].op == "placeholder" or hub.value in spans.root:
                self._copied(hub)

    def priced(self, tables: Tables, prices: np.ndarray) -> Tables:
        """The costs, with a price in seconds for every byte that is held at each moment."""
        unary = [table.copy() for table in tables.unary]
        pairs = {(a, b): table for a, b, table in tables.pairs}
        for term in self.terms:
            extra = term.held @ prices - np.maximum(term.waiting @ prices - term.work, 0.0)
            if len(term.variables) == 1:
                unary[term.variables[0]] += extra
            else:
                a, b = term.variables
                key, table = ((a, b), extra) if a < b else ((b, a), extra.T)
                pairs[key] = pairs[key] + table if key in pairs else table
        return Tables(tuple(unary), tuple((a, b, table) for (a, b), table in pairs.items()))

    def held(self, choices: Sequence[int], prices: np.ndarray) -> tuple[np.ndarray, float]:
        """Bytes at every moment, and the seconds of what pays to be computed again at these prices."""
        total, seconds = np.zeros(len(self.moments)), 0.0
        for term in self.terms:
            at = tuple(choices[one] for one in term.variables)
            total += term.held[at]
            if term.waiting[at] @ prices > term.work[at]:
                total -= term.waiting[at]
                seconds += float(term.work[at])
        return total, seconds

    # --- terms -------------------------------------------------------------------------------------

    def _is_held(self, node: fx.Node) -> bool:
        return node.op == "placeholder" or (node in self.problem.needed and node.target not in IN_PLACE)

    def _metas(self, node: fx.Node) -> list[tuple[int, TensorMeta | None]]:
        metas = self.problem.labels.metas
        count = 1 if node.op == "placeholder" else len(self.problem.labels.of[node][0][0].outputs)
        return [(index, metas[node, index]) for index in range(count)]

    def _sizes(self, value: Value, layouts: Sequence[NdSbp]) -> np.ndarray:
        """Bytes of the largest shard under each layout."""
        meta, mesh = self.problem.labels.metas[value], self.problem.mesh
        assert meta is not None
        itemsize, origin = meta.dtype.itemsize, (0,) * len(mesh)
        return np.array(
            [float(np.prod(local_shape(meta.shape, one, mesh, origin))) * itemsize for one in layouts]
        )

    def _members(self, value: Value, phase: str = "") -> list[Span]:
        members = self.problem.folding.members[value[0]]
        return [self.spans.of((one, value[1]), phase) for one in members]

    def _count(self, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        """At every moment, how many of some ranges (both ends included) it lies in."""
        return np.array(
            [float(sum(start <= moment <= stop for start, stop in ranges)) for moment in self.moments]
        )

    def _always(self, value: Value, number: int) -> None:
        sizes = self._sizes(value, self.problem.labels.given(value))
        count = float(len(self.problem.folding.members[value[0]]))
        held = np.outer(sizes, np.full(len(self.moments), count))
        self.terms.append(_Term((number,), held, np.zeros_like(held), np.zeros(len(sizes))))

    def _alone(self, value: Value, number: int) -> None:
        sizes, spans = self._sizes(value, self.problem.labels.given(value)), self._members(value)
        held = np.outer(sizes, self._count([(one.made, one.last) for one in spans]))
        waiting = np.outer(sizes, self._waits(spans))
        self.terms.append(_Term((number,), held, waiting, self._work(value[0])))

    def _waits(self, spans: Sequence[Span]) -> np.ndarray:
        return self._count([(one.forward + 1, one.backward - 1) for one in spans])

    def _work(self, node: fx.Node) -> np.ndarray:
        return self.problem.work[node]

    def _brought(self, value: Value, number: int, hub: Hub) -> None:
        spans = self._members(value)
        given, brought = self._sizes(value, hub.given), self._sizes(value, hub.layouts)
        whole = self._count([(one.made, one.last) for one in spans])
        head = self._count([(one.made, one.first) for one in spans])
        tail = self._count([(one.first, one.last) for one in spans])
        waits = self._waits(spans)
        same = np.array([[a == b for b in hub.layouts] for a in hub.given])[:, :, None]
        stays = np.broadcast_to((given[:, None] * whole)[:, None, :], (len(given), len(brought), len(whole)))
        moves = (given[:, None] * head)[:, None, :] + (brought[:, None] * tail)[None, :, :]
        held = np.where(same, stays, moves)
        waiting = np.where(same, (given[:, None] * waits)[:, None, :], (brought[:, None] * waits)[None, :, :])
        work = np.repeat(self._work(value[0])[:, None], len(brought), 1)
        self.terms.append(_Term((number, hub.number), held, waiting, work))

    def _taken(self, edge: Edge) -> None:
        """The copy that an op takes of what comes in another layout, while it runs."""
        at = [self.spans.position.get(one, -1) for one in self.problem.folding.members[edge.node]]
        count = np.array([float(at.count(moment)) for moment in self.moments])
        number = self.problem.variable[edge.node]
        if not count.any() or number == edge.giver:
            return
        wanted = [self.problem.labels.wanted(edge.node, position) for position in edge.positions]
        sizes = {
            one: size
            for side in wanted
            for one, size in zip(side, self._sizes(edge.value, side), strict=True)
        }
        copies = np.array(
            [
                [sum(sizes[one] for one in {*row} - {given}) for row in zip(*wanted, strict=True)]
                for given in edge.given
            ]
        )
        held = copies[:, :, None] * count
        self.terms.append(_Term((edge.giver, number), held, np.zeros_like(held), np.zeros(copies.shape)))

    def _next_values(self) -> None:
        """What an update makes in another layout than it is stored in: it is not in place, and is moved."""
        graph, first = self.problem.graph, self.problem.folding.first
        made: dict[tuple[Value, fx.Node], list[int]] = {}
        for one, node in zip(graph.outputs, graph.results, strict=True):
            source, index = source_of(node)
            if one.name in self.problem.stored_as and source in self.spans.position:
                owner = first[self.problem.stored_as[one.name]]
                made.setdefault(((first[source], index), owner), []).append(self.spans.position[source])
        for (value, owner), positions in made.items():
            given, stored = self.problem.labels.given(value), self.problem.labels.given((owner, 0))
            own, kept = self._sizes(value, given), self._sizes((owner, 0), stored)
            both = own[:, None] + kept[None, :] if value[0].target in IN_PLACE else 0 * own[:, None] + kept
            moved = np.where([[a == b for b in stored] for a in given], 0.0, both)
            held = moved[:, :, None] * self._count([(at, self.spans.end) for at in positions])
            variables = self.problem.variable[value[0]], self.problem.variable[owner]
            if variables[0] != variables[1]:
                self.terms.append(_Term(variables, held, np.zeros_like(held), np.zeros(moved.shape)))

    def _copied(self, hub: Hub) -> None:
        """A copy of what is held anyway: a gathered parameter, or a view that is moved."""
        brought = self._sizes(hub.value, hub.layouts)
        tail = self._count([(one.first, one.last) for one in self._members(hub.value, hub.phase)])
        same = np.array([[a == b for b in hub.layouts] for a in hub.given])[:, :, None]
        held = np.where(same, 0.0, (brought[:, None] * tail)[None, :, :])
        nothing = np.zeros(held.shape[:2])
        self.terms.append(_Term((hub.giver, hub.number), held, np.zeros_like(held), nothing))
