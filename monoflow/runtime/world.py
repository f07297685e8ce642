"""Which ranks there are and which of them this process hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..config import Settings
from ..errors import PlacementError
from ..mesh import Placement
from .launch import ensure_process_group

_SIMULATED: ContextVar[int] = ContextVar("simulated ranks", default=0)


@dataclass(frozen=True)
class World:
    """The ranks of this job.

    Attributes:
        size: how many there are.
        rank: the rank of this process; in a simulation, which hosts all of them, rank 0.
        simulated: whether this one process stands for all ranks.
    """

    size: int
    rank: int
    simulated: bool

    def hosted(self, placement: Placement) -> tuple[int, ...]:
        """The ranks of a placement that this process runs.

        Raises:
            PlacementError: the placement names ranks that the job does not have, or leaves this one out.
        """
        if max(placement.ranks) >= self.size:
            need = max(placement.ranks) + 1
            raise PlacementError(
                f"{placement} needs {need} ranks, this job has {self.size}; start it with "
                f"`monoflow run -n {need} script.py`"
            )
        if self.simulated:
            return placement.ranks
        if self.rank not in placement.ranks:
            raise PlacementError(
                f"{placement} leaves out rank {self.rank}, which calls the step all the same"
            )
        return (self.rank,)


def current_world(device_type: str) -> World:
    """The world of this process. Joins the process group if a launcher started several ranks."""
    simulated = _SIMULATED.get()
    if simulated:
        return World(simulated, 0, True)
    if Settings.from_env(os.environ).world_size > 1:
        ensure_process_group(device_type)
    if dist.is_initialized() and dist.get_world_size() > 1:
        return World(dist.get_world_size(), dist.get_rank(), False)
    return World(1, 0, False)


@contextmanager
def simulate(num_ranks: int) -> Iterator[None]:
    """Within: this process stands for `num_ranks` ranks, all run in turn; for tests and for looking at plans.

    The models keep whole tensors; every step cuts them, runs all ranks, and joins the results.

    Raises:
        PlacementError: fewer than one rank.
    """
    if num_ranks < 1:
        raise PlacementError(f"simulate({num_ranks}): the number of ranks must be at least 1")
    token = _SIMULATED.set(num_ranks)
    try:
        yield
    finally:
        _SIMULATED.reset(token)


def share_key(key: torch.Tensor, world: World, device: torch.device) -> torch.Tensor:
    """Rank 0's random key on every rank: ranks whose generators differ must not draw different masks."""
    if world.size == 1 or world.simulated:
        return key.to(device)
    shared = key.to(device)
    dist.broadcast(shared, 0)
    return shared
