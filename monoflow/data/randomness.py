"""Random numbers that a dataset draws: a function of (seed, epoch, sample), whoever loads it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from .permute import make_key


def seed_generators(*parts: int) -> None:
    """Seed the global CPU generators of torch, NumPy and Python."""
    key = make_key(*parts)
    torch.default_generator.manual_seed(key)
    np.random.seed(key & 0xFFFF_FFFF)
    random.seed(key)


def draws(seed: Sequence[int]) -> bool:
    """Whether anything was drawn since the generators were seeded so. They move on."""
    after = torch.rand(()).item(), np.random.rand(), random.random()
    seed_generators(*seed)
    return after != (torch.rand(()).item(), np.random.rand(), random.random())


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the global generators are as they were: data must not move what the model draws."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
