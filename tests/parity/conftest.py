"""What parity tests share."""

from __future__ import annotations

import pytest
import torch

from .harness import Cases


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of one model and optimizer in one process, which captures them once."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "cases" in getattr(item, "fixturenames", ()) and "name" in params:
            item.add_marker(pytest.mark.xdist_group(f"{params['name']}-{params.get('optimizer', 'sgd')}"))


@pytest.fixture(scope="session")
def cases() -> Cases:
    return Cases()


@pytest.fixture(autouse=True)
def alike() -> None:
    """The same masks in every run, whatever ran before."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
