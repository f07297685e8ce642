"""Machines to plan for: shipped tables of accelerators and links, this machine's calibration, or a guess.

The tables (`sheets.py`) hold what vendors publish; how much of it programs get is stated once, in `ACHIEVED`,
and applied when a machine is made.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from ..boxing.route import LinkCost
from ..config import Settings
from ..errors import PlanError
from ..log import stage_logger
from ..mesh import Placement
from .calibration import Setting, device_name, load_calibration
from .cost import Device, Machine
from .sheets import DEVICES, GB, LINKS, LinkSheet, Sheet

log = stage_logger("plan")

TERA = 1e12


@dataclass(frozen=True)
class Achieved:
    """The parts of published figures that programs reach, as factors.

    Large bf16 products reach 0.6 to 0.75 of a GPU's dense peak (the H100 about 660-700 of 989 TFLOP/s in
    cuBLAS), streaming kernels about 0.9 of memory bandwidth, NCCL's rings about 0.8 of a link's one
    direction (its "bus bandwidth": 360 of 450 GB/s between 8 H100s, 40 of 50 GB/s over NDR InfiniBand). Of a
    collective's seconds compute beside it feels about a tenth: NCCL's kernels take 8 to 24 of the H100's 132
    multiprocessors.
    """

    flops: float = 0.7
    bandwidth: float = 0.9
    link: float = 0.8
    hiding: float = 0.9


ACHIEVED = Achieved()

#: Devices of a host that its own links join.
HOST_SIZE = 8
#: The part of an accelerator's memory that tensors may take; the rest is its runtime's.
_USABLE = 0.92
#: Seconds to launch a kernel from a step that runs op by op.
_LAUNCH = 5e-6


def machine_for(
    placement: Placement, device: str | None = None, link: str | None = None, capacity: int | None = None
) -> Machine:
    """The machine to plan a placement for.

    Args:
        device: a shipped table, such as "h100"; left out, this machine: as it was calibrated, else a shipped
            table of the same accelerator, else a guess; the log of `plan` says how to calibrate.
        link: a shipped link for every axis, instead of the device's own.
        capacity: bytes of memory to use, instead of the device's.

    Raises:
        PlanError: an unknown device or link, or a calibration that is stale or damaged.
    """
    made = _named(placement, device, link) if device is not None else _here(placement, link)
    if capacity is None:
        return made
    small = Device(**{**vars(made.device), "capacity": capacity})
    return Machine(small, made.links)


def device_of(sheet: Sheet) -> Device:
    """The device as programs find it."""
    flops = {dtype: rate * TERA * ACHIEVED.flops for dtype, rate in sheet.flops.items()}
    bandwidth = sheet.bandwidth * TERA * ACHIEVED.bandwidth
    return Device(sheet.name, flops, bandwidth, _LAUNCH, sheet.capacity, hiding=ACHIEVED.hiding)


def link_of(sheet: LinkSheet, axis_size: int) -> LinkCost:
    """A link along an axis: a phase takes as many steps as a tree over the axis is deep."""
    depth = max(1, math.ceil(math.log2(axis_size)))
    return LinkCost(sheet.latency * depth, 1 / (sheet.bandwidth * GB * ACHIEVED.link), sheet.launch)


def is_within_host(placement: Placement, axis: int) -> bool:
    """Whether an axis joins devices of one host, when hosts are filled innermost axis first."""
    return math.prod(placement.shape[axis:]) <= HOST_SIZE


def _named(placement: Placement, device: str, link: str | None) -> Machine:
    if device not in DEVICES:
        raise PlanError(f"no table of a device {device!r}; there are {', '.join(DEVICES)}")
    return _of_sheet(placement, DEVICES[device], link)


def _of_sheet(placement: Placement, sheet: Sheet, link: str | None) -> Machine:
    where = ["host" if is_within_host(placement, axis) else "network" for axis in range(placement.num_axes)]
    links = [_link(link or sheet.links[place]) for place in where]
    pairs = zip(links, placement.shape, strict=True)
    return Machine(device_of(sheet), tuple(link_of(one, size) for one, size in pairs))


def _link(name: str) -> LinkSheet:
    if name not in LINKS:
        raise PlanError(f"no table of a link {name!r}; there are {', '.join(LINKS)}")
    return LINKS[name]


def _here(placement: Placement, link: str | None) -> Machine:
    """This host's calibration; axes that leave the host, which it cannot know, have a shipped link."""
    local = _ranks_of_host(placement)
    found = load_calibration(placement.device_type, local)
    if found is None:
        made = _guess(placement)
        setting = Setting.here(placement.device_type, local)
        log.info(
            "this machine is not calibrated for %d ranks on %s: costs are those of %s; run `%s`",
            local, placement.device_type, made.device.name, setting.command,
        )  # fmt: skip
    else:
        network = _network(placement)
        inside = [math.prod(placement.shape[axis:]) <= local for axis in range(placement.num_axes)]
        pairs = list(zip(inside, placement.shape, strict=True))
        here = found.machine([size if within else 1 for within, size in pairs]).links
        links = [
            own if within else link_of(network, size) for own, (within, size) in zip(here, pairs, strict=True)
        ]
        made = Machine(found.device, tuple(links))
    if link is None:
        return made
    return Machine(made.device, tuple(link_of(_link(link), size) for size in placement.shape))


def _ranks_of_host(placement: Placement) -> int:
    """How many of a placement's ranks this host has: all of them, unless a launcher says otherwise."""
    settings = Settings.from_env(os.environ)
    return min(placement.size, settings.local_world_size) if settings.world_size > 1 else placement.size


def _network(placement: Placement) -> LinkSheet:
    """The link between hosts that devices of a type most often have."""
    if placement.device_type == "cpu":
        return LINKS["ethernet-100g"]
    sheet = _known(placement.device_type)
    return LINKS[(sheet or DEVICES["a100"]).links["network"]]


def _known(device_type: str) -> Sheet | None:
    """The table of this host's accelerator, if there is one."""
    name = device_name(device_type)
    return next((one for one in DEVICES.values() if all(mark in name for mark in one.marks)), None)


def _guess(placement: Placement) -> Machine:
    """A shipped table of this machine's accelerator; for a CPU or an unknown one, round numbers."""
    if placement.device_type == "cpu":
        cores = max(1.0, (os.cpu_count() or 1) / placement.size)
        rates = {"float32": 4e10 * cores, "float64": 2e10 * cores}
        device = Device("an unknown CPU", rates, 5e9 * cores, 5e-6, memory_of("cpu", placement.size))
        return Machine(device, (LinkCost(2e-4, 6e-10, 1e-4),) * placement.num_axes)
    sheet = _known(placement.device_type) or DEVICES["a100"]
    return _of_sheet(placement, sheet, None)


def memory_of(device_type: str, num_ranks: int) -> int:
    """Bytes of memory that each of so many local ranks has: its accelerator's, or its share of the host's."""
    if device_type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
    return torch.accelerator.get_memory_info()[1]


def default_limit(placement: Placement) -> int:
    """Bytes that a rank may hold when nobody says: most of an accelerator's memory; 0, no limit, on a CPU."""
    if placement.device_type == "cpu" or placement.size == 1:
        return 0
    here = torch.accelerator.current_accelerator()
    if here is None or here.type != placement.device_type:
        return 0
    return int(_USABLE * memory_of(placement.device_type, placement.size))
