"""Pins, batch statistics, evaluation beside training, ops without a rule, accumulation across calls."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoflow as flow
from monoflow.sbp.layout import B, S

from .harness import ALL_LAYOUTS, LAYOUTS, Cases, assert_exact
from .models import KINDS, Batch, batch_of

# --- pins ------------------------------------------------------------------------------------------


class Pinned(nn.Module):
    """A model with a buffer and two layers."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)) * self.scale)


def pinned_step(layout: str) -> tuple[flow.Step, torch.Tensor]:
    torch.manual_seed(0)
    model = Pinned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)

    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "out": out}

    return ALL_LAYOUTS[layout].compiled(model, optimizer)(function), torch.randn(4, 8)


@pytest.mark.parametrize("layout", ["data-2", "zero-2", "tensor-3"])
@pytest.mark.parametrize(
    ("pattern", "sbp"),
    [
        ("up.weight", "S(0)"), ("up.weight", "S(1)"), ("*.weight", "S(1)"), ("*.bias", "B"), ("*", "B"),
        ("scale", "S(0)"), ("batch.0", "S(1)"), ("batch.0", "B"),
        ("result.out", "S(1)"), ("result.out", "S(0)"),
    ],
)  # fmt: skip
def test_pins_are_kept_and_exact(layout: str, pattern: str, sbp: str) -> None:
    with ALL_LAYOUTS[layout].ranks():
        step, x = pinned_step(layout)
        step.pin(pattern, sbp)
        plan = step.compile(x)
        pinned = {**plan.inputs, **{k: v for k, v in plan.outputs.items() if k.startswith("result")}}
        wanted = (B,) if sbp == "B" else (S(int(sbp[2])),)
        names = {"*.weight": ["up.weight", "down.weight"], "*.bias": ["up.bias", "down.bias"], "*": ["scale"]}
        for name in names.get(pattern, [pattern]):
            assert pinned[name] == wanted, name
        assert_exact(step.verify(x, steps=2))


def test_pins_of_state_go_with_their_parameter() -> None:
    with LAYOUTS["data-2"].ranks():
        step, x = pinned_step("data-2")
        plan = step.pin("up.weight", "S(1)").compile(x)
    assert plan.inputs["up.weight:exp_avg"] == plan.inputs["up.weight:exp_avg_sq"] == (S(1),)
    assert plan.inputs["down.weight:exp_avg"] == (B,)


@pytest.mark.parametrize(
    ("pattern", "sbp", "message"),
    [
        ("nothing.*", "S(0)", "matches no parameter, buffer, input or output"),
        ("up.weight", "S(2)", r"up.weight has 2 dims \(12, 8\), S\(2\) names dim 2"),
        ("up.weight", "S(0, 5)", r"12 elements along dim 0; S\(0,5\) over 2 ranks needs a multiple of 10"),
        ("up.weight", "P(sum)", r"up.weight cannot be stored as P\(sum\)"),
        ("result.loss", "S(0)", r"result.loss has 0 dims \(\), S\(0\) names dim 0"),
        ("up.weight", "(S(0), B)", "gives 2 SBPs .* the placement has 1 axes"),
    ],
)
def test_wrong_pins_are_refused_with_what_is_wrong(pattern: str, sbp: str, message: str) -> None:
    with LAYOUTS["data-2"].ranks():
        step, x = pinned_step("data-2")
        with pytest.raises(flow.LayoutError, match=message):
            step.pin(pattern, sbp).compile(x)


# --- batch statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["data-2", "data-4", "data-x-tensor"])
def test_batch_statistics_are_those_of_the_whole_batch(layout: str) -> None:
    torch.manual_seed(0)
    model, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3) * torch.tensor([[1.0], [5.0], [0.1], [3.0]])

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    with LAYOUTS[layout].ranks():
        out = LAYOUTS[layout].compiled(model)(function)(x)
    torch.testing.assert_close(out, plain(x))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


# --- evaluation beside training --------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["data-2", "zero-2", "tensor-2", "zero-x-tensor"])
def test_an_evaluation_shares_the_parameters_of_training(cases: Cases, layout: str) -> None:
    case = cases("resnet", "sgd", dropout=0.0)
    batch = batch_of(KINDS["resnet"])
    with case.under(LAYOUTS[layout]) as train:
        model = case.model

        @LAYOUTS[layout].compiled(model)
        def evaluate(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                logits = model(batch["pixel_values"])
                return F.cross_entropy(logits, batch["labels"]), (logits.argmax(-1) == batch["labels"]).sum()

        train(batch)
        model.eval()
        try:
            loss, correct = evaluate(batch)
            with torch.no_grad():
                logits = model(batch["pixel_values"])
                expected = F.cross_entropy(logits, batch["labels"])
        finally:
            model.train()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        assert correct.item() == (logits.argmax(-1) == batch["labels"]).sum().item()
        train(batch)
        assert train.stats().calls() > 0


def test_gradients_accumulate_over_calls() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    halves = torch.randn(8, 6).chunk(2)
    for half in halves:
        model(half).square().sum().backward()
    expected = {
        name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
    }
    model.zero_grad()

    def forward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    def update() -> torch.Tensor:
        optimizer.step()
        return model.bias.sum()

    layout = LAYOUTS["data-2"]
    before = model.weight.detach().clone()
    with layout.ranks():
        accumulate, apply = layout.compiled(model)(forward), layout.compiled(model, optimizer)(update)
        for half in halves:
            accumulate(half)
        for name, value in model.named_parameters():
            torch.testing.assert_close(value.grad, expected[name])
        apply()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * expected["weight"])


# --- ops without a rule ----------------------------------------------------------------------------


@torch.library.custom_op("monoflow_tests::rotate", mutates_args=())
def rotate(x: torch.Tensor) -> torch.Tensor:
    return x.flip((0, 1)).tanh()


@rotate.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep_result(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _rotate_back(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return (grad * (1 - ctx.saved_tensors[0] ** 2)).flip((0, 1))


rotate.register_autograd(_rotate_back, setup_context=_keep_result)


@pytest.mark.parametrize("layout", ["data-2", "zero-2", "tensor-2"])
def test_an_op_without_a_rule_is_exact_and_named_with_its_bytes(
    layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)

    def function(x: torch.Tensor) -> torch.Tensor:
        loss = rotate(model(x)).square().sum() + (model(x) * x).sum()
        loss.backward()
        return loss

    logging.getLogger("monoflow").propagate = True
    with LAYOUTS[layout].ranks(), caplog.at_level(logging.WARNING):
        step = LAYOUTS[layout].compiled(model)(function)
        assert_exact(step.verify(torch.randn(4, 6), steps=1))
    (warning,) = [one.getMessage() for one in caplog.records if "has no rule" in one.getMessage()]
    assert "monoflow_tests.rotate" in warning and "192 bytes" in warning and "test_steps.py" in warning
