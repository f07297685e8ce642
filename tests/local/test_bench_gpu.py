"""bench/gpu.py runs on a CPU too, in small; on a GPU it is run by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("gpu")
    monkeypatch.delitem(module.CONTENDERS, "torch.compile")  # a minute of compiling
    return module


def test_losses_are_those_of_eager(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(typer.Exit) as done:
        gpu.main(tiny=True, rounds=1, out=tmp_path / "rows.json")
    assert done.value.exit_code == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["model"], row["contender"]) for row in rows] == [
        (model, contender)
        for model in ("tiny GPT-2", "tiny Llama")
        for contender in ("torch eager", "monoflow")
    ]
    assert all(row["deviation"] < 1e-3 and row["step"] > 0 for row in rows)
    assert "tokens/s" in capsys.readouterr().out


def test_a_wrong_loss_fails(gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def wrong(model: Any, optimizer: Any, device: str) -> Any:
        step = gpu.eager(model, optimizer, device)
        return lambda batch: step(batch) * 1.1

    monkeypatch.setitem(gpu.CONTENDERS, "monoflow", wrong)
    with pytest.raises(typer.Exit) as done:
        gpu.main(tiny=True, rounds=1)
    assert done.value.exit_code == 1
    assert "monoflow on tiny GPT-2: a loss is" in capsys.readouterr().out


def test_large_models_want_a_gpu(gpu: Any) -> None:
    with pytest.raises(typer.BadParameter, match="no GPU"):
        gpu.main()


def test_flops_of_gpt2_are_six_a_weight_and_attention(gpu: Any) -> None:
    shape = gpu.SHAPES["GPT-2 124M"]
    # 12 layers of 12 width^2 weights, the head, and 12 * layers * width * context of attention.
    weights = 12 * 12 * 768**2 + 50304 * 768
    counted = shape.flops(12 * (12 * 768**2 + 13 * 768) + 50304 * 768 + 1024 * 768 + 2 * 768, 1)
    assert counted == pytest.approx(6 * weights + 12 * 12 * 768 * 1024, rel=2e-3)
