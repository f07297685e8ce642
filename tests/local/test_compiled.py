"""Steps whose tasks torch's compiler compiles, against the same steps op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.lower import compiled, kept
from monoflow.lower.building import TaskFunction

ONE = flow.placement("cpu", [0])
Batch = dict[str, torch.Tensor]


class Model(nn.Module):
    """An embedding, two equal layers with dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2)
        return self.head(x)


def training(mode: Literal["background", "ahead", "off"]) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)

    @flow.graph(model, optimizer, placement=ONE, plan="data", compile=mode)
    def step(batch: Batch) -> torch.Tensor:
        loss = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(0, 12, (3, 4), generator=generator),
        "labels": torch.randint(0, 5, (3, 4), generator=generator),
    }


def functions(step: Any) -> list[TaskFunction]:
    program = next(iter(step._require().lowered.programs.values()))
    return [task.compute for task in program.tasks if task.compute is not None]


def losses(step: Any, num: int) -> list[float]:
    torch.manual_seed(7)  # what dropout draws from
    return [step(batch()).item() for _ in range(num)]


def test_compiled_ahead_or_beside_it_trains_as_op_by_op():
    step, model = training("off")
    expected = losses(step, 4)
    ahead, other_model = training("ahead")
    assert losses(ahead, 4) == pytest.approx(expected, rel=1e-5)
    assert all(function.is_compiled for function in functions(ahead))
    codes = ahead._library.codes.values()
    assert codes and not [code.problem for code in codes if code.problem]
    for one, other in zip(other_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    beside, _ = training("background")
    torch.manual_seed(7)
    found = [beside(batch()).item() for _ in range(2)]
    for function in functions(beside):
        function._builder.join()
        assert function.is_compiled
    found += [beside(batch()).item() for _ in range(2)]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_later_run_takes_the_code_that_is_kept_and_compiles_what_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path)
    step, _ = training("ahead")
    expected = losses(step, 2)
    libraries = sorted(tmp_path.glob("*.so"))
    assert len(libraries) == len(step._library.codes)

    tried = []

    def refuse(*args: Any) -> Any:
        tried.append(args)
        raise NotImplementedError("it is to be compiled")

    monkeypatch.setattr(compiled, "compile_graph", refuse)
    later, _ = training("ahead")
    assert losses(later, 2) == expected
    assert not tried and all(code.is_compiled for code in later._library.codes.values())
    wrong = batch()
    wrong["ids"][0, 0] = 12
    with pytest.raises(IndexError, match="index 12 is out of range for 12") as caught:
        later(wrong)
    assert any("test_compiled.py" in note for note in caught.value.__notes__)

    code = libraries[0].read_bytes()
    libraries[0].unlink()  # this process has it mapped
    libraries[0].write_bytes(code[:-1])
    damaged, _ = training("ahead")
    assert losses(damaged, 2) == pytest.approx(expected, rel=1e-5)
    assert len(tried) == 1


def test_a_label_out_of_range_is_an_error_that_names_the_line_not_the_end_of_the_process():
    step, _ = training("ahead")
    losses(step, 1)
    wrong = batch()
    wrong["labels"][1, 1] = 5
    with pytest.raises(IndexError, match="index 5 is out of range for 5") as caught:
        step(wrong)
    assert any("test_compiled.py" in note for note in caught.value.__notes__)


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(flow.FlowError, match="compile='always' is none of 'background', 'ahead', 'off'"):
        flow.graph(nn.Linear(1, 1), compile="always")  # pyright: ignore[reportArgumentType]
