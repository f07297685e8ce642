"""Timing calls on every rank at once."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ..plan.calibration import Setting
from .probes import Point

_LEAST = 3  # samples of a point
_MOST = 40  # samples of a collective
_AHEAD = 4  # results that are kept, so that memory is taken as in a step and not handed back at once
_SPREAD = 1 << 27  # bytes of arguments to take turns with, so that they are not all in the cache
_MOST_ARGUMENTS = 64


@dataclass(frozen=True)
class Timing:
    """How calls are timed.

    Attributes:
        device: where they run.
        typical: what to take of several samples.
        budget: seconds spent on a point.
    """

    device: torch.device
    typical: Callable[[Sequence[float]], float]
    budget: float

    @staticmethod
    def of(setting: Setting, budget: float) -> Timing:
        """Takes the least of several samples, as other programs only add to them; but where ranks have to
        take turns on the cores, waiting is part of it, and the median is taken.
        """
        takes_turns = setting.num_ranks * setting.num_threads > (os.cpu_count() or 1)
        return Timing(torch.device(setting.device_type), statistics.median if takes_turns else min, budget)

    def point(self, point: Point) -> tuple[float, float]:
        """The amount of a call and its seconds, while every other rank makes the same one."""
        arguments = [point.arguments()]
        num_bytes = sum(x.numel() * x.dtype.itemsize for x in _tensors(arguments))
        copies = min(_MOST_ARGUMENTS, _SPREAD // max(1, num_bytes))
        arguments += [point.arguments() for _ in range(copies - 1)]
        amount = point.amount(arguments[0], point.run(arguments[0]))
        kept: deque[Any] = deque(maxlen=_AHEAD)

        def call(count: int) -> None:
            for i in range(count):
                kept.append(point.run(arguments[i % len(arguments)]))

        meet()
        return amount, mean(self.typical(self._sampled(call)), self.device)

    def collective(self, call: Callable[[], Any]) -> float:
        """The seconds of a call that every rank makes: as long as the slowest of them takes."""
        call()
        once = self._slowest([self._timed(partial(_repeat, call), 2) / 2])[0]
        samples = []
        for _ in range(max(_LEAST, min(_MOST, int(2 * self.budget / once)))):
            meet()
            samples.append(self._timed(partial(_repeat, call), 1))
        return self.typical(self._slowest(samples))

    def _sampled(self, call: Callable[[int], None]) -> list[float]:
        """Seconds of one of the calls that `call(count)` makes, several times."""
        call(1)
        once = self._timed(call, 1)
        batch = max(1, int(self.budget / 50 / once))
        samples = [self._timed(call, batch) / batch for _ in range(_LEAST)]
        end = time.perf_counter() + self.budget - _LEAST * batch * once
        while time.perf_counter() < end:
            samples.append(self._timed(call, batch) / batch)
        return samples

    def _timed(self, call: Callable[[int], None], count: int) -> float:
        start = time.perf_counter()
        call(count)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    def _slowest(self, seconds: list[float]) -> list[float]:
        most = torch.tensor(seconds, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()


def mean(seconds: float, device: torch.device) -> float:
    """The same number on every rank."""
    if not dist.is_initialized():
        return seconds
    total = torch.tensor(seconds, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def meet() -> None:
    """Waits for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def _repeat(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


def _tensors(tree: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
