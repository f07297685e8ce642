"""Rules of softmax."""

import math

import pytest
import torch

from monoflow.sbp.oracle import missing_signatures
from monoflow.sbp.rules.softmax import RULES
from tests.null.rule_trial import proven, same_as_expanded, values

aten = torch.ops.aten
FORWARD = [aten._softmax.default, aten._log_softmax.default]
BACKWARD = [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default]
X = values(5, 3, 4)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("op", FORWARD, ids=str)
def test_every_other_dim_splits(op, dim):
    assert proven(RULES[op], op, X, dim, False) == {f"S({d}) -> S({d})" for d in range(3) if d != dim % 3}
    same_as_expanded(RULES[op], op, X, dim, False)
    assert missing_signatures(op, (X, dim, False), {}, RULES[op], 2) == []


@pytest.mark.parametrize("op", FORWARD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_floats(op, dtype):
    proven(RULES[op], op, X.to(dtype), 1, False)
    same_as_expanded(RULES[op], op, X.to(dtype), 1, False, tolerance=1e-2)


def test_safe_softmax_of_hidden_rows():
    x = X.clone()
    x[1, :, 2] = -math.inf
    x[2, 0, 0] = -math.inf
    op = aten._safe_softmax.default
    assert proven(RULES[op], op, x, 1) == {"S(0) -> S(0)", "S(2) -> S(2)"}
    same_as_expanded(RULES[op], op, x, 1)
    same_as_expanded(RULES[op], op, x.float(), 1, torch.float64, tolerance=1e-6)


@pytest.mark.parametrize("dim", [0, -2])
@pytest.mark.parametrize(("forward", "op"), list(zip(FORWARD, BACKWARD, strict=True)), ids=str)
def test_backward_is_linear_in_the_gradient(forward, op, dim):
    grad, output = values(5, 3, 4, seed=1), forward(X, dim, False)
    found = proven(RULES[op], op, grad, output, dim, torch.float64)
    splits = {f"S({d}), S({d}) -> S({d})" for d in range(3) if d != dim % 3}
    assert found == splits | {"P(sum), B -> P(sum)"}
    same_as_expanded(RULES[op], op, grad, output, dim, torch.float64)
