"""Models on which plans compete, at sizes that a small machine steps through in 20 to 200 ms.

GPT and ResNet compute much for their size, which suits data parallelism; DLRM's tables and the wide MLP's
matrices are large against their batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, logging

import monoflow as flow
from monoflow.mesh import Placement

#: Where a plan runs; None lets monoflow choose the grid.
Grid = Placement | None


class Dlrm(nn.Module):
    """Embedding tables, products of every pair of what they give, and an MLP on top (Naumov et al., 2019)."""

    def __init__(self, num_tables: int = 4, rows: int = 40_000, width: int = 32, num_dense: int = 13) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(num_tables))
        self.bottom = nn.Sequential(nn.Linear(num_dense, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        num_vectors = num_tables + 1
        self.top = nn.Sequential(nn.Linear(width + num_vectors**2, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Logits, from (batch, num_dense) numbers and (batch, num_tables) indices."""
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([x, products.flatten(1)], 1)).squeeze(1)


def gpt(plan: str, grid: Grid) -> Case:
    """GPT-2 of transformers with 2 layers of width 192, 8 windows of 64 bytes, AdamW."""
    logging.set_verbosity_error()  # it warns of a loss that is named nowhere, and takes the right one
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_layer=2, n_embd=192, n_head=6, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 256, (8, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _case(model, optimizer, lambda b: model(**b).loss, plan, grid, {"input_ids": ids, "labels": ids})


def dlrm(plan: str, grid: Grid) -> Case:
    """4 tables of 40,000 x 32, 512 samples, SGD."""
    model = Dlrm()
    batch = {
        "dense": torch.randn(512, 13),
        "categories": torch.randint(0, 40_000, (512, 4)),
        "clicks": torch.randint(0, 2, (512,)).float(),
    }

    def loss(b: Mapping[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(b["dense"], b["categories"]), b["clicks"])

    return _case(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, plan, grid, batch)


def wide(plan: str, grid: Grid) -> Case:
    """An MLP of 8.4 M parameters on 4 rows, SGD with momentum."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = {"x": torch.randn(4, 1024), "y": torch.randn(4, 1024)}
    return _case(model, optimizer, lambda b: F.mse_loss(model(b["x"]), b["y"]), plan, grid, batch)


def resnet(plan: str, grid: Grid) -> Case:
    """The example's ResNet with batch norm, 256 images, SGD with momentum."""
    return CASES["vision"](plan, cast(Placement, grid))


CONTESTS: Mapping[str, Callable[[str, Grid], Case]] = {
    "GPT": gpt,
    "DLRM": dlrm,
    "wide MLP": wide,
    "ResNet": resnet,
}


def _case(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    plan: str,
    grid: Grid,
    batch: dict[str, Tensor],
) -> Case:
    @flow.graph(model, optimizer, plan=plan, placement=grid)
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(train_step, batch)
