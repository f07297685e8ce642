"""`auto` against every template and pipeline by the same prediction; bench/templates.py has more sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import monoflow as flow
from monoflow.graph.step_graph import StepGraph
from monoflow.mesh import placement
from monoflow.plan.devices import machine_for
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.template import TEMPLATES
from tests.null.test_plan_pipeline import every_pipeline, predicted

_EQUAL = 1e-3  # of the seconds: choices that the search takes for equal
_MARGIN = 0.01  # by so much a pipeline has to be faster than what has no stages


class Clicks(nn.Module):
    """Embedding tables, large against the batch, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20_000, 16) for _ in range(3))
        self.top = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))


class Language(nn.Module):
    """Two blocks of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(512, 256), nn.Linear(256, 512)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024, 0.0) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


def captured(build: Callable[[], nn.Module], ids: Tensor) -> StepGraph:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @flow.graph(model, optimizer)
    def step(ids: Tensor) -> Tensor:
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step.capture(ids)


@pytest.fixture(scope="module")
def graphs() -> dict[str, StepGraph]:
    return {
        "clicks": captured(Clicks, torch.randint(0, 20_000, (256, 3))),
        "language": captured(Language, torch.randint(0, 512, (32, 64))),
    }


@pytest.mark.parametrize(
    ("name", "shape", "hiding"),
    [
        ("clicks", (8,), 0.9),
        ("clicks", (2, 2), 0.9),
        ("clicks", (2, 2), 0.0),
        ("language", (2,), 0.9),
        ("language", (8,), 0.9),
    ],
    ids=str,
)
def test_no_template_is_faster(
    name: str, shape: tuple[int, ...], hiding: float, graphs: dict[str, StepGraph]
) -> None:
    graph = graphs[name]
    where = placement("cuda", np.arange(math.prod(shape)).reshape(shape).tolist())
    machine = machine_for(where, "h100")
    machine = replace(machine, device=replace(machine.device, hiding=hiding))

    def seconds(plan: Plan) -> float:
        return predicted(plan).seconds

    chosen = plan_step(graph, where, "auto", machine=machine, refine=True)
    names = [" x ".join(one) for one in itertools.product(TEMPLATES, repeat=len(shape))]
    for template in (plan_step(graph, where, one, machine=machine) for one in names):
        assert seconds(chosen) <= seconds(template) * (1 + _EQUAL), template.name
    for pipeline in every_pipeline(graph, where, machine):
        assert seconds(chosen) * (1 - _MARGIN) <= seconds(pipeline), pipeline.name
