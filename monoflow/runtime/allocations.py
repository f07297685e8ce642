"""What a piece of work allocates, as torch's allocator of a device saw it: workspace of kernels included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


@dataclass(frozen=True)
class Allocations:
    """Bytes that a piece of work took, over what was there before it.

    Attributes:
        peak: the most at any time.
        left: what is still there when it is done, its results included.
    """

    peak: int
    left: int


def allocations(work: Callable[[], T], device: torch.device) -> tuple[T, Allocations]:
    """Runs a piece of work and says what it allocated on a device.

    On a CPU torch's profiler notes every allocation, of torch's other threads (Gloo's) too, but not that
    what was there before is freed; a free by one of those threads it may miss, so that among several runs
    the least is right. An accelerator's allocator keeps statistics; its peak is reset.
    """
    if device.type == "cpu":
        return _on_cpu(work)
    torch.accelerator.synchronize(device)
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    result = work()
    torch.accelerator.synchronize(device)
    peak = torch.accelerator.max_memory_allocated(device)
    return result, Allocations(peak - before, torch.accelerator.memory_allocated(device) - before)


def _on_cpu(work: Callable[[], T]) -> tuple[T, Allocations]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    found = seen.profiler.kineto_results if seen.profiler is not None else None
    assert found is not None, "the profiler gave no results"
    changes = sorted(
        (event.start_ns(), event.nbytes())  # pyright: ignore[reportAttributeAccessIssue]
        for event in found.events()
        if event.name() == "[memory]"
    )
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return result, Allocations(peak, held)
