"""Ranks of a bench: processes joined by Gloo, one thread each, and what their engines did."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from monoflow.runtime.recorder import Fired
from monoflow.runtime.trace import Event
from monoflow.runtime.wiring import Wiring

#: Events and wirings of a rank, as they go through a pipe.
Told = tuple[list[tuple], list[Any]]


class Recorder:
    """Keeps the events of a program."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.events: list[Event] = []

    def record(self, fired: Fired) -> None:
        """As `runtime.recorder` says."""
        self.events.append(Event.of(self.program, fired))


def recorded(
    num_ranks: int, function: Callable[[int, Any], Told], job: Any
) -> tuple[list[Event], list[Wiring]]:
    """Calls a module's function with the rank and the job on processes of its own; what all of them did."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(rank, num_ranks, folder, function, job, queue), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        found = [queue.get() for _ in processes]
        for process in processes:
            process.join()
    events = [Event(*one) for events, _ in found for one in events]
    return events, [Wiring.from_data(data) for _, wirings in found for data in wirings]


def _rank(
    rank: int, num_ranks: int, folder: str, function: Callable[[int, Any], Told], job: Any, queue: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    queue.put(function(rank, job))
    gc.collect()  # engines end their threads, which must not be there when the interpreter ends
    dist.barrier()
    dist.destroy_process_group()
