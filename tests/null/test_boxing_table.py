"""The table of prices says what a search of every single route says."""

from __future__ import annotations

import itertools

import pytest
import torch

from monoflow.boxing import LinkCost, PriceTable, price, route
from monoflow.boxing.route import carriers
from monoflow.sbp.layout import B, P, Partial, S
from monoflow.sbp.signature import TensorMeta

LINKS = (LinkCost(3e-5, 2e-9, 1e-6), LinkCost(1e-6, 1e-10, 1e-6), LinkCost(1e-5, 1e-9, 1e-6))


@pytest.mark.parametrize("mesh", [(2,), (2, 4), (4, 3), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(8, 24), (5, 7), (48, 2, 3)])
def test_every_pair_costs_what_its_route_costs(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    meta = TensorMeta(shape, torch.float32)
    one_axis = [B, P, S(0), S(1), Partial("max")]
    layouts = list(itertools.product(one_axis, repeat=len(mesh)))[:: 1 if len(mesh) < 3 else 13]
    table = PriceTable(layouts, meta, mesh, LINKS[: len(mesh)])
    fitting = [one for one in layouts if one in table.position]
    prices = table.between(fitting, fitting)
    for (i, source), (j, target) in itertools.product(enumerate(fitting), repeat=2):
        if source != target and any(isinstance(one, Partial) for one in target):
            continue  # a route may pass through addends made of shards; a plan never asks for that
        expected = price(source, target, meta, mesh, LINKS[: len(mesh)])
        least = 1 - 1e-9 if carriers(meta, mesh) or len(mesh) == 1 else 0.5
        assert expected * least <= prices[i, j] <= expected * (1 + 1e-9), (source, target)


def test_the_slow_axis_carries_a_shard_of_what_two_axes_add_up() -> None:
    slow, fast = LinkCost(1e-5, 1e-8, 1e-5), LinkCost(1e-6, 1e-10, 1e-5)
    found = route((P, P), (B, B), (1024, 64), torch.float32, (2, 8), (slow, fast))
    assert [one.kind for one in found.steps] == ["reduce_scatter", "all_reduce", "all_gather"]
    full = 1024 * 64 * 4
    assert found.bytes == (full // 8, 2 * full * 7 // 8)
    small = route((P, P), (B, B), (16, 1), torch.float32, (2, 8), (slow, fast))
    assert [one.kind for one in small.steps] == ["all_reduce", "all_reduce"]


def test_a_shard_is_never_turned_into_addends() -> None:
    table = PriceTable([(S(0),), (P,)], TensorMeta((4,), torch.float32), (2,), LINKS[:1])
    gathered = table.between([(S(0),)], [(P,)])[0, 0]
    assert gathered == LINKS[0].seconds("all_gather", 8)
