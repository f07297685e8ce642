"""Tasks over forked processes that may die: a kernel given shards it does not check can end its process."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

import torch

_CONTEXT = multiprocessing.get_context("fork")


class Died(NamedTuple):
    """What is returned for a task that raised, or whose process ended before its result (`crashed`)."""

    why: str
    crashed: bool


class _Worker(NamedTuple):
    process: ForkProcess
    pipe: Connection


def run_all(
    function: Callable[[Any], Any], tasks: Sequence[Any], num_workers: int
) -> Iterator[tuple[Any, Any]]:
    """(task, function(task)) for every task, as they end; `Died` for one that ended its process."""
    waiting = list(reversed(tasks))
    busy: dict[Connection, tuple[_Worker, Any]] = {}
    idle = [_start(function) for _ in range(min(num_workers, len(tasks)))]
    while waiting or busy:
        while waiting and idle:
            worker, task = idle.pop(), waiting.pop()
            worker.pipe.send(task)
            busy[worker.pipe] = worker, task
        for pipe in wait(list(busy)):
            worker, task = busy.pop(pipe)  # pyright: ignore[reportArgumentType]
            try:
                result = worker.pipe.recv()
                idle.append(worker)
            except EOFError:
                worker.process.join()
                result = Died(f"its process ended with status {worker.process.exitcode}", True)
                idle.append(_start(function))
            yield task, result
    for worker in idle:
        worker.pipe.send(None)
        worker.process.join()


def _start(function: Callable[[Any], Any]) -> _Worker:
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_work, args=(function, there), daemon=True)
    with warnings.catch_warnings():  # of Python 3.12, about threads: torch's are not used before a fork here
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    return _Worker(process, here)


def _work(function: Callable[[Any], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        try:
            result = function(task)
        except Exception:
            result = Died(traceback.format_exc(), False)
        pipe.send(result)
