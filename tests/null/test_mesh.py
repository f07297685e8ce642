"""Placements, and the device meshes that torch can make of them."""

from __future__ import annotations

from typing import Any

import pytest

from monoflow.errors import PlacementError
from monoflow.mesh import placement
from monoflow.tensor.convert import device_mesh


@pytest.mark.parametrize("ranks", [2, "01", [], [0.5, 1], [-1, 0]])
def test_ranks_that_are_no_grid_are_refused(ranks: Any) -> None:
    with pytest.raises(PlacementError, match="grid of non-negative integers"):
        placement("cpu", ranks)


@pytest.mark.parametrize(
    ("ranks", "named"),
    [([1, 0], r"\[1, 0\]"), ([[0, 1], [3, 2]], r"\[3, 2\]"), ([[0, 3], [1, 2]], r"\[3, 2\]")],
)
def test_an_axis_whose_ranks_descend_has_no_device_mesh(ranks: list, named: str) -> None:
    """A DTensor on it would gather its parts in the order of the ranks, not of the axis."""
    with pytest.raises(PlacementError, match=f"{named} along axis .* in ascending order"):
        device_mesh(placement("cpu", ranks))
