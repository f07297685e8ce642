"""Rules of images read at given points."""

import pytest
import torch

from monoflow.sbp.rules.sampling import RULES
from tests.null.rule_trial import proven, values

aten = torch.ops.aten


def _grid(*shape, spatial):
    return torch.tanh(values(*shape, spatial, seed=3)) * 1.2


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("spatial", [2, 3])
def test_grids(spatial, mode):
    op = getattr(aten, f"grid_sampler_{spatial}d").default
    points = (3, 5, 2)[-spatial:]
    image, grid = values(3, 2, *(4,) * spatial), _grid(3, *points, spatial=spatial)
    found = proven(RULES[op], op, image, grid, mode, 0, False, axis_sizes=(2, 3))
    expected = {"S(0), S(0) -> S(0)", "S(1), B -> S(1)", "P(sum), B -> P(sum)"}
    assert found == expected | {f"B, S({1 + d}) -> S({2 + d})" for d in range(spatial)}


def test_gradients_of_the_image_add_up_over_points_and_of_the_grid_over_channels():
    op = aten.grid_sampler_2d_backward.default
    image, grid = values(3, 2, 4, 4), _grid(3, 5, 6, spatial=2)
    args = values(3, 2, 5, 6, seed=5), image, grid, 0, 0, False
    assert proven(RULES[op], op, *args, [True, True]) == {
        "S(0), S(0), S(0) -> S(0), S(0)",
        "S(1), S(1), B -> S(1), P(sum)",
        "S(2), B, S(1) -> P(sum), S(1)",
        "S(3), B, S(2) -> P(sum), S(2)",
        "P(sum), B, B -> P(sum), P(sum)",
    }
    assert "S(1), S(1), B -> B, P(sum)" in proven(RULES[op], op, *args, [False, True])


def test_affine_grids():
    op = aten.affine_grid_generator.default
    found = proven(RULES[op], op, values(5, 2, 3), [5, 1, 4, 3], False)
    assert found == {"S(0) -> S(0)", "P(sum) -> P(sum)"}


@pytest.mark.parametrize("batched", [True, False])
def test_fractional_pools(batched):
    op, back = aten.fractional_max_pool2d.default, aten.fractional_max_pool2d_backward.default
    image, numbers = values(3, 4, 7, 7), torch.sigmoid(values(3, 4, 2))
    if not batched:
        image, numbers = image[0], numbers[:1]
    args = image, [2, 2], [3, 3], numbers
    _, indices = op(*args)
    both = (
        {"S(0), S(0) -> S(0), S(0)", "S(1), S(1) -> S(1), S(1)"} if batched else {"S(0), S(1) -> S(0), S(0)"}
    )
    assert proven(RULES[op], op, *args) == both
    found = proven(
        RULES[back], back, torch.ones_like(indices, dtype=torch.float64) * 1.5, image, [2, 2], [3, 3], indices
    )
    assert {"S(0), S(0), S(0) -> S(0)", "P(sum), B, B -> P(sum)"} <= found
