"""Message passing: bounds that hold, and are tight where the tables form a tree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from monoflow.plan.messages import Messages, Tables


def random_tables(seed: int, num: int, tree: bool) -> Tables:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, num)
    edges = [(int(rng.integers(0, b)), b) for b in range(1, num)]
    if not tree:
        edges += [(a, b) for a, b in itertools.combinations(range(num), 2) if rng.random() < 0.5]
    pairs = tuple((a, b, rng.random((sizes[a], sizes[b]))) for a, b in dict.fromkeys(edges))
    return Tables(tuple(rng.random(size) for size in sizes), pairs)


def best(tables: Tables) -> float:
    ranges = [range(len(one)) for one in tables.unary]
    return min(tables.cost(choices) for choices in itertools.product(*ranges))


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_never_passes_the_optimum_and_never_falls(seed: int) -> None:
    tables = random_tables(seed, 6, tree=False)
    optimum, before = best(tables), -np.inf
    for bound, choices in itertools.islice(Messages(tables).sweep(), 30):
        assert before - 1e-9 <= bound <= optimum + 1e-9
        assert tables.cost(choices) >= optimum - 1e-9
        before = bound


@pytest.mark.parametrize("seed", range(10))
def test_on_a_tree_bound_and_choices_are_the_optimum(seed: int) -> None:
    tables = random_tables(seed, 7, tree=True)
    *_, (bound, choices) = itertools.islice(Messages(tables).sweep(), 20)
    assert bound == pytest.approx(best(tables)) == pytest.approx(tables.cost(choices))


def test_a_restriction_keeps_the_costs_of_what_it_allows() -> None:
    tables = random_tables(3, 5, tree=False)
    allowed = [np.array([len(one) - 1]) for one in tables.unary]
    assert best(tables.restricted(allowed)) == pytest.approx(
        tables.cost([len(one) - 1 for one in tables.unary])
    )
