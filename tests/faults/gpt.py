"""What the fault tests train: a small GPT whose curve every rank of every life adds to a file.

Run by `monoflow run`; a line a step, `STEP LOSS SAMPLES`, is written before the next step begins.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow

VOCABULARY, CONTEXT, ROWS = 61, 12, 8
#: Bytes that a file can have when the disk is full: more than the curve's, less than a checkpoint's.
ROOM = 2**15


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Gpt(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(ids[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--plan", default="zero")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    args = parser.parse_args()

    torch.manual_seed(1)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)

    @flow.graph(model, optimizer, plan=args.plan)
    def train_step(ids: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, ids.sum()

    text = torch.randint(0, VOCABULARY, (52, CONTEXT + 1), generator=torch.Generator().manual_seed(2))
    batches = flow.stream(text, ROWS, seed=3, drop_last=True)
    saves = flow.checkpointer(
        args.folder / "saves", train_step, stream=batches, extra={"schedule": schedule}, every=args.every,
        snapshot_every=1,
    )  # fmt: skip
    with saves:
        while train_step.num_steps < args.steps:
            for batch in batches:
                loss, samples = train_step(batch)
                note(args.folder, train_step.num_steps, loss.item(), samples.item())
                schedule.step()
                saves.after_step()
                time.sleep(args.pause)
                suffer(args.folder)
                if train_step.num_steps >= args.steps or stops(args.folder):
                    return


def note(folder: Path, step: int, loss: float, samples: float) -> None:
    """Adds a line in one write, which a killed process cannot leave in halves that matter."""
    if int(os.environ.get("RANK", 0)) == 0:
        line = f"{step} {loss:.9g} {samples:.0f} {os.environ.get('WORLD_SIZE', 1)} {os.getpid()}\n"
        with (folder / "curve.txt").open("a") as file:
            file.write(line)


def stops(folder: Path) -> bool:
    """Whether all ranks are to end after this step."""
    stop = torch.tensor(float((folder / "stop").exists()))
    if dist.is_initialized():
        dist.all_reduce(stop, dist.ReduceOp.MAX)
    return bool(stop)


def suffer(folder: Path) -> None:
    """What a test asks for, by a file: of the first that sees it, or of all, or for this life."""
    rank = os.environ.get("RANK", "0")
    while (folder / "hold").exists():
        time.sleep(0.05)
    if took(folder / f"sleep-{rank}"):
        time.sleep(10_000)
    if (folder / "full-disk").exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
        if rank == "0":
            took(folder / "full-disk")
    if (folder / "slow-disk").exists():
        os.fsync = lambda descriptor, sync=os.fsync: (time.sleep(0.1), sync(descriptor))[1]
        if rank == "0":
            took(folder / "slow-disk")


def took(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
