"""`monoflow plan`: scripts run up to their first step without weights; what is asked and what is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import monoflow as flow
from monoflow.cli.plan import Request, parse_mesh, plan
from monoflow.cli.script import first_step
from monoflow.cli.weightless import weightless
from monoflow.config import parse_memory
from monoflow.errors import FlowError, LayoutError, PlacementError, PlanError
from tests.conftest import ROOT, RunCli

HEAD = """
import sys
import torch
import monoflow as flow
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)

@flow.graph(model, optimizer, plan="zero")
def train_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


def script(folder: Path, body: str, head: str = HEAD) -> str:
    path = folder / "train.py"
    path.write_text(head + body)
    return str(path)


def planned(request: Request) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    assert plan(request, console) == 0
    return console.file.getvalue()  # type: ignore[attr-defined]


# --- without weights --------------------------------------------------------------------------------


def test_modules_hold_no_weights_and_keep_their_ties() -> None:
    with weightless():
        first, tied = nn.Linear(4, 4), nn.Linear(4, 4)
        own = nn.Parameter(torch.ones(3))
        holder = nn.Module()
        holder.own = own
        holder.again = own
        tied.weight = first.weight
        norm = nn.BatchNorm1d(4)
    assert first.weight.device.type == "meta" and tied.weight is first.weight
    assert holder.own is holder.again is own and own.device.type == "meta" and own.shape == (3,)
    assert isinstance(own, nn.Parameter) and own.requires_grad
    assert norm.running_mean is not None and norm.running_mean.tolist() == [0.0] * 4  # buffers are real
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_every_device_is_the_cpu_and_meta_stays() -> None:
    with weightless() as end:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        assert model.to("cuda") is model and model.cuda() is model
        model.to(torch.device("cuda", 1), torch.bfloat16)
        weight = model[0].weight
        assert (weight.device.type, weight.dtype) == ("meta", torch.bfloat16)
        assert torch.ones(2, device="cuda").tolist() == [1.0, 1.0]
        moved = torch.arange(2).to("cuda", non_blocking=True)
        assert (moved.device.type, moved.tolist()) == ("cpu", [0, 1])
        assert torch.ones(2).to(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
        assert torch.ones(2, device="meta").device.type == "meta"
        assert torch.ones(2).to("meta").device.type == "meta"
        end()
        assert nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"


def test_initial_values_are_dropped_however_they_come() -> None:
    with weightless():
        layer = nn.Linear(3, 3)
        layer.weight.data = torch.ones(3, 3)
        layer.weight.data[0] = torch.zeros(3)
        nn.init.orthogonal_(layer.weight)
        layer.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)})
        layer.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, assign=True)
    assert {param.device.type for param in layer.parameters()} == {"meta"}


def test_names_and_flags_of_parameters_stay() -> None:
    with weightless():
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        frozen.note = "kept"  # type: ignore[attr-defined]
        holder = nn.Module()
        holder.frozen = frozen
    assert not frozen.requires_grad and frozen.note == "kept"  # type: ignore[attr-defined]


# --- the first step ---------------------------------------------------------------------------------


def test_a_script_runs_up_to_its_first_step(tmp_path: Path) -> None:
    body = """
assert schedule.get_last_lr() == [1e-3] and __name__ == "__main__"
train_step(torch.ones(int(sys.argv[1]), 64))
raise AssertionError("nothing runs after it")
"""
    found = first_step(script(tmp_path, body), ["24"], parse_mesh("2x4", "cuda"))
    assert found.plan == "zero" and found.pins == {}
    assert found.graph.input_of["batch.0"].meta.shape == (24, 64)
    assert found.graph.input_of["0.weight"].meta.shape == (256, 64)
    assert "0.weight:exp_avg" in found.graph.input_of


def test_a_script_written_for_another_device_is_planned_here(tmp_path: Path) -> None:
    body = """
device = torch.device("cuda")
model.to(device)
mean = torch.zeros(64, device="cuda")

@flow.graph(model, optimizer)
def mixed_step(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x.to("cuda", non_blocking=True) - mean).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

mixed_step(torch.ones(8, 64).to(next(model.parameters()).device))
"""
    graph = first_step(script(tmp_path, body), [], parse_mesh("2", "cuda")).graph
    products = [node for node in graph.calls() if node.target is torch.ops.aten.addmm.default]
    assert products and {node.meta["val"].dtype for node in products} == {torch.bfloat16}
    assert {node.meta["val"].device.type for node in products} == {"cpu"}


def test_pins_are_for_the_mesh_that_is_planned(tmp_path: Path) -> None:
    body = 'train_step.pin("0.weight", "(B, S(1))")\ntrain_step(torch.ones(8, 64))'
    found = first_step(script(tmp_path, body), [], parse_mesh("2x4", "cuda"))
    assert found.pins == {"0.weight": (flow.sbp.broadcast, flow.sbp.split(1))}
    with pytest.raises(LayoutError, match=r"gives 2 SBPs .* the placement has 1 axes"):
        first_step(script(tmp_path, body), [], parse_mesh("8", "cuda"))


def test_a_script_that_catches_everything_is_planned_all_the_same(tmp_path: Path) -> None:
    body = "try:\n    train_step(torch.ones(8, 64))\nexcept BaseException:\n    print('caught')"
    assert first_step(script(tmp_path, body), [], parse_mesh("2", "cuda")).graph.name == "train_step"


def test_a_script_without_a_step_says_so(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"train\.py ended without calling a step"):
        first_step(script(tmp_path, ""), [], parse_mesh("2", "cuda"))
    with pytest.raises(FlowError, match=r"no script 'nowhere.py'"):
        first_step("nowhere.py", [], parse_mesh("2", "cuda"))


def test_compiling_or_verifying_is_a_call_too(tmp_path: Path) -> None:
    for call in ("compile", "verify"):
        found = first_step(
            script(tmp_path, f"train_step.{call}(torch.ones(8, 64))"), [], parse_mesh("2", "cuda")
        )
        assert found.graph.input_of["batch.0"].meta.shape == (8, 64)


# --- the command ------------------------------------------------------------------------------------


def test_it_plans_for_a_cluster_from_here(tmp_path: Path) -> None:
    path = script(tmp_path, "train_step(torch.ones(256, 64))")
    data, saved = tmp_path / "out.json", tmp_path / "plan.json"
    shown = planned(
        Request(path, (), "h100", "16x8", memory="1MB", plan="data x tensor", json=data, save=saved)
    )
    assert "plan 'data x tensor' on 16 x 8 of NVIDIA H100 SXM 80 GB" in shown
    found = json.loads(data.read_text())
    assert found["mesh"] == {"axis0": 16, "axis1": 8} and found["limit_bytes"] == 10**6
    weights = {row["pattern"]: row for row in found["parameters"] if row["pattern"].endswith("weight")}
    assert weights["*.weight"]["num_bytes"] == 256 * 64 * 4
    layouts = {row["layout"] for row in found["parameters"] if row["pattern"] == "*.weight"}
    assert layouts == {"(B, S(0))", "(B, S(1))"}
    predicted = found["predicted"]
    assert predicted["seconds"] > 0 and set(predicted["sent"]) == {"axis0", "axis1"}
    assert sum(predicted["peak_split"].values()) == predicted["peak_bytes"]
    assert found["compared"]["data x tensor"] == {
        "seconds": predicted["seconds"],
        "peak_bytes": predicted["peak_bytes"],
    }
    assert json.loads(saved.read_text())["name"] == "data x tensor"


def test_a_plan_that_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    path = script(tmp_path, "train_step(torch.ones(256, 64))")
    request = Request(path, (), "a100", "2", memory="10kB", plan="data", compare=False)
    assert "more than 10 kB" in planned(request)


def test_templates_are_compared(tmp_path: Path) -> None:
    path = script(tmp_path, "train_step(torch.ones(256, 64))")
    data = tmp_path / "out.json"
    planned(Request(path, (), "h200", "4", json=data))
    found = json.loads(data.read_text())
    assert found["plan"] == "zero"  # the script's own
    assert {"data", "zero", "tensor"} <= set(found["compared"])
    assert found["compared"]["zero"]["peak_bytes"] < found["compared"]["data"]["peak_bytes"]


def test_the_plan_that_is_searched_beats_every_template(tmp_path: Path) -> None:
    path = script(tmp_path, "train_step(torch.ones(256, 64))")
    data = tmp_path / "out.json"
    shown = planned(Request(path, (), "h100", "2x2", plan="auto", json=data))
    assert "by these prices no plan is more than" in shown
    found = json.loads(data.read_text())
    own = found["compared"].pop("auto")["seconds"]
    assert own == found["predicted"]["seconds"] and found["search"]["gap"] >= 0
    assert {"data", "zero", "tensor", "data x tensor", "tensor x zero"} <= set(found["compared"])
    assert own <= min(one["seconds"] for one in found["compared"].values()) * (1 + 1e-9)


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    path = script(tmp_path, "train_step(torch.ones(256, 64))")
    with pytest.raises(PlanError, match="no table of a device 'tpu'; there are a100-40gb"):
        planned(Request(path, (), "tpu"))
    with pytest.raises(PlacementError, match=r"--mesh '16x' is not a mesh; write .* 16x8"):
        planned(Request(path, (), "h100", "16x"))
    with pytest.raises(FlowError, match="--memory '80' is not a size of memory"):
        planned(Request(path, (), "h100", "8", memory="80"))
    with pytest.raises(PlanError, match="no plan named 'best'"):
        planned(Request(path, (), "h100", "8", plan="best"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8), ("7B", 7), ("2TB", 2 * 10**12)],
)
def test_sizes_of_memory(text: str, expected: int) -> None:
    assert parse_memory(text, "--memory ") == expected


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-3GB", "80 GB each", "80XB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(FlowError, match="is not a size of memory"):
        parse_memory(text, "--memory ")


def test_meshes() -> None:
    grid = parse_mesh("2X3", "cuda")
    assert (grid.shape, grid.ranks, grid.device_type) == ((2, 3), (0, 1, 2, 3, 4, 5), "cuda")
    assert parse_mesh("4", "cpu").axes == ("data",)
    for text in ("", "0x2", "2x-1", "axb", "2.5"):
        with pytest.raises(PlacementError, match="is not a mesh"):
            parse_mesh(text, "cuda")


def test_the_program_takes_the_scripts_arguments(run_cli: RunCli, tmp_path: Path) -> None:
    path = ROOT / "examples" / "recsys" / "train.py"
    done = run_cli(
        "plan", path, "--device", "h100", "--mesh", "16x8", "--memory", "80GB", "--no-compare", "--",
        "--plan", "zero", "--batch", "256",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plan 'zero' on 16 x 8 of NVIDIA H100 SXM 80 GB" in done.stdout
    assert "tables.*.weight" in done.stdout


def test_a_script_that_fails_shows_its_own_traceback_only(run_cli: RunCli, tmp_path: Path) -> None:
    path = script(tmp_path, "def deep():\n    raise KeyError('mine')\ndeep()")
    done = run_cli("plan", path, "--device", "h100", "--mesh", "8")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "KeyError: 'mine'"
    assert {line.split('"')[1] for line in lines if line.startswith("  File")} == {path}
