"""Which back end the ranks of a device talk through, and which device is whose."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from monoflow.errors import PlacementError
from monoflow.runtime import launch


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl")])
def test_a_device_brings_its_back_end(monkeypatch: pytest.MonkeyPatch, device: str, backend: str) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == backend)
    assert launch._backend(device) == backend


def test_a_back_end_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    with pytest.raises(PlacementError, match="cuda ranks talk through nccl, which this build of torch lacks"):
        launch._backend("cuda")


def test_local_ranks_take_one_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert [launch._device_index("cuda", rank) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(PlacementError, match="local rank 4 has no cuda device, this host has 4"):
        launch._device_index("cuda", 4)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # a launcher shows each rank its own
    assert launch._device_index("cuda", 3) == 0
