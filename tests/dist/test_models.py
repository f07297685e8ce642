"""Unmodified Hugging Face models on real ranks: the numbers of one device on every kind of layout."""

from __future__ import annotations

import pytest

import monoflow as flow
from tests.conftest import RunRanks
from tests.parity.models import KINDS, batch_of, training

#: What each kind of tensor may deviate by (see Report for relative to what).
TOLERANCE = {
    "result": 1e-5, "gradient": 1e-5, "parameter": 1e-4, "buffer": 1e-5, "optimizer state": 1e-4,
}  # fmt: skip


def deviations(name: str, plan: str, num_ranks: int) -> dict[str, tuple[float, str]]:
    grid = [[0, 1], [2, 3]] if num_ranks == 4 else [0, 1]
    model, optimizer, function = training(name, "adamw")
    step = flow.graph(model, optimizer, placement=flow.placement("cpu", grid), plan=plan)(function)
    report = step.verify(batch_of(KINDS[name]), steps=3)
    assert all(one.judged > 0 for one in report.deviations), report.text()
    return {one.kind: (one.largest, one.worst) for one in report.deviations}


@pytest.mark.parametrize(
    ("name", "plan", "num_ranks"),
    [
        ("gpt2", "tensor", 2),
        ("llama", "zero", 2),
        ("bert", "data", 2),
        ("vit", "tensor", 2),
        ("llama", "data x tensor", 4),
        ("gpt2", "zero x tensor", 4),
    ],
)
def test_equals_one_device(run_ranks: RunRanks, name: str, plan: str, num_ranks: int) -> None:
    for found in run_ranks(num_ranks, deviations, name, plan, num_ranks):
        assert {"result", "gradient", "parameter", "optimizer state"} <= found.keys()
        for kind, (largest, worst) in found.items():
            assert largest <= TOLERANCE[kind], (kind, largest, worst)
