"""Models and steps of many kinds, each exact on layouts of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .harness import ALL_LAYOUTS, assert_exact

#: What a step uses, the step, and its arguments.
Parts = tuple[list[Any], Callable, tuple]


def trained(model: nn.Module, loss: Callable, *args: torch.Tensor, **options: Any) -> Parts:
    """A step of SGD on `loss(model, *args)`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)

    def function(*args: torch.Tensor) -> torch.Tensor:
        value = loss(model, *args)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return [model, optimizer], function, args


def classified(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def labels(size: int = 4, classes: int = 6) -> torch.Tensor:
    return torch.randint(0, classes, (size,))


def grouped_convolutions() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.GroupNorm(4, 8), nn.SiLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.Hardswish(), nn.AvgPool2d(2),
        nn.Conv2d(8, 12, 1), nn.PReLU(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 6),
    )  # fmt: skip
    return trained(model, classified, torch.randn(4, 4, 8, 8), labels())


def autoencoder() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.1),
        nn.Flatten(), nn.Linear(128, 12), nn.Tanh(), nn.Linear(12, 128), nn.Unflatten(1, (8, 4, 4)),
        nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1), nn.ELU(), nn.Upsample(scale_factor=2),
        nn.Conv2d(8, 3, 3, stride=2, padding=1), nn.Sigmoid(),
    )  # fmt: skip
    return trained(model, lambda net, x: F.mse_loss(net(x), x), torch.rand(4, 3, 8, 8))


def variational() -> Parts:
    """Draws its latent inside the step."""
    encode, decode = nn.Linear(10, 8), nn.Linear(4, 10)
    model = nn.ModuleList([encode, decode])

    def loss(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mean, log_var = encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(decode(z), x) + 0.1 * divergence

    return trained(model, loss, torch.rand(4, 10))


def encoder_layer() -> Parts:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 6))
    return trained(model, lambda net, x, y: F.cross_entropy(net(x)[:, 0], y), torch.randn(4, 5, 16), labels())


def whole_transformer() -> Parts:
    model = nn.Transformer(16, 4, 1, 1, 32, dropout=0.1, batch_first=True)

    def loss(net: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return F.smooth_l1_loss(net(source, target, tgt_mask=mask, tgt_is_causal=True), target)

    return trained(model, loss, torch.randn(4, 5, 16), torch.randn(4, 6, 16))


class Experts(nn.Module):
    """Every expert sees every token; the two best gates count."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 16) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 16, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        weight = torch.zeros(len(x), 4, dtype=x.dtype).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("td,edf->etf", x, self.up))
        return torch.einsum("etf,efd,te->td", hidden, self.down, weight)


def experts() -> Parts:
    return trained(Experts(), lambda net, x: (net(x) - x).square().mean(), torch.randn(8, 8))


def lstm() -> Parts:
    model = nn.ModuleDict({"lstm": nn.LSTM(6, 8, batch_first=True), "head": nn.Linear(8, 6)})

    def loss(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model["head"](model["lstm"](x)[0][:, -1]), y)

    return trained(model, loss, torch.randn(4, 5, 6), labels())


def gru_cell() -> Parts:
    model = nn.ModuleDict({"cell": nn.GRUCell(6, 8), "head": nn.Linear(8, 6)})

    def loss(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(len(x), 8)
        for i in range(x.shape[1]):
            state = model["cell"](x[:, i], state)
        return F.cross_entropy(model["head"](state), y, label_smoothing=0.1)

    return trained(model, loss, torch.randn(4, 3, 6), labels())


def recomputed() -> Parts:
    """Activation checkpointing, with a dropout that is drawn again in the backward pass."""
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))
    head = nn.Linear(8, 6)

    def loss(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden: Any = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(head(hidden), y)

    return trained(nn.ModuleList([block, head]), loss, torch.randn(4, 8), labels())


def adversaries() -> Parts:
    """Two models, two optimizers, two backward passes in one step."""
    make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
    makes = torch.optim.Adam(make.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-6)
    judges = torch.optim.SGD(judge.parameters(), lr=0.05)

    def function(real: torch.Tensor) -> dict[str, torch.Tensor]:
        fake = make(torch.randn(len(real), 4))
        scores = judge(real), judge(fake.detach())
        found = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
        judges.zero_grad()
        found.backward()
        judges.step()
        fooled = F.softplus(-judge(fake)).mean()
        makes.zero_grad()
        fooled.backward()
        makes.step()
        judges.zero_grad()
        makes.zero_grad()
        return {"found": found, "fooled": fooled}

    return [make, judge, makes, judges], function, (torch.randn(4, 6),)


def pair_loss() -> Parts:
    """Distances between all samples of the batch: no dim of the result is the batch alone."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = net(x)
        distance = (z[:, None] - z[None]).square().sum(-1)
        same = (y[:, None] == y[None]).float()
        return (same * distance + (1 - same) * F.relu(1 - distance)).mean()

    return trained(model, loss, torch.randn(6, 6), labels(6, 3))


def statistics_by_hand() -> Parts:
    """Variances, maxima, sorting and cumulative sums over the batch itself."""
    model = nn.Linear(6, 8)

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        spread = y.var(0).sum() + y.std() + y.amax(0).sum() - y.min()
        return spread + y.cumsum(0).square().mean() + y.sort(0).values[1].sum() + y.logsumexp(0).sum()

    return trained(model, loss, torch.randn(4, 6))


def batch_norm_after_linear() -> Parts:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    return trained(model, classified, torch.randn(4, 6), labels(), weight_decay=0.01, nesterov=True)


def weight_normed() -> Parts:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    model = nn.Sequential(layer, nn.Softplus(), nn.RMSNorm(8), nn.Linear(8, 6), nn.LogSoftmax(-1))
    return trained(model, lambda net, x, y: F.nll_loss(net(x), y), torch.randn(4, 6), labels())


def bags() -> Parts:
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(12, 8, mode="sum"), "head": nn.Linear(8, 6)})

    def loss(_: nn.Module, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.multi_margin_loss(model["head"](model["bag"](ids)), y)

    return trained(model, loss, torch.randint(0, 12, (4, 3)), labels())


def one_dimensional() -> Parts:
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=2, dilation=2), nn.BatchNorm1d(8), nn.GLU(1), nn.AdaptiveMaxPool1d(2),
        nn.Flatten(), nn.Linear(8, 6),
    )  # fmt: skip
    return trained(model, classified, torch.randn(4, 3, 9), labels())


def several_losses() -> Parts:
    model = nn.Linear(6, 6)

    def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = net(x)
        logs, target = F.log_softmax(scores, -1), F.softmax(x, -1)
        total = F.kl_div(logs, target, reduction="batchmean") + F.l1_loss(scores, x) + F.huber_loss(scores, x)
        total = total + F.cosine_embedding_loss(scores, x, torch.ones(len(x)))
        return (
            total
            + F.cross_entropy(scores, y, weight=torch.arange(1.0, 7.0))
            + F.cross_entropy(scores, target)
        )

    return trained(model, loss, torch.randn(4, 6), labels())


MODELS: Mapping[str, Callable[[], Parts]] = {
    one.__name__: one
    for one in (
        grouped_convolutions, autoencoder, variational, encoder_layer, whole_transformer, experts, lstm,
        gru_cell, recomputed, adversaries, pair_loss, statistics_by_hand, batch_norm_after_linear,
        weight_normed, bags, one_dimensional, several_losses,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["data-2", "zero-3", "zero-x-tensor"])
def test_equals_one_device(name: str, layout: str) -> None:
    torch.manual_seed(0)
    things, function, args = MODELS[name]()
    with ALL_LAYOUTS[layout].ranks():
        assert_exact(ALL_LAYOUTS[layout].compiled(*things)(function).verify(*args, steps=2))
