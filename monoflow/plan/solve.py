"""The least cost of a problem's tables, with a bound that says how far from it the answer may be.

Where the tables allow it the answer is exact (variable elimination). Else message passing gives a bound, that
of the linear program over all pairs at best, and a first answer; then single axes are chosen anew, each
exactly, around what the others have, as long as that pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .eliminate import largest_table, minimize
from .messages import Messages, Tables

_EXACT = 1 << 21  # entries of the largest table that elimination may make
_CLOSE = 1e-3  # a relative gap that is good enough
_PATIENCE = 30  # sweeps without a better bound or answer


@dataclass(frozen=True)
class Solved:
    """A choice for every variable, its cost and a lower bound of any choice's."""

    choices: tuple[int, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the cost may be above the least, relative to it."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


def solve(
    tables: Tables,
    components: Sequence[Sequence[tuple]],
    *,
    starts: Sequence[Sequence[int]] = (),
    max_sweeps: int = 150,
) -> Solved:
    """The best choices for some tables. Counts work, not seconds, so that every rank and run finds the same.

    Args:
        components: per variable and choice, what it is along each axis.
        starts: choices that are known; the answer costs no more than the best of them.
        max_sweeps: how many times message passing goes over all variables.
    """
    sizes = [len(one) for one in tables.unary]
    factors = _factors(tables)
    if largest_table(sizes, factors) <= _EXACT:
        choices = minimize(sizes, factors, _EXACT).choices
        cost = tables.cost(choices)
        return Solved(choices, cost, cost)
    best = min((list(one) for one in starts), key=tables.cost, default=[0] * len(sizes))
    cost, bound, since = tables.cost(best), -np.inf, 0
    for number, (reached, choices) in enumerate(Messages(tables).sweep()):
        found = tables.cost(choices)
        since = (
            0 if reached > bound + _CLOSE / 10 * abs(bound) or found < cost * (1 - _CLOSE / 10) else since + 1
        )
        if found < cost:
            best, cost = choices, found
        bound = max(bound, reached)
        if cost - bound <= _CLOSE * cost or since >= _PATIENCE or number + 1 >= max_sweeps:
            break
    best = _by_axis(tables, components, best)
    return Solved(tuple(best), tables.cost(best), float(bound))


def _factors(tables: Tables) -> list[tuple[tuple[int, ...], np.ndarray]]:
    return [((one,), table) for one, table in enumerate(tables.unary)] + [
        ((a, b), table) for a, b, table in tables.pairs
    ]


def _by_axis(tables: Tables, components: Sequence[Sequence[tuple]], start: Sequence[int]) -> list[int]:
    """Choices that no change along a single axis betters, as far as elimination is exact."""
    best, cost = list(start), tables.cost(start)
    num_axes = max((len(one[0]) for one in components), default=0)
    axis = unchanged = 0
    while unchanged < num_axes:
        allowed = [_alike(own, at, axis) for own, at in zip(components, best, strict=True)]
        part = tables.restricted(allowed)
        found = minimize([len(one) for one in part.unary], _factors(part), _EXACT).choices
        choices = [int(kept[one]) for kept, one in zip(allowed, found, strict=True)]
        reached = tables.cost(choices)
        unchanged += 1
        if reached < cost * (1 - 1e-9):
            best, cost, unchanged = choices, reached, 1
        axis = (axis + 1) % num_axes
    return best


def _alike(own: Sequence[tuple], at: int, axis: int) -> np.ndarray:
    """The choices that differ from one of them along a single axis at most."""
    rest = own[at][:axis] + own[at][axis + 1 :]
    return np.array([i for i, one in enumerate(own) if one[:axis] + one[axis + 1 :] == rest])
