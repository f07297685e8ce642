"""Timing calls on every rank at once."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ..plan.calibration import Setting
from ..plan.op_class import OpClass
from .probes import Point

_LEAST = 3  # samples of a point
_APART = 7
_SHORT = 1e-4  # seconds of a call that is timed in turn with others
_MOST = 40  # samples of a collective
_AHEAD = 4  # results that are kept, so that memory is taken as in a step and not handed back at once
_MOST_ARGUMENTS, _FEW = 64, 4


class _Call:
    """A point's call with arguments to take turns with."""

    def __init__(self, point: Point, spread: int) -> None:
        first = point.arguments()
        self.amount = point.amount(first, point.run(first))
        num_bytes = sum(x.numel() * x.dtype.itemsize for x in _tensors(first))
        copies = min(_MOST_ARGUMENTS, spread // max(1, num_bytes))
        self.kind = point.kind
        self._point = point
        self._arguments = [first, *(point.arguments() for _ in range(copies - 1))]
        self._kept: deque[Any] = deque(maxlen=_AHEAD)
        self._next = 0

    def __call__(self, count: int) -> None:
        for _ in range(count):
            self._kept.append(self._point.run(self._arguments[self._next]))
            self._next = (self._next + 1) % len(self._arguments)

    def keep(self, count: int) -> None:
        """Gives the memory of all but the first arguments back."""
        del self._arguments[count:]
        self._kept.clear()
        self._next = 0


@dataclass(frozen=True)
class Timing:
    """How calls are timed.

    Attributes:
        device: where they run.
        typical: what to take of several samples.
        budget: seconds spent on a point.
        spread: bytes of arguments to take turns with, so that they are not all in the cache.
    """

    device: torch.device
    typical: Callable[[Sequence[float]], float]
    budget: float
    spread: int

    @staticmethod
    def of(setting: Setting, budget: float, spread: int) -> Timing:
        """Takes the least of several samples, as other programs only add to them; but where ranks have to
        take turns on the cores, waiting is part of it, and the median is taken.
        """
        takes_turns = setting.num_ranks * setting.num_threads > (os.cpu_count() or 1)
        return Timing(
            torch.device(setting.device_type), statistics.median if takes_turns else min, budget, spread
        )

    def points(self, points: Sequence[Point], tell: Callable[[int], None]) -> list[tuple[float, float]]:
        """The amount and the seconds of every call, while every other rank makes the same one.

        Args:
            tell: is told the number of the point that comes next.
        """
        calls, seconds = [], []
        for number, point in enumerate(points):
            tell(number)
            call = _Call(point, self.spread)
            meet()
            calls.append(call)
            seconds.append(self.typical(self._sampled(call)))
            call.keep(_FEW if seconds[-1] <= _SHORT else 0)
        if self.device.type == "cpu":
            short = [i for i, one in enumerate(seconds) if one <= _SHORT]
            meet()
            for i, samples in zip(short, self._in_turn([calls[i] for i in short]), strict=True):
                if samples and calls[i].kind is not OpClass.FREE:  # views do come in rows
                    seconds[i] = statistics.quantiles(samples, n=4, method="inclusive")[0]
        return [(c.amount, mean(one, self.device)) for c, one in zip(calls, seconds, strict=True)]

    def _in_turn(self, calls: Sequence[_Call]) -> list[list[float]]:
        """Seconds of short calls that do not follow themselves.

        As in a step, where a call finds the caches full of what ran before, which doubles what it takes; and
        as there, every other call is a view or plain arithmetic.
        """
        samples: list[list[float]] = [[] for _ in calls]
        common = [i for i, call in enumerate(calls) if call.kind in (OpClass.FREE, OpClass.STREAM)]
        others = [i for i in range(len(calls)) if i not in common]
        apart = [i for start in range(_APART) for i in others[start::_APART]]  # not one op's sizes in a row
        turns = cycle(common)
        for _ in range(max(_LEAST, int(self.budget / _SHORT))):
            for i in apart:
                for one in (i, *islice(turns, 1)):
                    samples[one].append(self._timed(calls[one], 1))
        return samples

    def collective(self, call: Callable[[], Any]) -> float:
        """The seconds of a call that every rank makes: as long as the slowest of them takes.

        The median of several: that ranks wait for each other's threads to wake is part of it.
        """
        call()
        once = self._slowest([self._timed(partial(_repeat, call), 2) / 2])[0]
        samples = []
        for _ in range(max(_LEAST, min(_MOST, int(2 * self.budget / once)))):
            meet()
            samples.append(self._timed(partial(_repeat, call), 1))
        return statistics.median(self._slowest(samples))

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
