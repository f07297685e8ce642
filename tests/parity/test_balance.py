"""Micro-batches that ranks pull, in any order and whichever rank, against one device with the whole batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import monoflow as flow
from monoflow.errors import PlanError
from monoflow.graph.step_graph import Role
from monoflow.plan.plan import Plan
from monoflow.plan.schedule import Box, schedule
from monoflow.runtime import actors
from monoflow.sbp.layout import B

from .harness import ALL_LAYOUTS, LAYOUTS, Case, Cases, assert_exact
from .models import KINDS, batch_of, image_loss, training


class Dealt:
    """Gives every rank the units of its own pile, other ones in every walk.

    Args:
        seed: of the piles; None to give all of them to the last rank.
    """

    def __init__(self, num_ranks: int, seed: int | None) -> None:
        self.num_ranks, self.random = num_ranks, None if seed is None else random.Random(seed)
        self.piles: list[list[int]] | None = None
        self.walks: list[list[list[int]]] = []

    def start(self) -> None:
        assert self.piles is None or not any(self.piles), f"units {self.piles} were not done"
        self.piles = None

    def pull(self, rank: int, total: int) -> int | None:
        if self.piles is None:
            self.piles = [[] for _ in range(self.num_ranks)]
            units = list(range(total))
            if self.random is not None:
                self.random.shuffle(units)
            for unit in units:
                self.piles[self.random.randrange(self.num_ranks) if self.random else -1].append(unit)
            self.walks.append([list(pile) for pile in self.piles])
        return self.piles[rank].pop() if self.piles[rank] else None


@contextmanager
def dealt(num_ranks: int, seed: int | None) -> Iterator[Dealt]:
    """Within: units are dealt so by engines that are made."""
    made = Dealt(num_ranks, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actors, "Counter", lambda: made)
        yield made


#: Dropout is on, gradients are clipped, and bert's ignored labels differ by sample. Three micro-batches of
#: seven rows are three, three and one, of four two, two and none.
PULLED = [
    ("gpt2", "data-2", 8, 2, 1),
    ("bert", "data-2", 8, 3, 2),
    ("dlrm", "data-2", 14, 3, 4),
    ("dlrm", "data-4", 16, 2, 5),
    ("dlrm", "data-x-data", 16, 2, 6),
    ("dlrm", "data-4", 16, 4, None),
]


@pytest.mark.parametrize(("name", "layout", "rows", "num", "seed"), PULLED)
def test_pulled_micro_batches_equal_one_device(
    name: str, layout: str, rows: int, num: int, seed: int | None
) -> None:
    case, ranks = Case(*training(name, "adamw")), ALL_LAYOUTS[layout].num_ranks
    with (
        dealt(ranks, seed) as units,
        case.under(ALL_LAYOUTS[layout], micro_batches=num, balance="dynamic") as step,
    ):
        assert_exact(step.verify(batch_of(KINDS[name], rows), steps=2))
        assert step.plan.is_pulled and step.plan.micro_batches == num
    assert len(units.walks) == 2
    for piles in units.walks:
        assert sorted(unit for pile in piles for unit in pile) == list(range(ranks * num))
        # A rank that walks its own, as without balance, would prove nothing.
        assert any(unit % ranks != rank for rank, pile in enumerate(piles) for unit in pile)


def scored(**options: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
    """A step that gives more than sums: rows of floats, truths and numbers, a maximum and a count."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @flow.graph(model, optimizer, placement=LAYOUTS["data-2"].placement, **options)
    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = model(x)
        loss = F.cross_entropy(scores, y, ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        best = scores.argmax(-1)
        return {
            "loss": loss, "scores": scores, "best": best, "right": best == y, "largest": scores.max(),
            "turned": scores.t(), "count": (y != -100).sum(),
        }  # fmt: skip

    x, y = torch.randn(12, 5), torch.randint(0, 4, (12,))
    y[[0, 1, 2, 7]] = -100
    return step, (x, y)


@pytest.mark.parametrize("seed", [0, None])
def test_results_with_rows_are_put_where_they_belong(seed: int | None) -> None:
    with LAYOUTS["data-2"].ranks(), dealt(2, seed):
        still, args = scored(plan="data", micro_batches=3)
        pulled, _ = scored(micro_batches=3, balance="dynamic")
        for _ in range(2):
            torch.manual_seed(11)
            expected = still(*args)
            torch.manual_seed(11)
            found = pulled(*args)
            for name, one in expected.items():
                assert found[name].dtype == one.dtype, name
                torch.testing.assert_close(found[name], one, rtol=1e-6, atol=1e-6, msg=name)
        assert_exact(pulled.verify(*args, steps=2))
        _check_schedule(Plan.parse(pulled.plan.dumps(), pulled.capture(*args), "here"))


def _check_schedule(plan: Plan) -> None:
    """Ranks do not meet in the walk, and rows are reduced to their ranks after it."""
    assert plan.is_pulled and plan.micro_batches == 3
    batch = [one.name for one in plan.graph.inputs if one.role is Role.BATCH]
    assert len(batch) == 2 and all(plan.inputs[name] == (B,) for name in batch)
    moves = [item for item in schedule(plan).items if isinstance(item, Box) and not item.is_local]
    assert all(move.folds for move in moves if move.walked)
    once = [move.move.kind for move in moves if not move.walked]
    assert once.count("reduce_scatter") == 4 and "all_gather" not in once


def test_local_batch_statistics_are_those_of_a_micro_batch_whoever_did_it() -> None:
    found = []
    ways: tuple[tuple[Any, int], ...] = ("static", 0), ("dynamic", 1)
    for balance, seed in ways:
        model, optimizer, _ = training("resnet", "sgd", dropout=0.0)

        with LAYOUTS["data-2"].ranks(), dealt(2, seed):

            @flow.graph(
                model, optimizer, placement=LAYOUTS["data-2"].placement, batch_stats="local",
                micro_batches=2, balance=balance,
            )  # fmt: skip
            def step(batch: dict[str, Tensor]) -> Tensor:
                loss = image_loss(model, batch)  # noqa: B023
                loss.backward()
                optimizer.step()  # noqa: B023
                return loss

            loss = step(batch_of(KINDS["resnet"], 8))
            found.append({"loss": loss, **model.state_dict()})
    for name, one in found[0].items():
        torch.testing.assert_close(found[1][name], one, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("zero-2", r"under plan 'zero', .* is moved by all_gather, in every micro-batch, along axis"),
        ("tensor-2", r"under plan 'tensor', %.* at .*\.py:\d+ in .* is moved by \w+, in every micro-batch"),
        ("data-x-tensor", r"is moved by \w+, in every micro-batch, along axis 'axis1'"),
    ],
)
def test_ranks_that_meet_in_a_micro_batch_are_refused(cases: Cases, layout: str, message: str) -> None:
    with (
        cases("tied", "sgd").under(LAYOUTS[layout], micro_batches=2, balance="dynamic") as step,
        pytest.raises(PlanError, match=message + r'.*Use plan="data", or balance="static"'),
    ):
        step.compile(batch_of(KINDS["tied"], 8))


def test_one_micro_batch_a_pipeline_and_uneven_rows_are_refused(cases: Cases) -> None:
    case, batch = cases("tied", "sgd"), batch_of(KINDS["tied"], 8)
    stages = LAYOUTS["data-2"]._replace(plan="pipeline")
    with (
        case.under(LAYOUTS["data-2"], balance="dynamic") as step,
        pytest.raises(PlanError, match=r"with one micro-batch each of 2 ranks .* micro_batches=4"),
    ):
        step.compile(batch)
    with (
        case.under(stages, micro_batches=2, balance="dynamic") as step,
        pytest.raises(PlanError, match=r"plan 'pipeline' on .* is a pipeline, whose ranks do different"),
    ):
        step.compile(batch)
    other = Case(*training("tied", "sgd"))
    with (
        other.under(LAYOUTS["data-2"], micro_batches=2, balance="dynamic") as step,
        pytest.raises(PlanError, match=r"the batch's 7 rows lie unevenly on 2 parts"),
    ):
        step.compile(batch_of(KINDS["tied"], 7))


def test_one_device_has_nobody_to_share_with(cases: Cases) -> None:
    with cases("tied", "sgd").under(LAYOUTS["one"], micro_batches=2, balance="dynamic") as step:
        assert_exact(step.verify(batch_of(KINDS["tied"], 8), steps=2))
        assert not step.plan.is_pulled


def test_what_is_no_balance_is_refused() -> None:
    with pytest.raises(PlanError, match='balance=\'fair\' is neither "static" nor "dynamic"'):
        scored(balance="fair")
