"""Train a small ResNet with batch norm on scikit-learn's images of digits, on any number of ranks.

monoflow run -n 2 examples/vision/train.py
"""

from __future__ import annotations

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """For 8 x 8 grey images of 10 digits."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.body = nn.Sequential(
            Residual(channels, channels, 1),
            Residual(channels, 2 * channels, 2),
            Residual(2 * channels, 4 * channels, 2),
        )
        self.head = nn.Linear(4 * channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).mean((-2, -1)))


def digits() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """1,797 images, the last 297 of them held out."""
    pixels, digit = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels).float().reshape(-1, 1, 8, 8) / 16
    labels = torch.as_tensor(digit).long()
    return {"images": images[:1500], "labels": labels[:1500]}, {
        "images": images[1500:],
        "labels": labels[1500:],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="images of a global batch")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", help="auto (the default), data, zero, tensor")
    parser.add_argument("--losses", type=Path, help="write the loss curve, a line `step loss` each")
    return parser.parse_args()


def main() -> None:
    args = parse()
    console = Console(quiet=int(os.environ.get("RANK", 0)) != 0, highlight=False)
    train, held_out = digits()
    torch.manual_seed(args.seed)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)

    @flow.graph(model, optimizer, plan=args.plan)
    def train_step(batch):
        loss = F.cross_entropy(model(batch["images"]), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @flow.graph(model, plan=args.plan)
    def count_right(batch):
        with torch.no_grad():
            return (model(batch["images"]).argmax(-1) == batch["labels"]).sum()

    batches = forever(flow.stream(train, args.batch, seed=args.seed, drop_last=True))
    losses = []
    for batch in (steps := flow.progress(islice(batches, args.steps), args.steps)):
        losses.append(train_step(batch).item())
        steps.show(loss=losses[-1])
    model.eval()
    right = sum(count_right(batch).item() for batch in flow.stream(held_out, 297, shuffle=False))
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {right} of 297 held-out digits are right")
    if args.losses and not console.quiet:
        args.losses.parent.mkdir(parents=True, exist_ok=True)
        args.losses.write_text("".join(f"{step} {loss:.6f}\n" for step, loss in enumerate(losses, 1)))


def forever(stream):
    """Epoch after epoch."""
    while True:
        yield from stream


if __name__ == "__main__":
    main()
