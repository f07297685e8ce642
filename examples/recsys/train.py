"""Train a click model (embedding tables and an MLP) on *generated* data, on any number of ranks.

The clicks come from a hidden model drawn below, not from people: the loss can be judged against its
entropy, but says nothing about a real catalogue.

monoflow run -n 2 examples/recsys/train.py --plan tensor
"""

from __future__ import annotations

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow

TABLE_SIZES = (5000, 2000, 500, 50)
NUM_DENSE = 8


class ClickModel(nn.Module):
    """As DLRM: one table per category, pairwise products of what they give, an MLP on top."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        tables = [nn.Embedding(size, width) for size in TABLE_SIZES]
        self.tables = nn.ModuleList(tables)
        self.dense = nn.Sequential(nn.Linear(NUM_DENSE, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        num_vectors = len(TABLE_SIZES) + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(nn.Linear(width + num_pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in tables:
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Logits of a click, from (batch, NUM_DENSE) numbers and (batch, tables) indices."""
        x = self.dense(dense)
        vectors = [x, *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        pairs = [(a * b).sum(-1, keepdim=True) for i, a in enumerate(vectors) for b in vectors[:i]]
        return self.top(torch.cat([x, *pairs], dim=-1)).squeeze(-1)


def generate(num_samples: int, seed: int) -> tuple[dict[str, Tensor], float]:
    """Clicks drawn from a hidden model, and that model's own loss on them, which nobody can beat for long."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(num_samples, NUM_DENSE, generator=generator)
    popular = torch.rand(num_samples, len(TABLE_SIZES), generator=generator) ** 3  # few items, most clicks
    categories = (popular * torch.tensor(TABLE_SIZES)).long()
    taste = [torch.randn(size, generator=generator) for size in TABLE_SIZES]
    logits = dense @ torch.randn(NUM_DENSE, generator=generator) * 0.5
    logits += sum(values[categories[:, i]] for i, values in enumerate(taste))
    clicks = torch.bernoulli(logits.sigmoid(), generator=generator)
    bound = F.binary_cross_entropy_with_logits(logits, clicks).item()
    return {"dense": dense, "categories": categories, "clicks": clicks}, bound


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256, help="samples of a global batch")
    parser.add_argument("--samples", type=int, default=50_000, help="generated")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", help="auto (the default), data, zero, tensor")
    parser.add_argument("--losses", type=Path, help="write the loss curve, a line `step loss` each")
    return parser.parse_args()


def main() -> None:
    args = parse()
    console = Console(quiet=int(os.environ.get("RANK", 0)) != 0, highlight=False)
    data, bound = generate(args.samples, args.seed)
    torch.manual_seed(args.seed)
    model = ClickModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    @flow.graph(model, optimizer, plan=args.plan)
    def train_step(batch):
        logits = model(batch["dense"], batch["categories"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["clicks"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = forever(flow.stream(data, args.batch, seed=args.seed, drop_last=True))
    losses = []
    for batch in (steps := flow.progress(islice(batches, args.steps), args.steps)):
        losses.append(train_step(batch).item())
        steps.show(loss=losses[-1])
    last = losses[-20:]
    console.print(
        f"generated clicks: loss {losses[0]:.3f} -> {sum(last) / len(last):.3f}; "
        f"the model that drew them has {bound:.3f}"
    )
    if args.losses and not console.quiet:
        args.losses.parent.mkdir(parents=True, exist_ok=True)
        args.losses.write_text("".join(f"{step} {loss:.6f}\n" for step, loss in enumerate(losses, 1)))


def forever(stream):
    """Epoch after epoch."""
    while True:
        yield from stream


if __name__ == "__main__":
    main()
