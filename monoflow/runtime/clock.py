"""How far the clocks of two hosts are apart, by round trips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import torch
import torch.distributed as dist

_TRIPS = 8


@dataclass(frozen=True)
class Offset:
    """What is to be taken from this host's clock to get that of rank 0's.

    Attributes:
        num_ns: the offset.
        error: nanoseconds that it may be wrong by: half of the shortest round trip.
    """

    num_ns: int
    error: int


def compare_clocks(local_rank: int, device: torch.device, now: Callable[[], int] = perf_counter_ns) -> Offset:
    """Compares this host's clock with that of rank 0's host. Every rank of the default group calls it.

    The first rank of each host asks rank 0 for the time, several times; the answer that came back soonest is
    the one that knows best (Cristian, "Probabilistic clock synchronization", 1989).

    Args:
        local_rank: this rank's number on its host.
        device: where the group's back end takes tensors.
        now: this host's clock, in nanoseconds.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([local_rank], device=device)
    locals_ = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(locals_, own)
    first_of = _first_of_each([int(one) for one in locals_])
    best = Offset(0, 0)
    for asker in sorted(set(first_of) - {0}):
        if rank == 0:
            _answer(asker, device, now)
        elif rank == asker:
            best = _ask(device, now)
    found = torch.tensor([best.num_ns, best.error], device=device)
    offsets = [torch.empty_like(found) for _ in range(size)]
    dist.all_gather(offsets, found)
    num_ns, error = offsets[first_of[rank]].tolist()
    return Offset(num_ns, error)


def _first_of_each(local_ranks: list[int]) -> list[int]:
    """Per rank, the first rank of its host: launchers number the ranks of a host in a row."""
    return [rank - local for rank, local in enumerate(local_ranks)]


def _ask(device: torch.device, now: Callable[[], int]) -> Offset:
    question, answer = (
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    found = []
    for _ in range(_TRIPS):
        begin = now()
        dist.send(question, 0)
        dist.recv(answer, 0)
        there, end = int(answer), now()
        found.append(Offset((begin + end) // 2 - there, (end - begin + 1) // 2))
    return min(found, key=lambda one: one.error)


def _answer(asker: int, device: torch.device, now: Callable[[], int]) -> None:
    question = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_TRIPS):
        dist.recv(question, asker)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        dist.send(torch.tensor([now()], device=device), asker)
