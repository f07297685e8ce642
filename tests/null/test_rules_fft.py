"""Rules of Fourier transforms."""

import pytest
import torch

from monoflow.sbp.oracle import missing_signatures
from monoflow.sbp.rules.fft import RULES
from tests.null.rule_trial import proven, values

aten = torch.ops.aten


def _complex(*shape):
    return torch.complex(values(*shape), values(*shape, seed=1))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten._fft_c2c.default, (_complex(5, 4, 3), [1], 0, True)),
        (aten._fft_r2c.default, (values(5, 4, 3), [1], 0, True)),
        (aten._fft_c2r.default, (_complex(5, 4, 3), [1], 0, 6)),
    ],
    ids=str,
)
def test_all_dims_but_the_transformed_split(op, args):
    assert proven(RULES[op], op, *args) == {"S(0) -> S(0)", "S(2) -> S(2)", "P(sum) -> P(sum)"}
    assert missing_signatures(op, args, {}, RULES[op], 2) == []


def test_two_transformed_dims():
    op = aten._fft_c2c.default
    assert proven(RULES[op], op, _complex(5, 4, 3), [0, 2], 1, False) == {"S(1) -> S(1)", "P(sum) -> P(sum)"}
