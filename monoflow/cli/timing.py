"""Timing calls on every rank at once."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
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
_MOST = 40  # collectives between two readings of the clock
_BLOCKS = 5  # such readings
_SIDE = 256  # of the product that stands for what is computed between collectives
PASSES = 3  # over all points, at most
_ENOUGH = 20.0  # seconds after which no further pass is begun
_STABLE = 0.05  # a pass that lowers half of the points by less than this was the last
_TURNS = 20  # budgets: long against the time for which a scheduler lets one process run
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
        takes_turns: whether ranks have more threads than there are cores.
        budget: seconds spent on a point.
        spread: bytes of arguments to take turns with, so that they are not all in the cache.
    """

    device: torch.device
    takes_turns: bool
    budget: float
    spread: int

    @staticmethod
    def of(setting: Setting, budget: float, spread: int) -> Timing:
        """The timing of a setting."""
        takes_turns = setting.num_ranks * setting.num_threads > (os.cpu_count() or 1)
        return Timing(torch.device(setting.device_type), takes_turns, budget, spread)

    def points(self, points: Sequence[Point], tell: Callable[[int, int], None]) -> list[tuple[float, float]]:
        """The amount and the seconds of every call, while every other rank makes the same one.

        The least of several passes, as other programs only add to what is measured; they end when one has
        found little less, or took long. Where ranks take turns on the cores, a call that is not interrupted
        does not see that: all are longer by the factor by which computing without a pause is.

        Args:
            tell: is told the number of the pass and of the point that comes next.
        """
        start = time.perf_counter()
        amounts, least = self._pass(points, partial(tell, 0))
        for number in range(1, PASSES):
            seconds = self._pass(points, partial(tell, number))[1]
            less = [min(pair) for pair in zip(least, seconds, strict=True)]
            change = statistics.median(1 - now / before for now, before in zip(less, least, strict=True))
            least = less
            took = mean(time.perf_counter() - start, self.device)
            if change <= _STABLE or took > _ENOUGH:  # the same on every rank
                break
        factor = self.turns() if self.takes_turns else 1.0
        return [(amount, factor * one) for amount, one in zip(amounts, least, strict=True)]

    def _pass(self, points: Sequence[Point], tell: Callable[[int], None]) -> tuple[list[float], list[float]]:
        """Amounts of calls, and their seconds, the same on every rank."""
        calls, seconds = [], []
        for number, point in enumerate(points):
            tell(number)
            call = _Call(point, self.spread)
            meet()
            calls.append(call)
            seconds.append(min(self._sampled(call)))
            call.keep(_FEW if seconds[-1] <= _SHORT else 0)
        if self.device.type == "cpu":
            short = [i for i, one in enumerate(seconds) if one <= _SHORT]
            meet()
            for i, samples in zip(short, self._in_turn([calls[i] for i in short]), strict=True):
                if samples and calls[i].kind is not OpClass.FREE:  # views do come in rows
                    seconds[i] = statistics.quantiles(samples, n=4, method="inclusive")[0]
        return [call.amount for call in calls], [mean(one, self.device) for one in seconds]

    def turns(self) -> float:
        """Seconds by the clock for a second of computing, when all ranks compute without a pause."""
        meet()
        arguments = _square(self.device)
        start, own = time.perf_counter(), time.thread_time()
        while time.perf_counter() - start < _TURNS * self.budget:
            torch.mm(*arguments)
        factor = (time.perf_counter() - start) / max(time.thread_time() - own, 1e-9)
        return max(1.0, mean(factor, self.device))

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
        """Seconds that a step takes longer for a call that every rank makes.

        As a step makes it: from a thread of its own, between pieces of computing, after which some ranks are
        there sooner than others, and have to be woken. Of several readings of the clock the median.
        """
        if self.device.type != "cpu":
            return self._in_a_row(call)
        compute = partial(torch.mm, *_square(self.device))
        with ThreadPoolExecutor(1) as lane:

            def both() -> None:
                compute()
                lane.submit(call).result()

            both()
            return max(self._round(both) - self._round(compute), 1e-7)

    def hiding(self, call: Callable[[], Any]) -> float:
        """The part of a call's seconds that compute beside it does not feel, between 0 and 1."""
        compute = partial(torch.mm, *_square(self.device))
        with ThreadPoolExecutor(1) as lane:
            moving = self._round(lambda: lane.submit(call).result())
            count = max(1, round(moving / self._round(compute)))

            def computing() -> None:
                for _ in range(count):
                    compute()

            alone = self._round(computing)
            saved = moving + alone - self._round(partial(_beside, lane, call, computing))
        return min(1.0, max(0.0, saved / min(moving, alone)))

    def _round(self, call: Callable[[], Any]) -> float:
        """Seconds of a call that is made again and again, of the slowest rank."""
        meet()
        call()
        once = slowest([self._timed(partial(_repeat, call), 2) / 2], self.device)[0]
        count = max(2, min(_MOST, int(self.budget / once)))
        spans = []
        for _ in range(_BLOCKS if once < self.budget else _LEAST):
            meet()
            spans.append(self._timed(partial(_repeat, call), count) / count)
        return statistics.median(slowest(spans, self.device))

    def _in_a_row(self, call: Callable[[], Any]) -> float:
        """Seconds of a call that ranks make one after the other, with nothing between."""
        call()
        once = slowest([self._timed(partial(_repeat, call), 2) / 2], self.device)[0]
        samples = []
        for _ in range(max(_LEAST, min(_MOST, int(2 * self.budget / once)))):
            meet()
            samples.append(self._timed(partial(_repeat, call), 1))
        return statistics.median(slowest(samples, self.device))

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


def mean(seconds: float, device: torch.device) -> float:
    """The same number on every rank."""
    if not dist.is_initialized():
        return seconds
    total = torch.tensor(seconds, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Of each number the largest of any rank."""
    most = torch.tensor(seconds, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def meet() -> None:
    """Waits for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def _beside(lane: Executor, call: Callable[[], Any], compute: Callable[[], None]) -> None:
    moving = lane.submit(call)
    compute()
    moving.result()


def _square(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((_SIDE, _SIDE), 0.5, device=device), torch.full((_SIDE, _SIDE), 0.5, device=device)


def _repeat(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


def _tensors(tree: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
