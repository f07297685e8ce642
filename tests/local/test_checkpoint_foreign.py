"""What other programs write and read: Hugging Face, state dicts, torch.distributed.checkpoint; commands."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import monoflow as flow
from monoflow.checkpoint import open_source
from monoflow.checkpoint.convert import convert
from monoflow.cli.app import app
from monoflow.errors import CheckpointError, FlowError
from monoflow.step import Step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # it shall be


def build(model: nn.Module | None = None) -> Step:
    model = model or nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def trained() -> Step:
    step = build()
    step.eager(torch.randn(5, 3))
    return step


def model_of(step: Step) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in step.subject.models[0].state_dict().items()}


def moments_of(step: Step) -> list[Tensor]:
    (optimizer,) = step.subject.optimizers
    return [
        optimizer.state[p][key]
        for p in step.subject.params.values()
        for key in ("step", "exp_avg", "exp_avg_sq")
    ]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(torch.equal, a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- Hugging Face ----------------------------------------------------------------------------------


def gpt() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def test_a_directory_opens_in_transformers(tmp_path: Path) -> None:
    model = gpt()
    flow.save(tmp_path / "a", build(model))
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "a")
    assert equal(again.state_dict(), model.state_dict())
    assert again.lm_head.weight is again.transformer.wte.weight


@pytest.mark.parametrize("shard_size", ["1GB", "2KB"])
def test_what_transformers_wrote_loads(shard_size: str, tmp_path: Path) -> None:
    model = gpt()
    model.save_pretrained(tmp_path / "a", max_shard_size=shard_size)
    assert (tmp_path / "a" / "model.safetensors").exists() == (shard_size == "1GB")
    step = build(gpt())
    flow.load(tmp_path / "a", step)
    assert equal(model_of(step), model.state_dict())


# --- files -----------------------------------------------------------------------------------------


def test_a_safetensors_file_may_have_another_floating_dtype(tmp_path: Path) -> None:
    state = model_of(trained())
    save_file(
        {name: x.bfloat16() if x.is_floating_point() else x for name, x in state.items()},
        tmp_path / "a.safetensors",
    )
    step = build()
    flow.load(tmp_path / "a.safetensors", step)
    assert torch.equal(step.subject.params["0.weight"], state["0.weight"].bfloat16().float())
    os.truncate(tmp_path / "a.safetensors", 400)
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors has 400 bytes, its head says \d+|was cut short at 400"
    ):
        flow.load(tmp_path / "a.safetensors", step)


@pytest.mark.parametrize("form", ["plain", "wrapped", "old"])
def test_a_pt_file_loads(form: str, tmp_path: Path) -> None:
    state = model_of(trained())
    content: Any = (
        state if form != "wrapped" else {"model": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}
    )
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=form != "old")
    step = build()
    flow.load(tmp_path / "a.pt", step)
    assert equal(model_of(step), state)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    torch.save({"0.weight": Evil(mark)}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match=r"a\.pt holds more than tensors and plain values.*would run code"
    ):
        flow.load(tmp_path / "a.pt", build())
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(CheckpointError, match=r"\.metadata is not what .* refused: it names posix\.mkdir"):
        flow.load(folder, build())
    dcp_save(
        {"model": {"0.weight": torch.ones(2)}, "step": Evil(mark)}, checkpoint_id=tmp_path / "b", no_dist=True
    )
    with pytest.raises(CheckpointError, match="step is damaged, or more than a tensor"):
        flow.load(tmp_path / "b", build())
    assert not mark.exists()
    with pytest.raises(CheckpointError, match="holds a list, no state dict"):
        torch.save([1], tmp_path / "c.pt")
        open_source(tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: no checkpoint\.json"):
        open_source(tmp_path / "nothing")


# --- torch.distributed.checkpoint ------------------------------------------------------------------


def test_what_torch_distributed_wrote_loads(tmp_path: Path) -> None:
    step = trained()
    (model,), (optimizer,) = step.subject.models, step.subject.optimizers
    optimizer.param_groups[0]["lr"] = 0.03
    states, moments = get_state_dict(model, optimizer)
    dcp_save({"model": states, "optim": moments, "step": 7}, checkpoint_id=tmp_path / "a", no_dist=True)
    again = build()
    assert flow.load(tmp_path / "a", again).step == 7
    assert equal(model_of(again), model_of(step))
    torch.manual_seed(2)
    expected = step.eager(torch.ones(5, 3))
    torch.manual_seed(2)
    assert torch.equal(again.eager(torch.ones(5, 3)), expected)  # the optimizer's state begins here
    assert equal(moments_of(again), moments_of(step))
    assert again.subject.optimizers[0].param_groups[0]["lr"] == 0.03


def test_a_model_alone_in_chunks(tmp_path: Path) -> None:
    """Written flat, as several ranks write it: each rank a file, each tensor in chunks."""
    step = trained()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp_save(
        dict(model_of(step)), storage_writer=FileSystemWriter(tmp_path / "a"), planner=planner, no_dist=True
    )
    again = build()
    flow.load(tmp_path / "a", again)
    assert equal(model_of(again), model_of(step))
    data = next((tmp_path / "a").glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 900)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*(ends at|damaged)"):
        flow.load(tmp_path / "a", again)


def test_torch_distributed_reads_what_is_exported(tmp_path: Path) -> None:
    step = trained()
    flow.save(tmp_path / "a", step)
    convert(open_source(tmp_path / "a"), tmp_path / "b", "dcp")
    other = trained()
    (model,), (optimizer,) = other.subject.models, other.subject.optimizers
    states, moments = get_state_dict(model, optimizer)
    into = {"model": states, "optim": moments}
    dcp_load(into, storage_reader=FileSystemReader(tmp_path / "b"), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    assert equal(model_of(other), model_of(step))
    assert equal(moments_of(other), moments_of(step))


# --- the commands ----------------------------------------------------------------------------------


def call(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    if isinstance(result.exception, FlowError):
        return 1, str(result.exception)  # as main() prints it
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_ls(tmp_path: Path) -> None:
    step = trained()
    flow.save(tmp_path / "a", step, extra={"note": "x"})
    code, text = call("ls", tmp_path / "a")
    assert code == 0 and "optimizer:0.weight:exp_avg" in text and "[4, 3]" in text
    assert "step: 1" in text and "extra: ['note']" in text
    code, text = call("ls", tmp_path / "a", "--json")
    found = json.loads(text)
    assert found["tensors"]["0.weight"] == {"dtype": "float32", "shape": [4, 3], "bytes": 48}
    with flow.checkpointer(tmp_path / "run", step, every=1) as series:
        series.after_step()
    code, text = call("ls", tmp_path / "run", "--json")
    assert [one["step"] for one in json.loads(text)] == [1]
    assert "step-0000000001" in call("ls", tmp_path / "run")[1]
    assert call("ls", tmp_path / "nothing")[0] == 1


def test_verify(tmp_path: Path) -> None:
    flow.save(tmp_path / "step-0000000001", trained())
    assert call("verify", tmp_path / "step-0000000001") == (
        0,
        f"{tmp_path}/step-0000000001: {len(open_source(tmp_path).tensors)} tensors, "
        "every checksum is right\n",
    )
    data = bytearray((tmp_path / "step-0000000001" / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-0000000001" / "state.safetensors").write_bytes(data)
    code, text = call("verify", tmp_path)
    assert code == 1 and "state.safetensors: " in text and "is damaged: its checksum is" in text
    assert len(json.loads(call("verify", tmp_path, "--json")[1])[f"{tmp_path}/step-0000000001"]) == 1


def test_convert_and_diff(tmp_path: Path) -> None:
    step = trained()
    a, b = tmp_path / "a", tmp_path / "b"
    flow.save(a, step)
    assert call("convert", a, b) == (0, f"{b}: monoflow\n")
    assert call("diff", a, b) == (0, "the same, bit for bit\n")
    assert call("convert", a, tmp_path / "m.safetensors")[0] == 0
    assert equal(load_file(tmp_path / "m.safetensors"), model_of(step))
    assert call("convert", a, tmp_path / "m.pt")[0] == 0
    assert equal(torch.load(tmp_path / "m.pt", weights_only=True), model_of(step))
    code, text = call("convert", a, tmp_path / "m.pt")
    assert code == 1 and "m.pt exists; it is not replaced" in text
    assert (
        "'tar' is no form; choose monoflow, safetensors, pt, dcp"
        in call("convert", a, tmp_path / "t", "--to", "tar")[1]
    )
    with torch.no_grad():
        step.subject.params["0.weight"][1, 2] += 0.5
        step.subject.params["2.bias"].fill_(float("nan"))
    flow.save(b, step)
    code, text = call("diff", a, b, "--json")
    rows = {row["name"]: row for row in json.loads(text)}
    assert code == 1 and set(rows) == {"0.weight", "2.bias"}
    assert rows["0.weight"]["num_elements"] == 1 and rows["0.weight"]["largest"] == pytest.approx(0.5)
    assert rows["2.bias"]["largest"] == "nan"
    code, text = call("diff", a, tmp_path / "m.pt")
    assert code == 1 and "optimizer:0.weight:step" in text
