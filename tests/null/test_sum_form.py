"""Means, mean losses and batch statistics are sums and counts in a captured graph, with eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from monoflow.graph.step_graph import StepGraph

from .graph_run import Things, compare, trace

aten = torch.ops.aten

#: Ops that divide by a size, or may. A loss is one only where its reduction is a mean (1).
MEANS = {
    aten.mean, aten.var, aten.std, aten.var_mean, aten.std_mean,
    aten.native_batch_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward, aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional, aten.batch_norm_backward,
}  # fmt: skip


def hidden_means(graph: StepGraph) -> list[str]:
    """Nodes that divide by a size that a split changes."""
    found = []
    for node in graph.calls():
        packet = getattr(node.target, "overloadpacket", None)
        schema = getattr(node.target, "_schema", None)
        reduction = (
            next((i for i, a in enumerate(schema.arguments) if a.name == "reduction"), None)
            if schema
            else None
        )
        means = reduction is not None and (node.args[reduction] if reduction < len(node.args) else 1) == 1
        if packet in MEANS or means:
            found.append(str(node.target))
    return found


X, W = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, 1, 2, 1, 0.1])
CLASSES = torch.tensor([0, 1, -100, 3, 4, 0])
PROBABILITIES = torch.softmax(X.flip(0), -1)
SIGNS = torch.tensor([1.0, -1, 1, 1, -1, -1])

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda x: F.cross_entropy(x, CLASSES),
    "cross_entropy-weights": lambda x: F.cross_entropy(x, CLASSES, weight=W),
    "cross_entropy-smoothing": lambda x: F.cross_entropy(x, CLASSES, weight=W, label_smoothing=0.1),
    "cross_entropy-probabilities": lambda x: F.cross_entropy(x, PROBABILITIES, label_smoothing=0.1),
    "cross_entropy-ignore": lambda x: F.cross_entropy(x, CLASSES.clamp(min=0), ignore_index=0),
    "cross_entropy-2d": lambda x: F.cross_entropy(x.view(2, 5, 3), CLASSES.view(2, 3)),
    "nll": lambda x: F.nll_loss(x.log_softmax(-1), CLASSES, weight=W),
    "mse": lambda x: F.mse_loss(x, X.flip(0)),
    "l1": lambda x: F.l1_loss(x, X.flip(0)),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, X.flip(0), beta=0.5),
    "huber": lambda x: F.huber_loss(x, X.flip(0), delta=0.5),
    "soft_margin": lambda x: F.soft_margin_loss(x, X.sign()),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), PROBABILITIES, weight=W),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, PROBABILITIES, pos_weight=W),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), PROBABILITIES, reduction="batchmean"),
    "kl_div-logs": lambda x: F.kl_div(
        x.log_softmax(-1), PROBABILITIES.log(), reduction="batchmean", log_target=True
    ),
    "cosine_embedding": lambda x: F.cosine_embedding_loss(x, X.flip(0), SIGNS),
    "triplet": lambda x: F.triplet_margin_loss(x, X.flip(0), X.roll(1, 0)),
    "margin_ranking": lambda x: F.margin_ranking_loss(x[:, 0], x[:, 1], SIGNS, margin=0.1),
    "hinge_embedding": lambda x: F.hinge_embedding_loss(x[:, 0], SIGNS),
    "poisson_nll": lambda x: F.poisson_nll_loss(x, PROBABILITIES),
    "multilabel_soft_margin": lambda x: F.multilabel_soft_margin_loss(x, (X > 0).float()),
    "mean": lambda x: x.mean() + x.mean(0).square().mean(-1, keepdim=True).sum() + x[0, 0].mean(),
    "var": lambda x: x.var(0).sum() + x.std() + torch.var_mean(x, 1, correction=0)[0].sum(),
    "std_mean": lambda x: sum(one.sum() for one in torch.std_mean(x, 0, keepdim=True)),  # pyright: ignore
    "normalized": lambda x: ((x - x.mean(0)) / x.std(0)).pow(3).mean(),
}  # fmt: skip


def training_on(
    loss_of: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> Callable[[], tuple[Callable, Things]]:
    def make() -> tuple[Callable, Things]:
        model = nn.Linear(5, 5, bias=False, dtype=dtype)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model(x))
            loss.backward()
            return loss

        return step, (model,)

    return make


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_eagers_value_and_gradient(name: str) -> None:
    step = compare(training_on(LOSSES[name], torch.float32), [(X,)], tolerance=2e-6)
    assert hidden_means(step.captures[0][1].graph) == []


@pytest.mark.parametrize("name", ["cross_entropy", "mse", "mean", "bce_with_logits", "smooth_l1", "nll"])
def test_losses_in_half_precision(name: str) -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        return LOSSES[name](x) if name in ("cross_entropy", "mean") else LOSSES[name](x.float())

    step = compare(training_on(half, torch.bfloat16), [(X.bfloat16(),)], tolerance=2e-2)
    assert hidden_means(step.captures[0][1].graph) == []


@pytest.mark.parametrize("kind", ["train", "eval", "no statistics", "frozen affine"])
@pytest.mark.parametrize("dims", [1, 2])
def test_batch_norm(kind: str, dims: int) -> None:
    def make() -> tuple[Callable, Things]:
        settings: dict[str, Any] = {
            "no statistics": {"track_running_stats": False},
            "frozen affine": {"affine": False},
        }.get(kind, {})
        norm = (nn.BatchNorm1d if dims == 1 else nn.BatchNorm2d)(5, **settings)
        model = nn.Sequential(
            nn.Conv1d(5, 5, 1, bias=False) if dims == 1 else nn.Conv2d(5, 5, 1, bias=False), norm
        ).train(kind != "eval")

        def step(x: torch.Tensor) -> torch.Tensor:
            x = x.view(4, 5, 6) if dims == 1 else x.view(4, 5, 2, 3)
            loss = model(x).pow(3).sum()
            loss.backward()
            return loss

        return step, (model,)

    batches = [(torch.randn(120, generator=torch.Generator().manual_seed(i)),) for i in range(3)]
    step = compare(make, batches, tolerance=1e-4, num_captures=2)
    for _, captured in step.captures:
        assert hidden_means(captured.graph) == []


def test_norms_over_features_stay_one_op() -> None:
    model = nn.Sequential(nn.LayerNorm(5), nn.GroupNorm(1, 5))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    targets = {node.target for node in trace(step, (model,), X).graph.calls()}
    assert {aten.native_layer_norm.default, aten.native_group_norm.default} <= targets


def test_writing_through_a_mask_is_a_choice() -> None:
    model = nn.Linear(5, 5)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y[x > 0] = 2.0
        y[:, 0][x[:, 1] < 0] = x[0, 0]
        y[x.sum(1) > 0] = -1.0
        loss = y.square().sum()
        loss.backward()
        return loss

    captured = compare(lambda: (step, (model,)), [(X,)], num_captures=None).captures[0][1]
    targets = {node.target for node in captured.graph.calls()}
    assert aten.index_put.default not in targets and aten.where.self in targets
