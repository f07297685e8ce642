"""What work allocates: the most at once, what is left, and what kernels take for themselves."""

from __future__ import annotations

import torch

from monoflow.runtime.allocations import allocations

CPU = torch.device("cpu")


def test_the_peak_and_what_is_left() -> None:
    def work() -> torch.Tensor:
        first = torch.zeros(1000)
        second = torch.cat([first, first])  # 4,000 + 8,000 bytes
        del first
        return second[:10].clone()  # 8,000 + 40

    result, found = allocations(work, CPU)
    assert result.shape == (10,)
    assert (found.peak, found.left) == (12_000, 40)


def test_workspace_of_a_kernel_counts() -> None:
    """A sort gives the values and their indices, of which one value is kept."""
    source = torch.randn(1000)
    _, found = allocations(lambda: source.sort().values[500].clone(), CPU)
    assert found.peak >= 4_000 + 8_000 and found.left == 4


def test_what_was_there_before_does_not_count() -> None:
    source = torch.randn(1000)
    _, found = allocations(lambda: source.mul_(2), CPU)
    assert found.left == 0 and found.peak < 100  # the number that it is multiplied by
