"""Minimizing a sum of small tables exactly, one variable after the other (bucket elimination).

The variables are choices, the tables the cost of combinations of two of them. Eliminating a variable adds up
its tables and keeps, for every combination of its neighbours, the best it can do (Dechter, "Bucket
elimination: a unifying framework for reasoning", 1999). A training step is a ladder of layers, so tables stay
small. Where one would not, its parts are minimized on their own (mini-buckets), which makes the result a good
choice, not the best; `exact` says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: A table over the choices of some variables, one array axis each.
Factor = tuple[tuple[int, ...], np.ndarray]

_LARGEST_TABLE = 1 << 20


@dataclass(frozen=True)
class Solution:
    """A choice for every variable. `bound` is a lower bound of any choice's cost, equal to it if `exact`."""

    choices: tuple[int, ...]
    bound: float
    exact: bool


def minimize(sizes: Sequence[int], factors: Sequence[Factor], largest: int = _LARGEST_TABLE) -> Solution:
    """The choice of least total cost.

    Args:
        sizes: how many choices every variable has.
        factors: cost tables; `factors[i][1].shape` are the sizes of the variables `factors[i][0]`.
        largest: the number of entries that no intermediate table may exceed.
    """
    # What has one choice decides nothing, and an array has only so many axes.
    factors = [
        (tuple(one for one in variables if sizes[one] > 1), table.reshape([n for n in table.shape if n > 1]))
        for variables, table in factors
    ]
    buckets: list[list[Factor]] = [[] for _ in sizes]
    neighbours: list[set[int]] = [set() for _ in sizes]
    constant = 0.0
    live: dict[int, Factor] = {}

    def add(factor: Factor) -> None:
        variables = factor[0]
        live[id(factor)] = factor
        for one in variables:
            buckets[one].append(factor)
            neighbours[one].update(other for other in variables if other != one)

    for factor in factors:
        if factor[0]:
            add(factor)
        else:
            constant += float(factor[1])
    weight = lambda one: float(np.prod([float(sizes[n]) for n in neighbours[one]]))  # noqa: E731
    queue = [(weight(one), one) for one in range(len(sizes))]
    heapq.heapify(queue)
    done: list[tuple[int, list[Factor]]] = []
    eliminated = [False] * len(sizes)
    exact = True
    while queue:
        known, one = heapq.heappop(queue)
        if eliminated[one]:
            continue
        now = weight(one)
        if now > known:
            heapq.heappush(queue, (now, one))
            continue
        eliminated[one] = True
        own = [factor for factor in buckets[one] if id(factor) in live]
        for factor in own:
            del live[id(factor)]
        done.append((one, own))
        groups = _groups(own, one, sizes, largest)
        exact = exact and len(groups) <= 1
        touched = {other for variables, _ in own for other in variables if other != one}
        for other in touched:
            neighbours[other].discard(one)
        for group in groups:
            variables, table = _combined(group, one)
            best = table.min(axis=-1)
            if variables:
                add((variables, best))
            else:
                constant += float(best)
        for other in touched:
            neighbours[other] = {n for v, _ in _alive(buckets[other], live) for n in v if n != other}
            heapq.heappush(queue, (weight(other), other))
    return Solution(_decode(sizes, done), constant, exact)


def largest_table(sizes: Sequence[int], factors: Sequence[Factor]) -> float:
    """The entries of the largest table that exact elimination would make, in the order of `minimize`."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    for variables, _ in factors:
        for one in variables:
            neighbours[one].update(other for other in variables if other != one)
    weight = lambda one: float(np.prod([float(sizes[n]) for n in neighbours[one]]))  # noqa: E731
    queue = [(weight(one), one) for one in range(len(sizes))]
    heapq.heapify(queue)
    left = set(range(len(sizes)))
    largest = 0.0
    while queue:
        known, one = heapq.heappop(queue)
        if one not in left:
            continue
        if weight(one) > known:
            heapq.heappush(queue, (weight(one), one))
            continue
        left.discard(one)
        largest = max(largest, weight(one) * sizes[one])
        for other in neighbours[one]:
            neighbours[other] |= neighbours[one] - {other}
            neighbours[other].discard(one)
            heapq.heappush(queue, (weight(other), other))
    return largest


def _alive(factors: list[Factor], live: dict[int, Factor]) -> list[Factor]:
    factors[:] = [factor for factor in factors if id(factor) in live]
    return factors


def _groups(own: list[Factor], one: int, sizes: Sequence[int], largest: int) -> list[list[Factor]]:
    """The tables of a variable, in as few groups as keep every combined table within `largest` entries."""
    groups: list[tuple[set[int], list[Factor]]] = []
    for factor in sorted(own, key=lambda f: -f[1].size):
        for variables, members in groups:
            joined = variables | set(factor[0])
            if np.prod([float(sizes[v]) for v in joined]) <= largest or joined == variables:
                variables |= joined
                members.append(factor)
                break
        else:
            groups.append((set(factor[0]) | {one}, [factor]))
    return [members for _, members in groups]


def _combined(group: Sequence[Factor], one: int) -> tuple[tuple[int, ...], np.ndarray]:
    """The sum of tables over the union of their variables, `one` as the last axis."""
    others = tuple(dict.fromkeys(v for variables, _ in group for v in variables if v != one))
    order = (*others, one)
    total: np.ndarray | None = None
    for variables, table in group:
        present = [v for v in order if v in variables]
        moved = table.transpose([variables.index(v) for v in present])
        shaped = moved.reshape([table.shape[variables.index(v)] if v in variables else 1 for v in order])
        total = shaped if total is None else total + shaped
    assert total is not None
    return others, total


def _decode(sizes: Sequence[int], done: Sequence[tuple[int, list[Factor]]]) -> tuple[int, ...]:
    """Choices in reverse order of elimination: what a variable's tables mention is known by then."""
    choices = [0] * len(sizes)
    for one, own in reversed(done):
        total = np.zeros(sizes[one])
        for variables, table in own:
            index = tuple(slice(None) if v == one else choices[v] for v in variables)
            total = total + table[index]
        choices[one] = int(total.argmin())
    return tuple(choices)
