"""The report judges rightly: a wrong rule anywhere makes it fail, and it leaves the state as it was."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import monoflow as flow
import monoflow.compiler as compiler
from monoflow.sbp.layout import B, S
from monoflow.sbp.ops.random import uniform
from monoflow.sbp.registry import OpRule
from monoflow.sbp.rules import RULES
from monoflow.sbp.signature import LocalCall, LocalOp, Signature
from monoflow.step import Report

from .harness import LAYOUTS, TOLERANCE, Case, Cases, assert_exact
from .models import KINDS, batch_of

aten = torch.ops.aten


def with_rule(patch: pytest.MonkeyPatch, op: Callable, rule: OpRule) -> None:
    """Plans and lowers with another rule for one op."""
    rules = {**RULES, op: rule}
    patch.setattr(compiler, "plan_step", functools.partial(compiler.plan_step, rules=rules))
    patch.setattr(compiler, "lower", functools.partial(compiler.lower, rules=rules))


def only(*signatures: Signature) -> OpRule:
    """A rule of these signatures, right or wrong."""
    return OpRule(lambda call, axis_size, forms: list(signatures))


class Scores(nn.Module):
    """A projection to scores, normalized over the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layer(x), -1)


def report_of_scores(plan: str) -> Report:
    torch.manual_seed(0)
    model = Scores()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = flow.graph(model, optimizer, placement=flow.placement("cpu", [0, 1]), plan=plan)(function)
    with flow.simulate(2):
        return step.verify(torch.randn(4, 8))


def test_a_softmax_split_over_its_dim_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def report() -> Report:
        step = flow.graph(placement=flow.placement("cpu", [0, 1]))(lambda x: torch.softmax(x, -1))
        step.pin("batch.0", "S(1)").pin("result", "S(1)")
        with flow.simulate(2):
            return step.verify(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))

    assert_exact(report())
    with_rule(monkeypatch, aten._softmax.default, only(Signature((S(1),), (S(1),))))
    assert report()["result"].largest > 1e-2


def test_a_gradient_that_is_not_summed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank's own gradient taken for the whole one: losses begin right, gradients are wrong."""
    with_rule(
        monkeypatch, aten.mm.default, only(Signature((S(1), S(0)), (B,)), Signature((S(0), B), (S(0),)))
    )
    with pytest.raises(flow.RunError, match="replicas"):
        report_of_scores("data")


def test_masks_that_depend_on_the_layout_fail(monkeypatch: pytest.MonkeyPatch, cases: Cases) -> None:
    def unaware(call: LocalCall) -> LocalOp:
        (result,) = call.outputs
        assert result is not None
        key, op, _ = call.args
        return call.op, (key, op, list(result.shape)), call.kwargs

    with_rule(monkeypatch, uniform, dataclasses.replace(RULES[uniform], local=unaware))
    with cases("dlrm", "sgd").under(LAYOUTS["data-2"]) as step:
        report = step.verify(batch_of(KINDS["dlrm"]), steps=1)
    assert report["result"].largest > 10 * TOLERANCE["result"]
    assert report["gradient"].largest > 100 * TOLERANCE["gradient"]


def test_a_wrong_optimizer_step_fails_although_gradients_are_right(
    monkeypatch: pytest.MonkeyPatch, cases: Cases
) -> None:
    case = cases("dlrm", "adamw")
    fused = aten._fused_adamw.tensor_lr

    def forgetful(call: LocalCall) -> LocalOp:
        return call.op, call.args, call.kwargs | {"beta2": call.kwargs["beta2"] * 0.9}

    with_rule(monkeypatch, fused, dataclasses.replace(RULES[fused], local=forgetful))
    with case.under(LAYOUTS["data-2"]) as step:
        report = step.verify(batch_of(KINDS["dlrm"]), steps=1)
    assert report["gradient"].largest < 1e-5
    assert report["optimizer state"].largest > 0.1
    assert report["optimizer state"].worst.endswith("exp_avg_sq")


@pytest.mark.parametrize("kind", ["dlrm", "resnet"])
def test_the_state_is_afterwards_what_it_was(cases: Cases, kind: str) -> None:
    case = cases(kind, "adamw")
    batch = batch_of(KINDS[kind])
    with case.under(LAYOUTS["zero-2"]) as step:
        step(batch)
        before = copy.deepcopy((case.model.state_dict(), case.optimizer.state_dict()))
        step.verify(batch, steps=2)
        after = case.model.state_dict(), case.optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_gradients_that_stay_are_afterwards_what_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    step = flow.graph(model, placement=flow.placement("cpu", [0, 1]))(function)
    x = torch.randn(4, 4)
    with flow.simulate(2):
        step(x)
        assert model.weight.grad is not None
        grad = model.weight.grad.clone()
        step.verify(x)
        torch.testing.assert_close(model.weight.grad, grad, rtol=0, atol=0)
        step(x)
        torch.testing.assert_close(model.weight.grad, 2 * grad)


def test_entries_of_noise_are_left_out_and_counted(cases: Cases) -> None:
    """A key's bias has no gradient in theory: AdamW makes full steps of its rounding."""
    case: Case = cases("bert", "adamw")
    with case.under(LAYOUTS["tensor-2"]) as step:
        report = step.verify(batch_of(KINDS["bert"]))
    assert report["parameter"].left_out >= 32
    assert report["parameter"].judged > report["parameter"].left_out
    for kind in ("parameter", "optimizer state"):
        named = report[kind].left_out_of
        assert sum(count for _, count in named) == report[kind].left_out > 0
        assert f"{named[0][0]} ({named[0][1]:,})" in report.text()
    assert "whose gradient is below 1e-05 of the largest" in report.text()
