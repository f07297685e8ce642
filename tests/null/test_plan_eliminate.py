"""Exact minimization against the brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monoflow.plan.eliminate import Factor, minimize


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Factor]]:
    """A few variables with random unary and pair costs."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    factors: list[Factor] = [((i,), rng.random(n)) for i, n in enumerate(sizes)]
    pairs = list(itertools.combinations(range(len(sizes)), 2))
    for a, b in draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []:
        order = (a, b) if rng.random() < 0.5 else (b, a)
        factors.append((order, rng.random((sizes[order[0]], sizes[order[1]]))))
    return sizes, factors


def cost_of(choices: tuple[int, ...], factors: list[Factor]) -> float:
    return sum(float(table[tuple(choices[v] for v in variables)]) for variables, table in factors)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_finds_the_best_of_all_choices(problem: tuple[list[int], list[Factor]]) -> None:
    sizes, factors = problem
    best = min(cost_of(choices, factors) for choices in itertools.product(*map(range, sizes)))
    found = minimize(sizes, factors)
    assert found.exact
    assert abs(cost_of(found.choices, factors) - best) < 1e-9
    assert abs(found.bound - best) < 1e-9


@given(problems())
@settings(max_examples=100, deadline=None)
def test_bound_holds_where_tables_are_limited(problem: tuple[list[int], list[Factor]]) -> None:
    sizes, factors = problem
    best = min(cost_of(choices, factors) for choices in itertools.product(*map(range, sizes)))
    found = minimize(sizes, factors, largest=8)
    assert found.bound <= best + 1e-9 <= cost_of(found.choices, factors) + 2e-9
    if found.exact:
        assert abs(cost_of(found.choices, factors) - best) < 1e-9


def test_a_long_ladder_stays_small() -> None:
    """Two chains tied rung by rung, as forward and backward are: 2000 variables in a moment."""
    rng = np.random.default_rng(0)
    length, size = 1000, 5
    factors: list[Factor] = []
    for i in range(length):
        factors.append(((2 * i, 2 * i + 1), rng.random((size, size))))
        if i:
            factors.append(((2 * i - 2, 2 * i), rng.random((size, size))))
            factors.append(((2 * i - 1, 2 * i + 1), rng.random((size, size))))
    found = minimize([size] * (2 * length), factors)
    assert found.exact and abs(cost_of(found.choices, factors) - found.bound) < 1e-6


def test_a_variable_without_costs_takes_its_first_choice() -> None:
    found = minimize([3, 2], [((1,), np.array([1.0, 0.5]))])
    assert found.choices == (0, 1) and found.bound == 0.5


def test_a_variable_may_have_more_neighbours_than_an_array_has_axes() -> None:
    sizes = [2, *[1] * 80]
    factors = [((0, one), np.array([[1.0], [2.0]])) for one in range(1, 81)]
    factors += [((one,), np.array([0.5])) for one in range(1, 81)]
    found = minimize(sizes, factors)
    assert found.choices == (0,) * 81 and found.bound == pytest.approx(120.0)
