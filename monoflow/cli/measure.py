"""What every rank of `monoflow calibrate` does: time each probe and each collective, all ranks at once.

Rank 0 prints a line of JSON for each thing done, which the parent shows, and writes the calibration.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

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
from .probes import PROBES, Probe
from .timing import Timing
from .whole_steps import with_whole_steps

MOVES: dict[Kind, tuple[NdSbp, NdSbp]] = {
    "all_gather": ((B, Split(0)), (B, B)),
    "all_reduce": ((B, Partial("sum")), (B, B)),
    "reduce_scatter": ((B, Partial("sum")), (B, Split(0))),
    "all_to_all": ((B, Split(0)), (B, Split(1))),
}


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        sizes: elements of the float32 tensors that collectives move, ascending.
        budget: seconds spent on a point: enough for many samples, few enough for all points to take well
            under a minute.
        spread: bytes of arguments to take turns with.
        steps: seconds of whole steps; none for 0.
    """

    probes: Sequence[Probe] = PROBES
    sizes: Sequence[int] = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23)
    budget: float = 0.05
    spread: int = 1 << 26
    steps: float = 1.0


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


def measure(device_type: str, extent: Extent | None = None) -> Calibration:
    """Measures this rank together with the others, which all call it; every rank gets the same."""
    extent = extent or Extent()
    setting = Setting.here(device_type, dist.get_world_size() if dist.is_initialized() else 1)
    timing = Timing.of(setting, extent.budget, extent.spread)
    points = [point for probe in extent.probes for point in probe.points(timing.device)]
    groups = [n for n in range(2, setting.num_ranks + 1) if setting.num_ranks % n == 0]
    total = len(points) + len(groups) + 1
    curves: dict[str, dict[float, float]] = {}

    def tell(number: int, i: int) -> None:
        again = f", pass {number + 1}" * (number > 0)
        _tell(i, total, f"{points[i].key} of {points[i].size}{again}")

    found = timing.points(points, tell)
    for point, (amount, seconds) in zip(points, found, strict=True):
        curves.setdefault(point.key, {})[amount] = seconds
    links: dict[int, LinkCost] = {}
    for done, size in enumerate(groups, len(points)):
        _tell(done, total, f"collectives of {size} ranks")
        links[size] = _link(setting, size, timing, extent.sizes)
    made = {key: Curve.through(found) for key, found in curves.items()}
    hiding = _hiding(setting, timing, extent.sizes) if setting.num_ranks > 1 else 0.0
    measured = Calibration(setting, _device(setting, made, hiding), links)
    _tell(total - 1, total, "whole steps")
    return with_whole_steps(measured, extent.steps) if extent.steps else measured


def _device(setting: Setting, curves: dict[str, Curve], hiding: float) -> Device:
    """The device that the curves describe, with its rates at the largest sizes."""
    prefix = f"{OpClass.PRODUCT}/"
    flops = {k.removeprefix(prefix): _rate(curve) for k, curve in curves.items() if k.startswith(prefix)}
    stream = curves[OpClass.STREAM]
    memory = memory_of(setting.device_type, setting.num_ranks)
    return Device(setting.device, flops, _rate(stream), stream.points[0][1], memory, curves, hiding)


def _rate(curve: Curve) -> float:
    """The best amount per second."""
    return max(amount / seconds for amount, seconds in curve.points)


def _link(setting: Setting, group_size: int, timing: Timing, sizes: Sequence[int]) -> LinkCost:
    """The collectives of groups of one size, all groups at once."""
    grid = torch.arange(setting.num_ranks).view(-1, group_size).tolist()
    transport = DistTransport(placement(setting.device_type, grid), _rank())
    curves = [(kind, _collective(kind, transport, timing, sizes)) for kind in MOVES]
    points = dict(curves)["all_gather"].points
    (least, alpha), (most, seconds) = points[0], points[-1]
    beta = max(seconds - alpha, 0.0) / (most - least)
    return LinkCost(alpha, beta, 0.0, tuple(curves))


def _collective(kind: Kind, transport: DistTransport, timing: Timing, sizes: Sequence[int]) -> Curve:
    """Seconds by bytes sent of one kind of move along the inner axis."""
    points: dict[float, float] = {}
    for numel in sizes:
        move, call = _call(kind, transport, timing, numel)
        points[float(move.num_bytes(torch.float32))] = timing.collective(call)
    return Curve.through(points)


def _call(
    kind: Kind, transport: DistTransport, timing: Timing, numel: int
) -> tuple[Move, Callable[[], object]]:
    """A move along the inner axis, and what makes it."""
    where, rank = transport.placement, transport.rank
    source, target = MOVES[kind]
    side = math.isqrt(numel) // where.shape[1] * where.shape[1]
    move = Move(1, source, target, (side, side), where.shape)
    held = torch.ones(side // where.shape[1] if isinstance(source[1], Split) else side, side)
    return move, partial(apply_move, move, {rank: held.to(timing.device)}, where, transport)


def _hiding(setting: Setting, timing: Timing, sizes: Sequence[int]) -> float:
    """The part of an all-reduce of all ranks that compute beside it does not feel."""
    transport = DistTransport(placement(setting.device_type, [list(range(setting.num_ranks))]), _rank())
    return timing.hiding(_call("all_reduce", transport, timing, sizes[len(sizes) // 2])[1])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _tell(done: int, total: int, text: str) -> None:
    if _rank() == 0:
        print(Progress(done, total, text).line(), flush=True)
