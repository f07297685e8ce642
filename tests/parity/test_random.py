"""Random numbers: the same on every layout, decided by torch.manual_seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .harness import ALL_LAYOUTS, LAYOUTS, Layout

PLACED = [
    *LAYOUTS,
    *("data-3", "zero-3", "tensor-3", "data-x-data", "zero-x-zero", "tensor-x-tensor", "tensor-x-data"),
]


def drawn(layout: Layout, function: Callable, *args: torch.Tensor, pins: dict | None = None) -> list:
    """The results of two calls after torch.manual_seed(7)."""
    step = layout.compiled()(function)
    torch.manual_seed(7)
    with layout.ranks():
        for pattern, sbp in (pins or {}).items():
            step.pin(pattern, sbp)
        return [step(*args), step(*args)]


def masks(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every kind of draw, some on the batch's shape and some not, one after a transposition."""
    return {
        "dropout": F.dropout(torch.ones_like(x), 0.3),
        "transposed": F.dropout(x.T, 0.5),
        "rand": torch.rand(6, 10),
        "rand_like": torch.rand_like(x),
        "randn_like": torch.randn_like(x),
        "bernoulli": torch.bernoulli(x.sigmoid()),
        "randint": torch.randint(0, 1000, (7,)),
        "normal": torch.empty_like(x).normal_(1.0, 2.0),
        "uniform": x.new_empty(3, 5).uniform_(-1, 1),
        "noisy": x + torch.randn(x.shape),
    }


@pytest.fixture(scope="module")
def expected() -> list:
    return drawn(LAYOUTS["one"], masks, sample())


def sample() -> torch.Tensor:
    return torch.randn(5, 10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", PLACED)
def test_the_same_bits_on_every_layout(expected: list, layout: str) -> None:
    got = drawn(ALL_LAYOUTS[layout], masks, sample())
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)"])
def test_the_same_bits_however_results_lie(expected: list, sbp: str) -> None:
    names = ["dropout", "rand", "randn_like", "bernoulli", "noisy"]
    pins = {f"result.{name}": sbp for name in names}
    got = drawn(LAYOUTS["tensor-4"], masks, sample(), pins=pins)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_seed_decides_and_every_step_differs(expected: list) -> None:
    again = drawn(LAYOUTS["one"], masks, sample())
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    first, second = expected
    for name in ("dropout", "rand", "randn_like", "randint", "normal"):
        assert not torch.equal(first[name], second[name]), name
    step = LAYOUTS["one"].compiled()(masks)
    torch.manual_seed(8)
    other = step(sample())
    assert not torch.equal(other["rand"], first["rand"])


def test_draws_have_the_distributions_they_are_named_by(expected: list) -> None:
    x = torch.zeros(200, 200)
    (got, _) = drawn(LAYOUTS["data-4"], masks, x)
    assert (got["dropout"] == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert got["dropout"].max().item() == pytest.approx(1 / 0.7)
    assert got["bernoulli"].mean().item() == pytest.approx(0.5, abs=0.01)
    assert got["normal"].mean().item() == pytest.approx(1.0, abs=0.05)
    assert got["normal"].std().item() == pytest.approx(2.0, abs=0.05)
    assert got["rand_like"].min() >= 0 and got["rand_like"].max() < 1


class Recomputed(nn.Module):
    """A block whose activations are recomputed, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if again else self.block(x)  # pyright: ignore


@pytest.mark.parametrize("layout", ["one", "data-2", "zero-4", "tensor-2", "zero-x-tensor"])
def test_recomputation_draws_the_same_masks(layout: str) -> None:
    grads = []
    for again in (False, True):
        torch.manual_seed(0)
        model, x = Recomputed(), sample()[:, :8]

        def function(x: torch.Tensor, model: nn.Module = model, again: bool = again) -> torch.Tensor:
            loss = model(x, again).square().sum()
            loss.backward()
            return loss

        torch.manual_seed(3)
        with ALL_LAYOUTS[layout].ranks():
            ALL_LAYOUTS[layout].compiled(model)(function)(x)
        weight = model.get_parameter("block.0.weight").grad
        assert weight is not None
        grads.append(weight.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=1e-6)
    assert float(grads[0].abs().max()) > 0.1
