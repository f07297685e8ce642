"""Pipelines of every model against one device, on simulated ranks, alone and with other axes."""

from __future__ import annotations

import pytest

from monoflow.sbp.layout import At
from tests.parity.harness import Cases, Layout, assert_exact
from tests.parity.models import KINDS, batch_of

_SQUARE = ([0, 1], [2, 3])
_CUBE = (([0, 1], [2, 3]), ([4, 5], [6, 7]))
PIPELINES = {
    "pipeline-2": Layout((0, 1), "pipeline"),
    "pipeline-4": Layout((0, 1, 2, 3), "pipeline"),
    "pipeline-x-data": Layout(_SQUARE, "pipeline x data"),
    "pipeline-x-tensor": Layout(_SQUARE, "pipeline x tensor"),
    "zero-x-pipeline": Layout(_SQUARE, "zero x pipeline"),
    "data-x-tensor-x-pipeline": Layout(_CUBE, "data x tensor x pipeline"),
}
#: Every model on some layouts, every layout with some models; optimizers take turns.
CASES = [
    ("gpt2", "adamw", "pipeline-2"),
    ("gpt2", "sgd", "pipeline-x-data"),
    ("gpt2", "sgd", "data-x-tensor-x-pipeline"),
    ("llama", "adamw", "pipeline-4"),
    ("llama", "adamw", "pipeline-x-data"),
    ("t5", "adamw", "pipeline-4"),
    ("t5", "sgd", "pipeline-x-tensor"),
    ("bert", "sgd", "pipeline-2"),
    ("bert", "adamw", "zero-x-pipeline"),
    ("vit", "adamw", "pipeline-4"),
    ("vit", "adamw", "pipeline-x-tensor"),
    ("tied", "adamw", "pipeline-4"),
    ("frozen", "sgd", "pipeline-2"),
    ("resnet", "sgd", "pipeline-x-data"),
    ("dlrm", "adamw", "pipeline-2"),
]


@pytest.mark.parametrize(("name", "optimizer", "layout"), CASES)
def test_equals_one_device(cases: Cases, name: str, optimizer: str, layout: str) -> None:
    """Dropout is on, and the gradients' common norm is clipped."""
    where = PIPELINES[layout]
    with cases(name, optimizer).under(where) as step:
        assert_exact(step.verify(batch_of(KINDS[name]), steps=2))
        plan = step.plan
    (axis,) = [number for number, one in enumerate(where.plan.split(" x ")) if one == "pipeline"]
    stages = {one for axes in plan.signatures.values() for one in axes[axis].outputs}
    assert {At(stage) for stage in range(where.placement.shape[axis])} <= stages, "a stage does nothing"
