"""Random ops as counter-based functions: the same in eager runs and graphs, decided by the key alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from monoflow.errors import CaptureError
from monoflow.sbp.random_mode import RandomMode, draw_key, op_numbers

from .graph_run import GraphStep, eager

KEY = torch.tensor(7)
X = torch.full((400, 50), 0.3)
P = torch.linspace(0, 1, 50).expand(400, 50)

#: name: (draw, its mean, its standard deviation)
DRAWS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "rand": (lambda: torch.rand(400, 50), 0.5, 12**-0.5),
    "rand_like": (lambda: torch.rand_like(X), 0.5, 12**-0.5),
    "uniform_": (lambda: torch.empty(400, 50).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "randn": (lambda: torch.randn(400, 50), 0.0, 1.0),
    "randn_like": (lambda: torch.randn_like(X, dtype=torch.float64), 0.0, 1.0),
    "normal_": (lambda: torch.empty(400, 50).normal_(2, 3), 2.0, 3.0),
    "normal-tensors": (lambda: torch.normal(X, X), 0.3, 0.3),
    "normal-tensor-float": (lambda: torch.normal(X, 2.0), 0.3, 2.0),
    "normal-float-tensor": (lambda: torch.normal(1.0, X), 1.0, 0.3),
    "normal-floats": (lambda: torch.normal(1.0, 2.0, (400, 50)), 1.0, 2.0),
    "exponential_": (lambda: torch.empty(400, 50).exponential_(2.0), 0.5, 0.5),
    "randint": (lambda: torch.randint(10, (400, 50)), 4.5, 2.872),
    "randint-low": (lambda: torch.randint(-5, 5, (400, 50)), -0.5, 2.872),
    "randint_like": (lambda: torch.randint_like(X, 10), 4.5, 2.872),
    "randint_like-low": (lambda: torch.randint_like(X, 5, 15), 9.5, 2.872),
    "random_": (lambda: torch.empty(400, 50).random_(2, 6), 3.5, 1.118),
    "bernoulli": (lambda: torch.bernoulli(X), 0.3, 0.458),
    "bernoulli-p": (lambda: torch.bernoulli(X, 0.6), 0.6, 0.49),
    "bernoulli_": (lambda: torch.empty(400, 50, dtype=torch.bool).bernoulli_(0.6), 0.6, 0.49),
    "bernoulli_-tensor": (lambda: torch.empty(400, 50).bernoulli_(P), 0.5, 0.5),
    "native_dropout": (lambda: torch.native_dropout(torch.ones(400, 50), 0.2, True)[0], 1.0, 0.5),
    "dropout": (lambda: F.dropout(torch.ones(400, 50), 0.2), 1.0, 0.5),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.zeros(400, 50), 0.5, training=True), 0.0, 0.78),
    "rsample": (lambda: torch.distributions.Normal(X, X, validate_args=False).rsample(), 0.3, 0.3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_their_distribution_and_depend_on_the_key(name: str) -> None:
    draw, mean, deviation = DRAWS[name]
    plain, drawn = draw(), eager(draw, KEY)
    assert drawn.dtype == plain.dtype and drawn.shape == plain.shape
    values = drawn.double()
    assert abs(values.mean().item() - mean) < 5 * deviation / 20000**0.5 + 1e-3 * (name == "alpha_dropout")
    assert abs(values.std().item() - deviation) < 0.02 * max(1.0, deviation)
    assert torch.equal(drawn, eager(draw, KEY))
    assert not torch.equal(drawn, eager(draw, KEY + 1))


@pytest.mark.parametrize("name", DRAWS)
def test_a_graph_draws_what_an_eager_run_draws(name: str) -> None:
    draw = DRAWS[name][0]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return draw() + x, draw() * x

    model = nn.Linear(1, 1)
    for found, expected in zip(GraphStep(step, (model,))(KEY, X), eager(step, KEY, X), strict=True):
        assert torch.equal(found, expected)


def test_every_op_has_its_own_numbers_in_each_step() -> None:
    first, second = eager(lambda: (torch.rand(50), torch.rand(50)), KEY)
    assert not torch.equal(first, second)


def test_numbering_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with op_numbers(), RandomMode(KEY):
        torch.rand(4)
    assert torch.equal(torch.rand(4), expected)


def test_the_seed_decides_the_keys() -> None:
    torch.manual_seed(3)
    keys = [draw_key() for _ in range(3)]
    torch.manual_seed(3)
    assert [int(key) for key in keys] == [int(draw_key()) for _ in range(3)]
    assert len({int(key) for key in keys}) == 3 and keys[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.randperm(5), "aten.randperm"),
        (lambda: torch.multinomial(torch.ones(5), 2), "aten.multinomial"),
        (lambda: torch.poisson(torch.ones(5)), "aten.poisson"),
        (lambda: torch.empty(5).cauchy_(), "aten.cauchy_"),
        (lambda: torch.rand(5, generator=torch.Generator()), "aten.rand.generator"),
        (
            lambda: torch.empty(5).uniform_(generator=torch.Generator()),
            "aten.uniform_.*a generator of its own",
        ),
    ],
)
def test_forms_that_no_layout_could_share_are_refused(draw: Callable[[], torch.Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=f"{name}.*draw it outside the step and pass it in"):
        eager(draw, KEY)


def test_dropout_off_draws_nothing() -> None:
    x = torch.ones(3, 4)
    for draw in (lambda: F.dropout(x, 0.5, training=False), lambda: torch.native_dropout(x, 0.0, True)[0]):
        assert torch.equal(eager(draw, KEY), x)
    assert torch.equal(eager(lambda: torch.native_dropout(x, 1.0, True)[0], KEY), torch.zeros(3, 4))
