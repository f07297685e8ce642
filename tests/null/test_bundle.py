"""Moves that go together give what they give one by one, in one collective."""

from __future__ import annotations

import pytest
import torch

from monoflow.boxing.bundle import apply_bundle
from monoflow.boxing.collectives import apply_move
from monoflow.boxing.route import Move
from monoflow.mesh import placement
from monoflow.runtime.transport import SimTransport
from monoflow.sbp.layout import B, NdSbp, P, Partial, S, shard

LINE = placement("cpu", [0, 1, 2], axes=("data",))
GRID = placement("cpu", [[0, 1], [2, 3]], axes=("outer", "inner"))


def held(whole: torch.Tensor, layout: NdSbp, place) -> dict[int, torch.Tensor]:
    """What every rank holds; parts of a sum are unequal."""
    parts = {}
    for rank in place.ranks:
        part = shard(whole, layout, place.shape, place.coordinate(rank)).clone()
        sums = [i for i, one in enumerate(layout) if isinstance(one, Partial)]
        parts[rank] = part + rank if sums else part
    return parts


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((S(0),), (B,)),
        ((S(1),), (B,)),
        ((P,), (B,)),
        ((P,), (S(0),)),
        ((P,), (S(1),)),
        ((Partial("max"),), (B,)),
    ],
)
@pytest.mark.parametrize("shapes", [[(6, 3), (3, 6)], [(7, 5), (2, 1), (1, 4)], [(3, 3)]])
def test_together_is_one_by_one(before: NdSbp, after: NdSbp, shapes: list) -> None:
    check(LINE, [(before, after)] * len(shapes), shapes)


def test_along_one_axis_of_a_grid_with_other_splits() -> None:
    check(GRID, [((S(0), S(1)), (B, S(1))), ((S(1), B), (B, B))], [(4, 4), (6, 5)])


def check(place, pairs: list[tuple[NdSbp, NdSbp]], shapes: list) -> None:
    moves = [
        Move(0, before, after, shape, place.shape)
        for (before, after), shape in zip(pairs, shapes, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    given = [held(whole, before, place) for whole, (before, _) in zip(wholes, pairs, strict=True)]
    single = SimTransport(place)
    expected = [apply_move(move, one, place, single) for move, one in zip(moves, given, strict=True)]
    together = SimTransport(place)
    inputs = {rank: [one[rank] for one in given] for rank in place.ranks}
    found = apply_bundle(moves, inputs, place, together)
    for rank in place.ranks:
        for number, tensor in enumerate(found[rank]):
            assert torch.equal(tensor, expected[number][rank])
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 8  # it keeps no buffer alive
    assert together.stats(0).calls() == 1
    assert single.stats(0).calls() == len(moves)
    if all(all(extent % 12 == 0 for extent in shape) for shape in shapes):
        assert together.stats(0).num_bytes() == single.stats(0).num_bytes()
