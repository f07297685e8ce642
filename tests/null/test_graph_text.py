"""A StepGraph as text: roles, ops with shapes, and where they come from, short enough to read."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from monoflow.graph.passes.clean import clean
from monoflow.graph.step_graph import Role

from .graph_build import built
from .graph_run import trace

X = torch.arange(12.0).reshape(3, 4)

TEXT = """\
StepGraph small (project/train.py:3)
  %h_0_weight: float32[3, 4] = param 'h.0.weight'
  %batch_0: float32[3, 4] = batch 'batch.0'
  %add: float32[3, 4] = aten.add.Tensor(%h_0_weight, 1.0)  # forward layer project/model.py:7
  %cat: float32[6, 4] = aten.cat.default([%h_0_weight, %batch_0])  # forward layer project/model.py:7
  %max_1: float32[4], int64[4] = aten.max.dim(%cat, 0)  # forward layer project/model.py:7
  %getitem: float32[4] = getitem(%max_1, 0)  # forward layer project/model.py:7
  return %add as next 'h.0.weight'
  return %getitem as result 'out1'"""


def test_text_shows_roles_ops_and_origins() -> None:
    graph = clean(
        built(
            lambda p, x: [p + 1.0, torch.max(torch.cat([p, x]), 0)[0]],
            {"h.0.weight": (Role.PARAM, X), "batch.0": (Role.BATCH, X)},
            replaces=["h.0.weight"],
        )
    )
    assert graph.text() == TEXT


def test_a_captured_step_names_this_file_and_the_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        return loss

    graph = clean(trace(step, (model,), X, torch.tensor([0, 1, 1])).graph)
    lines = graph.text().splitlines()
    line = step.__code__.co_firstlineno
    assert lines[0] == f"StepGraph step (null/test_graph_text.py:{line})"
    (relu,) = [one for one in lines if "aten.relu.default(" in one]
    assert relu.endswith(f"# forward 1 null/test_graph_text.py:{line + 1}")
    assert sum(one.endswith(f"# backward 2 null/test_graph_text.py:{line + 1}") for one in lines) >= 2
    assert "  %_2_weight: float32[2, 3] = param '2.weight'" in lines
    assert max(map(len, lines)) < 220
