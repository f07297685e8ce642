"""Fused updates on tensors of any strides: a rank's gradient need not lie in memory as its parameter does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from monoflow.lower.local import update_in_place
from monoflow.sbp.strides import CONTIGUOUS, on_contiguous, on_shards

aten = torch.ops.aten
SETTINGS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-6}


def strided(values: torch.Tensor) -> torch.Tensor:
    """The same values, laid out column by column."""
    return values.t().contiguous().t()


def functional(lists: list[Any]) -> list[torch.Tensor]:
    settings = {"amsgrad": False, "maximize": False, **SETTINGS}
    run, args, kwargs = on_shards(aten._fused_adamw.default, tuple(lists), settings)
    found = run(*args, **kwargs)
    return [one[0] for one in found if one]


def in_place(lists: list[Any]) -> list[torch.Tensor]:
    found = update_in_place(aten._fused_adamw_.default, *lists, amsgrad=False, maximize=False, **SETTINGS)
    assert all(one is given for one, given in zip(found, lists, strict=True))
    return [one[0] for one in found[:4]]


@pytest.mark.parametrize("run", [functional, in_place])
@pytest.mark.parametrize("which", range(4))
def test_any_strides_give_the_same_update(run: Callable[[list[Any]], list[torch.Tensor]], which: int) -> None:
    torch.manual_seed(0)
    values = [torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5), torch.rand(3, 5)]

    def lists(lay: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        held = [lay(one.clone()) if i == which else one.clone() for i, one in enumerate(values)]
        return [*([one] for one in held), [], [torch.tensor(1.0)]]

    plain, other = run(lists(lambda one: one)), run(lists(strided))
    names = (0, 2, 3)  # parameter and moments; the gradient is no result
    for index in names:
        assert not torch.equal(plain[index], values[index])
        torch.testing.assert_close(other[index], plain[index], rtol=0, atol=0)


def test_kernels_that_take_inputs_for_contiguous_get_them_so() -> None:
    """Group norm's backward reads the memory of other strides without a word."""
    op = aten.native_group_norm_backward.default
    assert op in CONTIGUOUS
    torch.manual_seed(0)
    grad, x, weight = torch.randn(2, 4, 5), torch.randn(2, 4, 5), torch.randn(4)
    _, mean, rstd = aten.native_group_norm.default(x, weight, None, 2, 4, 5, 2, 1e-5)
    rest = mean, rstd, weight, 2, 4, 5, 2, [True, True, True]
    strided_ones = grad.mT.contiguous().mT, x.mT.contiguous().mT
    for plain, other in zip(op(grad, x, *rest), on_contiguous(op, *strided_ones, *rest), strict=True):
        torch.testing.assert_close(other, plain)
