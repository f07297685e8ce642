"""The examples' models as steps to measure, at sizes that a small machine runs in a fraction of a second."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.mesh import Placement
from monoflow.step import Step

EXAMPLES = Path(__file__).parents[1] / "examples"


class Case(NamedTuple):
    """A step and the global batch that it is called with."""

    step: Step
    batch: dict[str, torch.Tensor]


def gpt(plan: str, placement: Placement) -> Case:
    """The byte-level GPT: 3.3 M parameters, 16 windows of 128 bytes, AdamW, clipped gradients."""
    code = load_example("gpt/model.py")
    model = code.build(code.Shape("own", 4, 256, 4, 128, 0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 256, (16, 128))
    return _case(
        model, optimizer, lambda b: model(**b).loss, plan, placement, {"input_ids": ids, "labels": ids}, True
    )


def vision(plan: str, placement: Placement) -> Case:
    """The ResNet with batch norm, 256 images, SGD with momentum."""
    model = load_example("vision/train.py").ResNet(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    batch = {"images": torch.randn(256, 1, 8, 8), "labels": torch.randint(0, 10, (256,))}
    return _case(
        model, optimizer, lambda b: F.cross_entropy(model(b["images"]), b["labels"]), plan, placement, batch
    )


def recsys(plan: str, placement: Placement) -> Case:
    """The click model with embedding tables, 8,192 samples, Adam."""
    code = load_example("recsys/train.py")
    model = code.ClickModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch, _ = code.generate(8192, 0)

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["categories"]), batch["clicks"])

    return _case(model, optimizer, loss, plan, placement, batch)


CASES: Mapping[str, Callable[[str, Placement], Case]] = {"gpt": gpt, "vision": vision, "recsys": recsys}


def _case(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], torch.Tensor],
    plan: str,
    placement: Placement,
    batch: dict[str, torch.Tensor],
    clip: bool = False,
) -> Case:
    @flow.graph(model, optimizer, plan=plan, placement=placement)
    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(train_step, batch)


def load_example(path: str) -> ModuleType:
    """An example's file as a module."""
    name = path.replace("/", "_").removesuffix(".py")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
