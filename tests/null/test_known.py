"""Values that depend on no input may steer Python while a step is captured; others may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import monoflow as flow


def test_a_transformer_may_look_at_the_mask_it_made() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return model(source, target, tgt_mask=mask)

    source, target = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    got = flow.graph(model)(forward)(source, target)
    torch.testing.assert_close(got, forward(source, target).detach(), atol=1e-5, rtol=1e-5)


def test_a_branch_on_sizes_is_taken() -> None:
    model = nn.Linear(3, 3)

    @flow.graph(model)
    def step(x: torch.Tensor) -> torch.Tensor:
        scale = torch.arange(x.shape[0]).sum()
        return model(x) * 2 if scale > 2 else model(x)

    for rows, factor in ((2, 1), (4, 2)):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(step(x), model(x).detach() * factor)


def written_view(x: torch.Tensor) -> bool:
    mask = torch.zeros(4)
    mask[1:3] = 1
    return bool(mask.sum() == 2)


def written_from_input(x: torch.Tensor) -> bool:
    mask = torch.zeros(4)
    mask[0] = x[0, 0]
    return bool(mask.sum() == 0)


def random_value(x: torch.Tensor) -> bool:
    return bool(torch.rand(()) < 2)


def batch_value(x: torch.Tensor) -> bool:
    return bool((x * 0).sum() == 0)


def test_writes_through_views_count() -> None:
    model = nn.Linear(3, 3)
    step = flow.graph(model)(lambda x: model(x) if written_view(x) else model(x) * 100)
    x = torch.randn(2, 3)
    torch.testing.assert_close(step(x), model(x).detach())


@pytest.mark.parametrize("looks", [written_from_input, random_value, batch_value])
def test_what_depends_on_inputs_or_chance_is_refused(looks: Callable[[torch.Tensor], bool]) -> None:
    model = nn.Linear(3, 3)
    step = flow.graph(model)(lambda x: model(x) if looks(x) else x)
    with pytest.raises(flow.CaptureError, match=r"test_known\.py:\d+"):
        step(torch.randn(2, 3))
