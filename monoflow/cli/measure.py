"""What every rank of `monoflow calibrate` does: time each probe and each collective, all ranks at once.

Rank 0 prints a line of JSON for each thing done, which the parent shows, and writes the calibration.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ..boxing.collectives import apply_move
from ..boxing.curve import Curve
from ..boxing.route import Kind, LinkCost, Move
from ..mesh import placement
from ..plan.calibration import Calibration, Setting
from ..plan.cost import Device
from ..plan.devices import memory_of
from ..plan.op_class import OpClass
from ..runtime.launch import ensure_process_group
from ..runtime.transport import DistTransport
from ..sbp.layout import B, NdSbp, Partial, Split
from .probes import PROBES, Point

Typical = Callable[[Sequence[float]], float]

#: Seconds spent on a point: enough for a median, few enough for all of them to take well under a minute.
_BUDGET = 0.05
_LEAST = 3  # samples of a point
_AHEAD = 4  # results that are kept, so that memory is taken as in a step and not handed back at once
_SPREAD = 1 << 27  # bytes of arguments to take turns with, so that they are not all in the cache

MOVES: dict[Kind, tuple[NdSbp, NdSbp]] = {
    "all_gather": ((B, Split(0)), (B, B)),
    "all_reduce": ((B, Partial("sum")), (B, B)),
    "reduce_scatter": ((B, Partial("sum")), (B, Split(0))),
    "all_to_all": ((B, Split(0)), (B, Split(1))),
}
#: Elements of the float32 tensors that collectives move.
_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23)


class Progress(NamedTuple):
    """How far the ranks are, as a line from rank 0 to the parent."""

    done: int
    total: int
    text: str

    def line(self) -> str:
        return json.dumps(self)

    @staticmethod
    def of(line: str) -> Progress:
        return Progress(*json.loads(line))


def main() -> None:
    """Measures as one of the ranks, and writes the calibration on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device-type", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ensure_process_group(options.device_type)
    measured = measure(options.device_type)
    if _rank() == 0:
        measured.save(options.out)


def measure(device_type: str) -> Calibration:
    """Measures this rank together with the others."""
    setting = Setting.here(device_type, dist.get_world_size() if dist.is_initialized() else 1)
    device = torch.device(device_type)
    typical = _typical(setting)
    points = [point for probe in PROBES for point in probe.points(device)]
    groups = [n for n in range(2, setting.num_ranks + 1) if setting.num_ranks % n == 0]
    total = len(points) + len(groups) * len(MOVES)
    curves: dict[str, dict[float, float]] = {}
    for done, point in enumerate(points):
        _tell(done, total, f"{point.key} of {point.size}")
        amount, seconds = _time_point(point, typical)
        curves.setdefault(point.key, {})[amount] = _mean(seconds, device)
    links: dict[int, LinkCost] = {}
    for at, size in enumerate(groups):
        _tell(len(points) + at * len(MOVES), total, f"collectives of {size} ranks")
        links[size] = _time_link(setting, size, typical)
    made = {key: Curve(tuple(sorted(points.items()))) for key, points in curves.items()}
    return Calibration(setting, _device(setting, made), links)


def _typical(setting: Setting) -> Typical:
    """What to take of several samples: the least, as other programs only add; but where ranks have to take
    turns on the cores, waiting is part of it.
    """
    return statistics.median if setting.num_ranks * setting.num_threads > (os.cpu_count() or 1) else min


def _device(setting: Setting, curves: dict[str, Curve]) -> Device:
    """The device that the curves describe, with its rates at the largest sizes."""
    prefix = f"{OpClass.PRODUCT}/"
    flops = {k.removeprefix(prefix): _rate(curve) for k, curve in curves.items() if k.startswith(prefix)}
    stream = curves[OpClass.STREAM]
    launch = stream.points[0][1]
    memory = memory_of(setting.device_type, setting.num_ranks)
    return Device(setting.device, flops, _rate(stream), launch, memory, curves)


def _rate(curve: Curve) -> float:
    amount, seconds = curve.points[-1]
    return amount / seconds


def _time_point(point: Point, typical: Typical) -> tuple[float, float]:
    """The amount of a call and its seconds, while every other rank makes the same one."""
    arguments = [point.arguments()]
    num_bytes = sum(x.numel() * x.dtype.itemsize for x in _tensors(arguments))
    arguments += [point.arguments() for _ in range(min(63, _SPREAD // max(1, num_bytes)))]
    amount = point.amount(arguments[0], point.run(arguments[0]))
    kept: deque[Any] = deque(maxlen=_AHEAD)

    def call(count: int) -> None:
        for i in range(count):
            kept.append(point.run(arguments[i % len(arguments)]))

    _meet()
    return amount, typical(sampled(call, point.device))


def sampled(call: Callable[[int], None], device: torch.device, budget: float = _BUDGET) -> list[float]:
    """Seconds of one of the calls that `call(count)` makes, several times.

    Args:
        budget: seconds to spend.
    """
    call(1)
    once = _timed(call, 1, device)
    batch = max(1, int(budget / 50 / once))
    samples = [_timed(call, batch, device) / batch for _ in range(_LEAST)]
    end = time.perf_counter() + budget - _LEAST * batch * once
    while time.perf_counter() < end:
        samples.append(_timed(call, batch, device) / batch)
    return samples


def _timed(call: Callable[[int], None], count: int, device: torch.device) -> float:
    start = time.perf_counter()
    call(count)
    _finish(device)
    return time.perf_counter() - start


def _time_link(setting: Setting, group_size: int, typical: Typical) -> LinkCost:
    """The collectives of groups of one size, all groups at once."""
    grid = torch.arange(setting.num_ranks).view(-1, group_size).tolist()
    where = placement(setting.device_type, grid)
    transport, device = DistTransport(where, _rank()), torch.device(setting.device_type)
    curves = [(kind, _time_kind(kind, transport, device, typical)) for kind in MOVES]
    points = dict(curves)["all_gather"].points
    (least, alpha), (most, seconds) = points[0], points[-1]
    beta = max(seconds - alpha, 0.0) / (most - least)
    return LinkCost(alpha, beta, 0.0, tuple(curves))


def _time_kind(kind: Kind, transport: DistTransport, device: torch.device, typical: Typical) -> Curve:
    where, rank = transport.placement, transport.rank
    source, target = MOVES[kind]
    points: dict[float, float] = {}
    for numel in _SIZES:
        side = math.isqrt(numel) // where.shape[1] * where.shape[1]
        move = Move(1, source, target, (side, side), where.shape)
        held = torch.ones(side // where.shape[1] if isinstance(source[1], Split) else side, side)
        call = partial(apply_move, move, {rank: held.to(device)}, where, transport)
        points[float(move.num_bytes(torch.float32))] = typical(_sampled_together(call, device))
    return Curve(tuple(sorted(points.items())))


def _sampled_together(call: Callable[[], Any], device: torch.device) -> list[float]:
    """Seconds of a call that all ranks make as often: each as long as the slowest of them took."""
    call()
    once = _agreed([_timed(partial(_repeat, call), 2, device) / 2], device)[0]
    samples = []
    for _ in range(max(_LEAST, min(40, int(2 * _BUDGET / once)))):
        _meet()
        samples.append(_timed(partial(_repeat, call), 1, device))
    return _agreed(samples, device)


def _agreed(seconds: list[float], device: torch.device) -> list[float]:
    """The most that any rank took."""
    most = torch.tensor(seconds, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def _repeat(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


def _tensors(tree: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _mean(seconds: float, device: torch.device) -> float:
    """The same number on every rank."""
    if not dist.is_initialized():
        return seconds
    total = torch.tensor(seconds, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _tell(done: int, total: int, text: str) -> None:
    if _rank() == 0:
        print(Progress(done, total, text).line(), flush=True)
