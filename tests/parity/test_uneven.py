"""Sizes that do not divide: exact all the same, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .harness import ALL_LAYOUTS, Case, assert_exact
from .models import (
    Batch,
    Frozen,
    Recommender,
    Tied,
    causal,
    click_loss,
    clicks,
    gpt2,
    masked,
    own_loss,
    token_loss,
)


class Odd(nn.Module):
    """Widths of 13 and 7, three heads, a vocabulary of 101."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 13)
        self.up, self.down = nn.Linear(13, 7), nn.Linear(7, 13)
        self.qkv, self.out = nn.Linear(13, 45), nn.Linear(15, 13)
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 101)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(F.relu(self.up(x)))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 3, 5)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def odd_gpt2(vocabulary: int, heads: int, width: int) -> Callable[[], nn.Module]:
    return lambda: gpt2(0.1, vocabulary, heads, width)


Made = tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], Batch], Callable]
MADE: Mapping[str, Made] = {
    "odd": (Odd, lambda generator, size: _short(masked(generator, size)), token_loss),
    "gpt2 of 3 heads": (odd_gpt2(101, 3, 24), causal, own_loss),
    "gpt2 of a prime vocabulary": (odd_gpt2(199, 4, 32), causal, own_loss),
    "tied": (lambda: Tied(0.1), lambda generator, size: _short(masked(generator, size)), token_loss),
    "frozen": (lambda: Frozen(0.1), lambda generator, size: _short(masked(generator, size)), token_loss),
    "dlrm": (lambda: Recommender(0.1), clicks, click_loss),
}


def _short(batch: Batch) -> Batch:
    return {"input_ids": batch["input_ids"][:, :7], "labels": batch["labels"][:, :7]}


SIZES = [
    *(("odd", size, layout) for size, layout in [(7, "data-2"), (7, "data-4"), (1, "data-2"), (2, "data-4")]),
    *(("odd", size, layout) for size, layout in [(7, "zero-2"), (2, "zero-4"), (5, "zero-3"), (5, "data-3")]),
    *(("odd", 3, layout) for layout in ("tensor-2", "tensor-3", "tensor-4", "data-x-tensor")),
    *(("odd", 3, layout) for layout in ("zero-x-tensor", "data-x-data", "zero-x-zero", "tensor-x-tensor")),
    *(("odd", 7, layout) for layout in ("data-x-data", "data-x-zero", "tensor-x-data")),
    *(("odd", 1, layout) for layout in ("data-x-data", "zero-x-zero", "data-x-tensor")),
    *(("gpt2 of 3 heads", 3, layout) for layout in ("tensor-2", "data-x-tensor", "data-2")),
    *(("gpt2 of a prime vocabulary", 3, layout) for layout in ("tensor-4", "zero-4")),
    *(("tied", 5, layout) for layout in ("data-4", "tensor-4", "zero-3", "data-x-data")),
    *(("frozen", 5, layout) for layout in ("data-4", "tensor-3", "zero-4")),
    *(("dlrm", 7, layout) for layout in ("data-4", "tensor-3", "zero-x-tensor", "zero-x-zero")),
]


@pytest.fixture(scope="session")
def made() -> dict[tuple[str, int], Case]:
    return {}


@pytest.mark.parametrize(("name", "size", "layout"), SIZES)
def test_sizes_that_do_not_divide(
    made: dict[tuple[str, int], Case], name: str, size: int, layout: str
) -> None:
    build, batch, loss = MADE[name]
    if (name, size) not in made:
        made[name, size] = _case(build, loss)
    with made[name, size].under(ALL_LAYOUTS[layout]) as step:
        report = step.verify(batch(torch.Generator().manual_seed(2), size), steps=2)
    assert_exact(report)


def _case(build: Callable[[], nn.Module], loss: Callable) -> Case:
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05, momentum=0.9
    )

    def function(batch: Batch) -> torch.Tensor:
        value = loss(model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value

    return Case(model, optimizer, function)
