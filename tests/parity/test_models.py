"""Every model on every layout against the one-device reference, dropout on, SGD and AdamW."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from .harness import LAYOUTS, Cases, assert_exact
from .models import KINDS, batch_of, training


@pytest.mark.parametrize(
    ("name", "optimizer", "layout"), list(itertools.product(KINDS, ("sgd", "adamw"), LAYOUTS))
)
def test_equals_one_device(cases: Cases, name: str, optimizer: str, layout: str) -> None:
    with cases(name, optimizer).under(LAYOUTS[layout]) as step:
        report = step.verify(batch_of(KINDS[name]), steps=3)
        assert_exact(report)
        assert report["gradient"].judged > 0 and report["optimizer state"].judged > 0
        noise = {one.kind: one.left_out / (one.left_out + one.judged) for one in report.deviations}
        assert noise["parameter"] < 0.25, report.text()


#: What may deviate under bfloat16 products, whose rounding unit is 2 ** -8. For gradients see `rounding`.
BFLOAT16 = {"result": 2e-2, "parameter": 1e-2, "buffer": 2e-2}


@functools.cache
def rounding(name: str, steps: int) -> float:
    """How far eager bfloat16 gradients are from eager float32 ones, relative to the largest gradient."""

    def gradients(autocast: bool) -> list[dict[str, torch.Tensor]]:
        model, optimizer, function = training(name, "sgd", 0.0, autocast)
        found: list[dict[str, torch.Tensor]] = []
        named = dict(model.named_parameters())

        def note(*_: Any) -> None:
            found.append({k: p.grad.detach().clone() for k, p in named.items() if p.grad is not None})

        optimizer.register_step_pre_hook(note)
        for _ in range(steps):
            function(batch_of(KINDS[name]))
        return found

    worst = 0.0
    for low, full in zip(gradients(True), gradients(False), strict=True):
        scale = max(value.abs().max() for value in full.values())
        worst = max(worst, *(float((low[key] - value).abs().max() / scale) for key, value in full.items()))
    return worst


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "resnet", "dlrm"])
@pytest.mark.parametrize("layout", ["data-2", "zero-2", "tensor-2", "data-x-tensor"])
def test_autocast_equals_one_device_within_its_rounding(cases: Cases, name: str, layout: str) -> None:
    with cases(name, "sgd", autocast=True).under(LAYOUTS[layout]) as step:
        report = step.verify(batch_of(KINDS[name]), steps=3)
        # Two runs in bfloat16 may each be off by its rounding; momentum is a sum of gradients.
        off = 2 * rounding(name, 3)
        assert_exact(report, BFLOAT16 | {"gradient": off, "optimizer state": max(2e-2, off)})
        assert "bfloat16" in step.text("graph")
