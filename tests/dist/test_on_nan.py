"""Refused steps on real ranks, whose lanes run beside the program that calls them."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import monoflow as flow
from monoflow.errors import NonFiniteError
from tests.conftest import RunRanks
from tests.local.test_on_nan import LINE, batch, build, state_of


def whole_state(model: Any, optimizer: Any) -> dict[str, bytes]:
    flow.synchronize()
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).numpy().tobytes()
        for name, value in state_of(model, optimizer).items()
    }


def refuse(plan: str) -> dict[str, Any]:
    """One rank: a step that is refused, seen first by rank 0 alone, and one that is skipped."""
    rank = dist.get_rank()
    step, model, optimizer = build(plan=plan)
    step(batch(0))
    before = whole_state(model, optimizer)
    loss = step(batch(1, bad=True))
    text = ""
    try:
        if rank == 0:  # the others meet it at their next call
            loss.item()
        step(batch(2))
    except NonFiniteError as error:
        text = str(error)
    same = whole_state(model, optimizer) == before
    last = step(batch(2)).item()
    step, model, optimizer = build(plan=plan, on_nan="skip")
    losses = [step(batch(seed, bad=seed == 1)).item() for seed in (0, 1, 2)]
    return {"text": text, "same": same, "last": last, "losses": losses, "skipped": step.num_skipped}


def test_all_ranks_refuse_a_step_together(run_ranks: RunRanks) -> None:
    found = run_ranks(2, refuse, "zero")
    first = found[0]
    assert f"test_on_nan.py:{LINE}" in first["text"] and "op log" in first["text"], first["text"]
    for one in found:
        assert one["text"] == first["text"] and one["same"] and one["skipped"] == 1
        assert math.isnan(one["losses"][1])
        assert one["losses"][2] == one["last"] == first["last"]
    assert math.isfinite(first["last"])
