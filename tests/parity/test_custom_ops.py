"""Models with operators of torch.library train split: under rules that a trial finds, and registered ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monoflow as flow
from monoflow.sbp.layout import Split
from monoflow.sbp.signature import LocalCall
from monoflow.sbp.sources import RuleBook
from monoflow.sbp.user_rules import REGISTERED
from monoflow.step import Step

from .harness import LAYOUTS, verified


@torch.library.custom_op("custom_op_tests::gate", mutates_args=())
def gate(x: Tensor, weight: Tensor) -> Tensor:
    """torch sees nothing of what is done in numpy."""
    return torch.from_numpy(x.numpy() * weight.numpy() / (1 + abs(x.numpy())))


@torch.library.custom_op("custom_op_tests::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = 1 / (1 + x.abs())
    return grad * weight * scale**2, (grad * x * scale).flatten(0, -2).sum(0)


@torch.library.custom_op("custom_op_tests::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    """Every element of the result depends on one from the other end of the tensor."""
    return x.flip(tuple(range(x.ndim))).tanh()


@gate.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@gate_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@mix.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _keep_result(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _gate_back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return gate_backward(grad, *ctx.saved_tensors)


def _mix_back(ctx: Any, grad: Tensor) -> Tensor:
    return (grad * (1 - ctx.saved_tensors[0] ** 2)).flip(tuple(range(grad.ndim)))


gate.register_autograd(_gate_back, setup_context=_keep_inputs)
mix.register_autograd(_mix_back, setup_context=_keep_result)


class Gated(nn.Module):
    def __init__(self, mixing: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 6)
        self.weight = nn.Parameter(torch.randn(32))
        self.mixing = mixing

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(gate(self.up(x), self.weight))
        return out + mix(out) if self.mixing else out


def trained(layout: str, batch: int = 8, mixing: bool = False) -> Step:
    """A model with the operators, trained under a layout and compared with one device."""
    torch.manual_seed(0)
    model = Gated(mixing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def function(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return verified(LAYOUTS[layout], [model, optimizer], function, torch.randn(batch, 5, 12))


def signatures(step: Step, name: str) -> list[str]:
    """How the nodes of one operator are laid out, along the only axis."""
    (nodes,) = [[n for n in step.plan.graph.calls() if str(n.target) == f"custom_op_tests.{name}.default"]]
    return [str(step.plan.signatures[node.name][0]) for node in nodes]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    yield
    REGISTERED.clear()


def register() -> None:
    """Rules for the operators, written by hand."""
    flow.sbp.register(gate, "btk,k->btk", linear=[(1,)])
    flow.sbp.register(
        gate_backward,
        ["S(0), S(0), B -> S(0), P", "S(1), S(1), B -> S(1), P", "S(2), S(2), S(0) -> S(2), S(0)"],
        sample=(torch.randn(7, 5, 6), torch.randn(7, 5, 6), torch.randn(6)),
    )


@pytest.mark.parametrize("registered", [False, True], ids=["trial", "registered"])
@pytest.mark.parametrize("batch", [8, 7])
def test_the_batch_is_split_through_operators_that_torch_does_not_know(registered: bool, batch: int) -> None:
    if registered:
        register()
    step = trained("data-2", batch)
    assert signatures(step, "gate") == ["S(0), B -> S(0)"]
    assert signatures(step, "gate_backward") == ["S(0), S(0), B -> S(0), P(sum)"]
    assert not step.plan.unruled


@pytest.mark.parametrize("registered", [False, True], ids=["trial", "registered"])
def test_weights_are_split_through_them_too(registered: bool) -> None:
    if registered:
        register()
    step = trained("tensor-2")
    assert signatures(step, "gate") == ["S(2), S(0) -> S(2)"]
    assert signatures(step, "gate_backward") == ["S(2), S(2), S(0) -> S(2), S(0)"]
    assert step.plan.inputs["up.weight"] == (Split(0),) and step.plan.inputs["weight"] == (Split(0),)


def test_on_two_axes_both_are_split() -> None:
    step = trained("data-x-tensor")
    (node,) = [n.name for n in step.plan.graph.calls() if "gate.default" in str(n.target)]
    assert list(map(str, step.plan.signatures[node])) == ["S(0), B -> S(0)", "S(2), S(0) -> S(2)"]


def test_an_operator_that_cannot_be_split_runs_whole_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("monoflow").propagate = True
    with caplog.at_level(logging.INFO, logger="monoflow.plan"):
        step = trained("data-2", mixing=True)
    assert signatures(step, "mix") == ["B -> B"]
    messages = [one.getMessage() for one in caplog.records]
    (warning,) = [one for one in messages if "has no rule: it runs whole" in one]
    assert "custom_op_tests.mix.default" in warning and f"{2 * 8 * 5 * 6 * 4:,} bytes" in warning
    assert any("mix.default has no rule by trial: no layout but B is exact" in one for one in messages)
    (rule,) = [one for one in messages if "gate.default has its rule from trial: " in one]
    assert "S(0), B -> S(0)" in rule and "S(2), S(0) -> S(2)" in rule


@torch.library.custom_op("custom_op_tests::dense", mutates_args=())
def dense(x: Tensor) -> Tensor:
    """A kernel that takes its tensor for contiguous, as many do."""
    return x.as_strided((x.numel(),), (1,)).exp().reshape(x.shape)


def test_operators_get_contiguous_tensors() -> None:
    x = torch.randn(4, 6)
    assert not torch.equal(dense(x.t()), x.t().exp())
    rule = RuleBook()[torch.ops.custom_op_tests.dense.default]
    assert rule.local is not None
    op, args, kwargs = rule.local(LocalCall(torch.ops.custom_op_tests.dense.default, (x.t(),), {}, [], []))
    assert torch.equal(op(*args, **kwargs), x.t().exp())
