"""Every model on every layout against the one-device reference, dropout on, SGD and AdamW."""

from __future__ import annotations

import itertools

import pytest

from .harness import LAYOUTS, Cases, assert_exact
from .models import KINDS, batch_of


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


#: Deviations under bfloat16 products, whose rounding unit is 2 ** -8; relative to the same scales.
BFLOAT16 = {"result": 2e-2, "gradient": 2e-2, "parameter": 1e-2, "buffer": 2e-2, "optimizer state": 2e-2}


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "resnet", "dlrm"])
@pytest.mark.parametrize("layout", ["data-2", "zero-2", "tensor-2", "data-x-tensor"])
def test_autocast_equals_one_device_within_its_rounding(cases: Cases, name: str, layout: str) -> None:
    with cases(name, "sgd", autocast=True).under(LAYOUTS[layout]) as step:
        report = step.verify(batch_of(KINDS[name]), steps=3)
        assert_exact(report, BFLOAT16)
        assert "bfloat16" in step.text("graph")
