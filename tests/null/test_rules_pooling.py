"""Rules of pooling, padding and resampling."""

import pytest
import torch

from monoflow.sbp.rules.pooling import RULES
from tests.null.rule_trial import holds, proven, values

aten = torch.ops.aten
SPATIAL = {1: (8,), 2: (6, 8), 3: (4, 4, 6)}


def _image(spatial, lead=(3, 5), dtype=torch.float64, seed=0):
    return values(*lead, *SPATIAL[spatial], seed=seed, dtype=dtype)


def _sames(count, outputs, lead=2):
    """The same split of everything, for each leading dim."""
    return {f"{', '.join([f'S({d})'] * count)} -> {', '.join([f'S({d})'] * outputs)}" for d in range(lead)}


def _ops(*templates):
    """(op, spatial dims) for the templates' names that this torch has."""
    found = []
    for template in templates:
        for spatial in (1, 2, 3):
            name, _, overload = template.format(spatial).partition(".")
            packet = getattr(aten, name, None)
            op = packet and getattr(packet, overload or "default", None)
            if op in RULES:
                found.append((op, spatial))
    return found


@pytest.mark.parametrize(("op", "spatial"), _ops("avg_pool{}d"), ids=str)
@pytest.mark.parametrize("lead", [(3, 5), (5,), (2, 4)])
def test_average_pooling(op, spatial, lead):
    x, kernel = _image(spatial, lead), [2] * spatial
    found = proven(RULES[op], op, x, kernel, kernel)
    assert found == _sames(1, 1, len(lead)) | {"P(sum) -> P(sum)"}
    backward = getattr(aten, f"avg_pool{spatial}d_backward", None)
    if backward is not None:
        grad = values(*op(x, kernel, kernel).shape, seed=1)
        args = (grad, x, kernel, kernel, [0] * spatial, False, True, None)
        found = proven(RULES[backward.default], backward.default, *args)
        assert found == _sames(2, 1, len(lead)) | {"P(sum), B -> P(sum)"}


@pytest.mark.parametrize(("op", "spatial"), _ops("max_pool{}d_with_indices"), ids=str)
@pytest.mark.parametrize("lead", [(3, 5), (5,)])
def test_maximum_pooling(op, spatial, lead):
    x, kernel = _image(spatial, lead), [2] * spatial
    zero, one = [0] * spatial, [1] * spatial
    assert proven(RULES[op], op, x, kernel, kernel) == _sames(1, 2, len(lead))
    out, indices = op(x, kernel, kernel)
    if spatial == 1:  # has no backward of its own
        return
    backward = getattr(aten, f"max_pool{spatial}d_with_indices_backward").default
    args = (values(*out.shape, seed=1), x, kernel, kernel, zero, one, False, indices)
    assert proven(RULES[backward], backward, *args) == _sames(3, 1, len(lead)) | {"P(sum), B, B -> P(sum)"}
    unpool = getattr(aten, f"max_unpool{spatial}d").default
    extra = () if spatial == 2 else (kernel, [0] * spatial)
    found = proven(RULES[unpool], unpool, out, indices, list(SPATIAL[spatial]), *extra)
    assert found == _sames(2, 1, len(lead)) | {"P(sum), B -> P(sum)"}


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_adaptive_pooling(spatial):
    x, size = _image(spatial), [3] * spatial
    largest = getattr(aten, f"adaptive_max_pool{spatial}d").default
    assert proven(RULES[largest], largest, x, size) == _sames(1, 2)
    if spatial == 1:  # the others are made of the two-dimensional ones
        return
    average = getattr(aten, f"_adaptive_avg_pool{spatial}d").default
    assert proven(RULES[average], average, x, size) == _sames(1, 1) | {"P(sum) -> P(sum)"}
    backward = getattr(aten, f"_adaptive_avg_pool{spatial}d_backward").default
    grad = values(3, 5, *size, seed=1)
    assert proven(RULES[backward], backward, grad, x) == _sames(2, 1) | {"P(sum), B -> P(sum)"}
    backward = getattr(aten, f"adaptive_max_pool{spatial}d_backward").default
    found = proven(RULES[backward], backward, grad, x, largest(x, size)[1])
    assert found == _sames(3, 1) | {"P(sum), B, B -> P(sum)"}


RESAMPLED = [
    *((f"upsample_nearest{n}d", n, False) for n in (1, 2, 3)),
    *((f"_upsample_nearest_exact{n}d", n, False) for n in (1, 2, 3)),
    ("upsample_linear1d", 1, True),
    ("upsample_bilinear2d", 2, True),
    ("upsample_trilinear3d", 3, True),
    ("upsample_bicubic2d", 2, True),
    ("_upsample_bilinear2d_aa", 2, True),
    ("_upsample_bicubic2d_aa", 2, True),
]


@pytest.mark.parametrize(("name", "spatial", "align"), RESAMPLED)
@pytest.mark.parametrize("lead", [(3, 5), (4, 1)])
def test_resampling(name, spatial, align, lead):
    op, vec, backward = (
        getattr(aten, name).default, getattr(aten, name).vec, getattr(aten, f"{name}_backward").default
    )  # fmt: skip
    x = _image(spatial, lead)
    size, aligned = [extent * 2 for extent in SPATIAL[spatial]], [False] if align else []
    assert proven(RULES[op], op, x, size, *aligned) == _sames(1, 1) | {"P(sum) -> P(sum)"}
    assert proven(RULES[vec], vec, x, None, *aligned, [2.0] * spatial) == _sames(1, 1) | {"P(sum) -> P(sum)"}
    args = (values(*lead, *size, seed=1), size, list(x.shape), *aligned)
    assert proven(RULES[backward], backward, *args) == _sames(1, 1) | {"P(sum) -> P(sum)"}


@pytest.mark.parametrize(("op", "spatial"), _ops("reflection_pad{}d", "replication_pad{}d"), ids=str)
def test_padding_by_copies(op, spatial):
    x, pad = _image(spatial), [1, 2] * spatial
    assert proven(RULES[op], op, x, pad) == _sames(1, 1) | {"P(sum) -> P(sum)"}
    backward = getattr(aten, op._schema.name.removeprefix("aten::") + "_backward").default
    grad = values(*op(x, pad).shape, seed=1)
    assert proven(RULES[backward], backward, grad, x, pad) == _sames(2, 1) | {"P(sum), B -> P(sum)"}


@pytest.mark.parametrize("value", [0, 1.5])
@pytest.mark.parametrize("pad", [[1, 2], [0, 0, 1, 0], [-1, 0], [0, 0, 0, 0, 2, -1]])
def test_constant_padding(pad, value):
    op = aten.constant_pad_nd.default
    found = proven(RULES[op], op, values(4, 5, 6), pad, value)
    padded = {2 - i // 2 for i, extent in enumerate(pad) if extent}
    linear = {"P(sum) -> P(sum)"} if value == 0 else set()
    assert found == {f"S({d}) -> S({d})" for d in range(3) if d not in padded} | linear


@pytest.mark.parametrize("channels", [8, 12])
def test_pixel_shuffle_moves_whole_channels_and_pixels(channels):
    op, inverse = aten.pixel_shuffle.default, aten.pixel_unshuffle.default
    x = values(3, channels, 2, 3)
    one, many = ("S(1)", "S(1)") if channels == 8 else ("S(1)", "S(1,1,4)")
    pixels = {"S(2)": "S(2)", "S(3)": "S(3,1,2)"}  # two rows split evenly, three columns do not
    found = proven(RULES[op], op, x, 2)
    spatial = {f"{here} -> {there}" for here, there in pixels.items()}
    assert found == {"S(0) -> S(0)", f"{many} -> {one}", "P(sum) -> P(sum)"} | spatial
    found = proven(RULES[inverse], inverse, op(x, 2), 2)
    spatial = {f"{there} -> {here}" for here, there in pixels.items()}
    assert found == {"S(0) -> S(0)", f"{one} -> {many}", "P(sum) -> P(sum)"} | spatial


def test_columns():
    x, ones = values(3, 4, 5, 6), [1, 1]
    op, back = aten.im2col.default, aten.col2im.default
    assert proven(RULES[op], op, x, [2, 2], ones, [0, 0], ones) == {"S(0) -> S(0)", "P(sum) -> P(sum)"}
    found = proven(RULES[back], back, op(x, [2, 2], ones, [0, 0], ones), [5, 6], [2, 2], ones, [0, 0], ones)
    assert found == {"S(0) -> S(0)", "P(sum) -> P(sum)"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_floats(dtype):
    op = aten.max_pool2d_with_indices.default
    holds(proven(RULES[op], op, _image(2, dtype=dtype), [2, 2], [2, 2]), "S(0) -> S(0), S(0)")
    op = aten.avg_pool2d.default
    holds(proven(RULES[op], op, _image(2, dtype=dtype), [2, 2], [2, 2]), "S(1) -> S(1)")


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.avg_pool2d.default, ([2, 2],)),
        (aten.reflection_pad2d.default, ([0, 2, 0, 1],)),
        (aten.replication_pad2d.default, ([0, 2, 0, 1],)),
        (aten._adaptive_avg_pool2d.default, ([2, 1],)),
    ],
    ids=str,
)
def test_a_batch_of_none_has_channels_to_split(op, arguments):
    """Kernels take an empty batch, but not a shard of it that has no channel either."""
    holds(proven(RULES[op], op, values(0, 3, 6, 8), *arguments), "S(1) -> S(1)")
