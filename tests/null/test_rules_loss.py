"""Rules of losses."""

import pytest
import torch

from monoflow.sbp.rules.loss import RULES
from tests.null.rule_trial import holds, integers, proven, values

aten = torch.ops.aten
NONE, MEAN, SUM = range(3)
LOSSES = ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]


def _op(name):
    return getattr(aten, name).default


def _pair(*shape):
    return torch.sigmoid(values(*shape)), torch.sigmoid(values(*shape, seed=1))


@pytest.mark.parametrize("name", LOSSES)
def test_elementwise_losses(name):
    op = _op(name)
    assert proven(RULES[op], op, *_pair(5, 3), reduction=NONE) == {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"}
    summed = proven(RULES[op], op, *_pair(5, 3), reduction=SUM)
    assert summed == {"S(0), S(0) -> P(sum)", "S(1), S(1) -> P(sum)"}
    assert proven(RULES[op], op, *_pair(5, 3), reduction=MEAN) == set()


@pytest.mark.parametrize("name", LOSSES)
def test_elementwise_backward(name):
    op = _op(f"{name}_backward")
    extra = (1.0,) if name in ("smooth_l1_loss", "huber_loss") else ()

    def found(grad, reduction):
        options = (None, reduction) if name == "binary_cross_entropy" else (reduction, *extra)
        return proven(RULES[op], op, grad, *_pair(5, 3), *options)

    assert found(values(5, 3), NONE) == {
        "S(0), S(0), S(0) -> S(0)", "S(1), S(1), S(1) -> S(1)", "P(sum), B, B -> P(sum)",
    }  # fmt: skip
    assert found(values(), SUM) == {
        "B, S(0), S(0) -> S(0)", "B, S(1), S(1) -> S(1)", "P(sum), B, B -> P(sum)",
    }  # fmt: skip
    assert found(values(), MEAN) == {"P(sum), B, B -> P(sum)"}


@pytest.mark.parametrize("weight", [(5, 3), (3,), (5, 1)])
def test_weights_broadcast(weight):
    x, y = _pair(5, 3)
    w = torch.sigmoid(values(*weight, seed=2))
    op = aten.binary_cross_entropy.default
    found = proven(RULES[op], op, x, y, w, SUM)
    holds(found, f"S(0), S(0), {'S(0)' if weight[0] == 5 else 'B'} -> P(sum)")
    op = aten.binary_cross_entropy_with_logits.default
    assert len(proven(RULES[op], op, x, y, w, values(3, seed=3), NONE)) == 2
    op = aten.binary_cross_entropy_backward.default
    assert len(proven(RULES[op], op, values(5, 3, seed=4), x, y, w, NONE)) == 3


@pytest.mark.parametrize("spatial", [(), (2, 3)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduction", [NONE, SUM])
def test_negative_log_likelihood(spatial, weighted, reduction):
    name = "nll_loss2d" if spatial else "nll_loss"
    scores, target = values(5, 4, *spatial), integers(4, 5, *spatial)
    target.view(-1)[1] = -100
    weight = values(4, seed=1).abs() if weighted else None
    forward, backward = _op(f"{name}_forward"), _op(f"{name}_backward")
    args = (scores, target, weight, reduction, -100)
    tail = ", B" if weighted else ""
    found = proven(RULES[forward], forward, *args)
    holds(found, f"S(0), S(0){tail} -> " + ("S(0), B" if reduction == NONE else "P(sum), P(sum)"))
    holds(found, f"P(sum), B{tail} -> P(sum), B")
    assert len(found) == 2 + len(spatial)
    out, total = forward(*args)
    found = proven(RULES[backward], backward, values(*out.shape, seed=2), *args, total)
    grad = "S(0)" if reduction == NONE else "B"
    holds(found, f"{grad}, S(0), S(0){tail}, B -> S(0)", f"P(sum), B, B{tail}, B -> P(sum)")
    assert len(found) == 2 + len(spatial)


def test_negative_log_likelihood_of_one_sample():
    op = aten.nll_loss_forward.default
    found = proven(RULES[op], op, values(4), torch.tensor(2), None, SUM, -100)
    assert found == {"P(sum), B -> P(sum), B"}


def test_splits_of_a_mean_are_left_to_capture():
    op = aten.nll_loss_forward.default
    found = proven(RULES[op], op, values(5, 4), integers(4, 5), None, MEAN, -100)
    assert found == {"P(sum), B -> P(sum), B"}


@pytest.mark.parametrize("reduction", [NONE, SUM, MEAN])
@pytest.mark.parametrize("name", ["multi_margin_loss", "multilabel_margin_loss_forward"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_margin_losses(name, reduction, dtype):
    """Some kernels leave the sum over an empty shard uninitialized."""
    op = _op(name)
    x = values(3, 5, dtype=dtype)
    multi = name == "multi_margin_loss"
    target = integers(5, 3) if multi else torch.tensor([[1, 0, -1, 2, 2], [3, -1, 0, 0, 0], [0, 1, 2, 3, -1]])
    args = (x, target, 1, 1.5, values(5, seed=2, dtype=dtype)) if multi else (x, target)
    found = proven(RULES[op], op, *args, reduction=reduction)
    given = "S(0), S(0)" + (", B" if multi else "")
    loss = {NONE: "S(0)", SUM: "P(sum)"}.get(reduction)
    assert found == (set() if loss is None else {f"{given} -> {loss}" + ("" if multi else ", S(0)")})
