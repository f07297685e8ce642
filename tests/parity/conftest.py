"""What parity tests share."""

from __future__ import annotations

import pytest
import torch

from .harness import Cases


@pytest.fixture(scope="session")
def cases() -> Cases:
    return Cases()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
