"""Tensors that wait for a step: every touch waits, nothing is exchanged, errors come out."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from monoflow.step.pending import Flight


def flight_of(*tensors: torch.Tensor) -> Flight:
    """A step that fills its tensors with sevens when it is waited for."""

    def finish() -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(7)

    made = Flight(finish)
    made.hold(tensors)
    return made


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy().tolist(),
        lambda x: np.array(x).tolist(),
        lambda x: [float(x[0]), x[1].item()],
        lambda x: torch.stack([x, x])[0].tolist(),
        lambda x: torch.ops.aten.mul(x, 1).tolist(),
        lambda x: torch.ops.aten._foreach_mul([x], 1)[0].tolist(),
        lambda x: x.data.tolist(),
        lambda x: copy.deepcopy(x).tolist(),
        lambda x: pickle.loads(pickle.dumps(x)).tolist(),
        lambda x: np.frombuffer(save({"x": x})[-8:], dtype=np.float32).tolist(),
        lambda x: torch.from_dlpack(x).tolist(),
        lambda x: torch.zeros(2).copy_(x).tolist(),
        lambda x: torch.where(x > 0, x, x).tolist(),
        lambda x: nn.functional.linear(torch.eye(2), x.expand(2, 2))[0].tolist(),
    ],
)
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_every_way_to_read_waits(kind: type, read: Callable) -> None:
    tensor = torch.zeros(2) if kind is torch.Tensor else nn.Parameter(torch.zeros(2), requires_grad=False)
    flight_of(tensor)
    assert isinstance(tensor, kind) and type(tensor) is not kind
    assert read(tensor) == [7.0, 7.0]
    assert type(tensor) is kind and not hasattr(tensor, "_flight")


def test_a_model_waits_as_a_whole_and_is_the_same_objects() -> None:
    model = nn.Linear(2, 2)
    before = dict(model.named_parameters())
    flight_of(*model.parameters())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert loaded["weight"].tolist() == [[7.0, 7.0]] * 2
    assert all(type(one) is nn.Parameter for one in model.parameters())
    assert all(one is before[name] for name, one in model.named_parameters())


def test_a_copy_of_a_waiting_model_waits_too() -> None:
    model = nn.Linear(2, 2)
    flight_of(*model.parameters())
    twin = copy.deepcopy(model)
    assert type(twin.weight) is nn.Parameter and twin.weight.tolist() == [[7.0, 7.0]] * 2


def test_another_thread_waits_until_the_step_is_done() -> None:
    tensor, may_go, began = torch.zeros(2), threading.Event(), threading.Event()

    def finish() -> None:
        began.set()
        may_go.wait(10)
        tensor.fill_(7)

    flight = Flight(finish)
    flight.hold([tensor])
    read: list[list[float]] = []
    first = threading.Thread(target=flight.land)
    second = threading.Thread(target=lambda: read.append(tensor.tolist()))
    first.start()
    assert began.wait(10)
    second.start()
    second.join(0.05)
    assert second.is_alive() and not read
    may_go.set()
    first.join(10)
    second.join(10)
    assert read == [[7.0, 7.0]]


def test_what_a_step_raised_comes_out_at_every_touch_of_the_flight() -> None:
    def finish() -> None:
        raise ValueError("the step failed")

    tensor = torch.zeros(2)
    flight = Flight(finish)
    flight.hold([tensor])
    with pytest.raises(ValueError, match="the step failed"):
        tensor.sum()
    with pytest.raises(ValueError, match="the step failed"):
        flight.land()
    assert type(tensor) is torch.Tensor


def test_a_class_of_the_users_own_is_left_alone() -> None:
    class Own(torch.Tensor):
        pass

    tensor = torch.zeros(2).as_subclass(Own)
    Flight(lambda: None).hold([tensor])
    assert type(tensor) is Own
