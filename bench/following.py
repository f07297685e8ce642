"""What it gains that a step begins while the one before runs: `python bench/following.py`.

Two ranks, one thread each, take steps of a stack of layers: with `flow.synchronize()` before every call, so
that steps go one after the other, and without, in turns. Ratios are of neighbouring turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from ranks import Told, recorded
from torch import nn

import monoflow as flow


def turns(rank: int, job: tuple[str, int, int]) -> Told:
    """Seconds a step of both ways, in turns, as they go through a pipe."""
    plan, pairs, steps = job
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @flow.graph(model, optimizer, plan=plan)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(64, 256)

    def seconds(alone: bool) -> float:
        flow.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            if alone:
                flow.synchronize()
            step(x)
        flow.synchronize()
        return (time.perf_counter() - start) / steps

    seconds(True)
    found: list[Any] = [(seconds(True), seconds(False)) for _ in range(pairs)]
    if rank == 0:
        ratio = statistics.median(beside / alone for alone, beside in found)
        alone, beside = (1e3 * statistics.median(one) for one in zip(*found, strict=True))
        print(f"{plan}: {alone:.1f} ms one after the other, {beside:.1f} ms, ratio {ratio:.2f}", flush=True)
    return [], []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="turns of each way")
    parser.add_argument("--steps", type=int, default=30, help="steps of a turn")
    options = parser.parse_args()
    for plan in ("data", "zero", "tensor"):
        recorded(2, turns, (plan, options.pairs, options.steps))


if __name__ == "__main__":
    main()
