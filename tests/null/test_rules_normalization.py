"""Rules of normalization."""

import itertools

import pytest
import torch

from monoflow.sbp.rules.normalization import RULES, rms_norm_backward_expand
from tests.null.rule_trial import holds, proven, same_as_expanded, values

aten = torch.ops.aten
LAYER, LAYER_BACKWARD = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
RMS, RMS_BACKWARD = aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default
GROUP, GROUP_BACKWARD = aten.native_group_norm.default, aten.native_group_norm_backward.default
MASKS = list(itertools.product([True, False], repeat=3))


def _layer(shape, normalized, dtype=torch.float64, parameter_dtype=None, affine=True):
    x = values(*shape, dtype=dtype)
    parameters = [values(*normalized, seed=i, dtype=parameter_dtype or dtype) for i in (1, 2)]
    return x, list(normalized), *(parameters if affine else (None, None))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("shape", "normalized"), [((5, 3, 4), (4,)), ((5, 3, 4), (3, 4)), ((3, 4), (3, 4))])
def test_layer_norm(shape, normalized, affine):
    x, sizes, weight, bias = _layer(shape, normalized, affine=affine)
    args = (x, sizes, weight, bias, 1e-5)
    whole = ", B, B" if affine else ""
    free = len(shape) - len(normalized)
    assert proven(RULES[LAYER], LAYER, *args) == {
        f"S({d}){whole} -> S({d}), S({d}), S({d})" for d in range(free)
    }
    same_as_expanded(RULES[LAYER], LAYER, *args)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_backward(mask, affine):
    mask = mask if affine else (mask[0], False, False)
    x, sizes, weight, bias = _layer((5, 3, 4), (4,), affine=affine)
    _, mean, rstd = LAYER(x, sizes, weight, bias, 1e-5)
    args = (values(5, 3, 4, seed=3), x, sizes, mean, rstd, weight, bias, list(mask))
    found = proven(RULES[LAYER_BACKWARD], LAYER_BACKWARD, *args)
    if not any(mask):
        return
    whole = ", B, B" if affine else ""
    for grad, others in (("S(0)", "S(0)"), ("S(1)", "S(1)"), ("P(sum)", "B")):
        outputs = [one if there else "B" for one, there in zip((grad, "P(sum)", "P(sum)"), mask, strict=True)]
        holds(found, f"{grad}, {others}, {others}, {others}{whole} -> {', '.join(outputs)}")
    assert len(found) == 3
    same_as_expanded(RULES[LAYER_BACKWARD], LAYER_BACKWARD, *args)


def test_layer_norm_backward_without_a_batch():
    x, sizes, weight, bias = _layer((3, 4), (3, 4))
    _, mean, rstd = LAYER(x, sizes, weight, bias, 1e-5)
    args = (values(3, 4, seed=3), x, sizes, mean, rstd, weight, bias, [True] * 3)
    same_as_expanded(RULES[LAYER_BACKWARD], LAYER_BACKWARD, *args)
    assert len(proven(RULES[LAYER_BACKWARD], LAYER_BACKWARD, *args)) == 1


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_layer_norm_in_bfloat16(parameters):
    x, sizes, weight, bias = _layer((5, 4), (4,), torch.bfloat16, parameters)
    args = (x, sizes, weight, bias, 1e-5)
    proven(RULES[LAYER], LAYER, *args)
    same_as_expanded(RULES[LAYER], LAYER, *args, tolerance=2e-2)
    _, mean, rstd = LAYER(*args)
    args = (values(5, 4, seed=3, dtype=torch.bfloat16), x, sizes, mean, rstd, weight, bias, [True] * 3)
    same_as_expanded(RULES[LAYER_BACKWARD], LAYER_BACKWARD, *args, tolerance=3e-2)


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("normalized", [(4,), (3, 4)])
def test_rms_norm(normalized, affine, eps):
    x, sizes, weight, _ = _layer((5, 3, 4), normalized, affine=affine)
    whole = ", B" if affine else ""
    found = proven(RULES[RMS], RMS, x, sizes, weight, eps)
    assert found == {f"S({d}){whole} -> S({d}), S({d})" for d in range(3 - len(normalized))}
    same_as_expanded(RULES[RMS], RMS, x, sizes, weight, eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_small_values_uses_the_same_eps(dtype):
    x, sizes, weight, _ = _layer((5, 4), (4,), dtype)
    same_as_expanded(RULES[RMS], RMS, x * 1e-3, sizes, weight, None, tolerance=1e-2)


@pytest.fixture
def rms_backward_on_cpu():
    """torch has no CPU kernel of the backward op: the alternative form stands in, and is proven below."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm_backward", rms_norm_backward_expand, "CPU")
        yield


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("normalized", [(4,), (3, 4)])
def test_expanded_rms_norm_backward_is_the_gradient(normalized, affine):
    x, sizes, weight, _ = _layer((5, 3, 4), normalized, affine=affine)
    leaves = [one.requires_grad_() for one in (x, weight) if one is not None]
    out = torch.nn.functional.rms_norm(x, sizes, weight, 1e-6)
    grad = values(5, 3, 4, seed=3)
    wanted = torch.autograd.grad(out, leaves, grad)
    x, weight = x.detach(), None if weight is None else weight.detach()
    _, rstd = RMS(x, sizes, weight, 1e-6)
    found = rms_norm_backward_expand(grad, x, sizes, rstd, weight, [True, affine])
    for have, want in zip(found, wanted, strict=False):
        torch.testing.assert_close(have, want)


@pytest.mark.usefixtures("rms_backward_on_cpu")
@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_backward(mask, affine):
    mask = mask if affine else (mask[0], False)
    x, sizes, weight, _ = _layer((5, 3, 4), (4,), affine=affine)
    _, rstd = RMS(x, sizes, weight, 1e-6)
    args = (values(5, 3, 4, seed=3), x, sizes, rstd, weight, list(mask))
    found = proven(RULES[RMS_BACKWARD], RMS_BACKWARD, *args)
    if all(mask) and affine:
        holds(found, "S(1), S(1), S(1), B -> S(1), P(sum)", "P(sum), B, B, B -> P(sum), P(sum)")


def _group(samples, channels, groups, affine=True, dtype=torch.float64, spatial=(2, 3)):
    x = values(samples, channels, *spatial, dtype=dtype)
    weight, bias = (values(channels, seed=i, dtype=dtype) if affine else None for i in (1, 2))
    positions = 1
    for extent in spatial:
        positions *= extent
    return x, weight, bias, samples, channels, positions, groups


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("spatial", [(2, 3), (5,), ()])
@pytest.mark.parametrize(("channels", "groups"), [(6, 3), (4, 4), (8, 1), (8, 4)])
def test_group_norm(channels, groups, spatial, affine):
    args = (*_group(3, channels, groups, affine, spatial=spatial), 1e-5)
    found = proven(RULES[GROUP], GROUP, *args)
    whole = ", B, B" if affine else ""
    holds(found, f"S(0){whole} -> S(0), S(0), S(0)")
    if groups == 4 and affine:
        holds(found, "S(1), S(0), S(0) -> S(1), S(1), S(1)")
    if groups == 3 and affine:
        holds(found, "S(1,1,2), S(0,1,2), S(0,1,2) -> S(1,1,2), S(1), S(1)")
    same_as_expanded(RULES[GROUP], GROUP, *args)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_backward(mask, affine):
    if not affine and (mask[1] or mask[2]):
        mask = (mask[0], False, False)
    x, weight, bias, *sizes = _group(3, 6, 3, affine)
    _, mean, rstd = GROUP(x, weight, bias, *sizes, 1e-5)
    args = (values(3, 6, 2, 3, seed=4), x, mean, rstd, weight, *sizes, list(mask))
    found = proven(RULES[GROUP_BACKWARD], GROUP_BACKWARD, *args)
    if all(mask):
        holds(
            found,
            "S(0), S(0), S(0), S(0), B -> S(0), P(sum), P(sum)",
            "S(1,1,2), S(1,1,2), S(1), S(1), S(0,1,2) -> S(1,1,2), S(0,1,2), S(0,1,2)",
            "P(sum), B, B, B, B -> P(sum), P(sum), P(sum)",
        )
    same_as_expanded(RULES[GROUP_BACKWARD], GROUP_BACKWARD, *args)


def test_group_norm_in_bfloat16():
    args = (*_group(3, 4, 2, dtype=torch.bfloat16), 1e-5)
    proven(RULES[GROUP], GROUP, *args)
    same_as_expanded(RULES[GROUP], GROUP, *args, tolerance=2e-2)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("spatial", [(2, 3), ()])
def test_batch_norm_with_running_statistics(spatial, affine):
    x = values(5, 6, *spatial)
    weight, bias = (values(6, seed=i) if affine else None for i in (1, 2))
    mean, var = values(6, seed=3), values(6, seed=4).abs() + 0.1
    legit, native = aten._native_batch_norm_legit_no_training.default, aten.native_batch_norm.default
    found = proven(RULES[legit], legit, x, weight, bias, mean, var, 0.1, 1e-5)
    assert found == proven(RULES[native], native, x, weight, bias, mean, var, False, 0.1, 1e-5)
    if affine:
        holds(found, "S(0), B, B, B, B -> S(0), B, B", "S(1), S(0), S(0), S(0), S(0) -> S(1), B, B")
    assert len(found) == 2 + len(spatial)


def test_batch_norm_in_training_splits_channels_only():
    op = aten.native_batch_norm.default
    found = proven(RULES[op], op, values(5, 6, 3), values(6), values(6, seed=1), None, None, True, 0.1, 1e-5)
    assert found == {"S(1), S(0), S(0) -> S(1), S(0), S(0)"}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_batch_norm_backward(mask, train):
    x, grad, weight = values(5, 6, 3), values(5, 6, 3, seed=1), values(6)
    mean, var = values(6, seed=3), values(6, seed=4).abs() + 0.1
    _, saved_mean, saved_rstd = aten.native_batch_norm.default(
        x, weight, weight, mean.clone(), var.clone(), train, 0.1, 1e-5
    )
    op = aten.native_batch_norm_backward.default
    args = (grad, x, weight, mean, var, saved_mean, saved_rstd, train, 1e-5, list(mask))
    found = proven(RULES[op], op, *args)
    saved = "S(0), S(0)" if train else "B, B"
    if all(mask):
        holds(found, f"S(1), S(1), S(0), S(0), S(0), {saved} -> S(1), S(0), S(0)")
        holds(found, "P(sum), B, B, B, B, B, B -> P(sum), P(sum), P(sum)")
    assert ("S(0), S(0), B, B, B, B, B -> S(0), P(sum), P(sum)" in found) == (all(mask) and not train)


@pytest.mark.parametrize(("shape", "dim"), [((5, 3, 4), 0), ((4, 3), 0), ((4, 3, 5), 2)])
def test_weight_norm(shape, dim):
    op, backward = aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default
    v = values(*shape)
    g = values(*(extent if d == dim else 1 for d, extent in enumerate(shape)), seed=1)
    assert proven(RULES[op], op, v, g, dim) == {f"S({dim}), S({dim}) -> S({dim}), S({dim})"}
    same_as_expanded(RULES[op], op, v, g, dim)
    args = (values(*shape, seed=2), v, g, op(v, g, dim)[1], dim)
    found = proven(RULES[backward], backward, *args)
    split = ", ".join([f"S({dim})"] * 4)
    assert found == {f"{split} -> S({dim}), S({dim})", "P(sum), B, B, B -> P(sum), P(sum)"}
    same_as_expanded(RULES[backward], backward, *args)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_of_a_functional_batch_norm(training):
    """In eval they come out as they went in, on ranks without a sample too."""
    op = aten._native_batch_norm_legit_functional.default
    one, two, mean, var = (values(3, seed=i).abs() for i in range(4))
    found = proven(RULES[op], op, values(5, 3, 4), one, two, mean, var, training, 0.1, 1e-5)
    saved = "S(0), S(0)" if training else "B, B"  # eval saves none
    channels = f"S(1), S(0), S(0), S(0), S(0) -> S(1), {saved}, S(0), S(0)"
    rows = {f"S({d}), B, B, B, B -> S({d}), B, B, B, B" for d in (0, 2)}
    assert found == {channels} | (set() if training else rows)
