"""Searched plans against one device: the best ones, unusual ones, and ones that compute activations again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from monoflow.graph.step_graph import Phase, info_of
from monoflow.plan import planner, search
from monoflow.plan.choose import Wanted
from monoflow.plan.messages import Tables
from monoflow.plan.plan import Plan
from monoflow.plan.problem import Choice
from monoflow.plan.recomputation import Recomputation
from monoflow.plan.solve import Solved, solve

from .harness import Cases, Layout, assert_exact
from .models import KINDS, batch_of

GRIDS = {"2": (0, 1), "3": (0, 1, 2), "4": (0, 1, 2, 3), "2x2": ([0, 1], [2, 3])}


def perturbed(seed: int) -> Callable[..., Solved]:
    """A solver for other prices than the real ones: its choices are plans that nobody would make by hand."""

    def solver(tables: Tables, components: Sequence[Sequence[tuple]], **_: Any) -> Solved:
        generator = np.random.default_rng(seed)
        unary = tuple(generator.random(len(one)) for one in tables.unary)
        # Moves cost next to nothing, but what has no way to go still has none.
        pairs = tuple((a, b, np.where(table > 1.0, 1e6, table)) for a, b, table in tables.pairs)
        return solve(Tables(unary, pairs), components, max_sweeps=20)

    return solver


@pytest.fixture
def searched_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the search finds is the plan, though a template or a pipeline is faster."""

    def choose(wanted: Wanted) -> Plan:
        return search.search(wanted.graph, wanted.placement, wanted.machine, wanted.pins, wanted.rules)

    monkeypatch.setattr(planner, "choose", choose)


@pytest.mark.usefixtures("searched_only")
@pytest.mark.parametrize(
    ("name", "grid"), [(name, grid) for name, grid in itertools.product(KINDS, GRIDS) if grid != "2x2"]
)
def test_unusual_plans_equal_one_device(
    cases: Cases, monkeypatch: pytest.MonkeyPatch, name: str, grid: str
) -> None:
    monkeypatch.setattr(search, "solve", perturbed(list(GRIDS).index(grid)))
    with cases(name, "adamw").under(Layout(GRIDS[grid], "auto")) as step:
        assert_exact(step.verify(batch_of(KINDS[name]), steps=2))
        assert step.plan.predicted is not None and sum(step.plan.predicted.collectives.values()) > 3


@pytest.mark.usefixtures("searched_only")
@pytest.mark.parametrize("name", ["gpt2", "resnet", "dlrm"])
def test_unusual_plans_on_two_axes_equal_one_device(
    cases: Cases, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(search, "solve", perturbed(5))
    with cases(name, "adamw").under(Layout(GRIDS["2x2"], "auto")) as step:
        assert_exact(step.verify(batch_of(KINDS[name]), steps=2))


@pytest.mark.usefixtures("searched_only")
@pytest.mark.parametrize("name", KINDS)
def test_plans_that_compute_again_equal_one_device(
    cases: Cases, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Any half of the activations may be computed again."""
    plain = search.Space.candidate

    def again(space: search.Space, choice: Choice, label: str) -> search.Candidate:
        generator = np.random.default_rng(0)
        found = Recomputation(space.problem, space.spans, choice).found.values()
        waiting = sorted(one.node.name for one in found if one.waits)
        return plain(space, choice, label, frozenset(one for one in waiting if generator.random() < 0.5))

    monkeypatch.setattr(search.Space, "candidate", again)
    with cases(name, "adamw").under(Layout(GRIDS["2"], "auto")) as step:
        assert_exact(step.verify(batch_of(KINDS[name]), steps=2))
        copies = [node for node in step.plan.graph.calls() if info_of(node).phase is Phase.RECOMPUTE]
        assert copies and "recompute" in dict(step.plan.rewrites)


def test_a_limit_is_kept_by_computing_again(cases: Cases) -> None:
    batch = batch_of(KINDS["gpt2"])
    with cases("gpt2", "adamw").under(Layout(GRIDS["2"], "auto")) as step:
        free = step.compile(batch).predicted
        assert free is not None
    for share in (0.9, 0.85, 0.95, 0.75):
        limit = int(share * free.peak_bytes)
        with cases("gpt2", "adamw").under(Layout(GRIDS["2"], "auto", limit)) as step:
            plan = step.compile(batch)
            assert plan.predicted is not None and plan.predicted.peak_bytes <= limit
            if "recompute" in dict(plan.rewrites):
                assert_exact(step.verify(batch, steps=2))
                return
    pytest.fail("no limit made it compute anything again")
