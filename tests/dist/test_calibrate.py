"""Calibration by real ranks: what is measured, that all agree on it, and that it is kept and found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from monoflow.cli.measure import MOVES, Extent, measure
from monoflow.cli.probes import PROBES
from monoflow.mesh import placement
from monoflow.plan.calibration import Calibration, Setting, load_calibration
from monoflow.plan.cost import op_seconds
from monoflow.plan.devices import machine_for
from monoflow.plan.op_class import OpClass
from monoflow.sbp.signature import TensorMeta
from tests.conftest import RunCli, RunRanks

aten = torch.ops.aten
SHORT = Extent(
    probes=[probe for probe in PROBES if probe.op in (aten.add.Tensor, aten.mm.default)],
    sizes=(1 << 10, 1 << 14),
    budget=1e-3,
    spread=1 << 20,
)


def measured(folder: str) -> str:
    path = Path(folder, f"{dist.get_rank()}.json")
    measure("cpu", SHORT).save(path)
    return path.read_text()


def test_ranks_measure_together_and_agree(run_ranks: RunRanks, tmp_path: Path) -> None:
    results = run_ranks(4, measured, str(tmp_path))
    assert len(set(results)) == 1
    found = Calibration.read(tmp_path / "0.json")
    assert found.setting.num_ranks == 4
    assert set(found.links) == {2, 4}
    for size, link in found.links.items():
        assert {kind for kind, _ in link.curves} == set(MOVES)
        sent = [amount for amount, _ in dict(link.curves)["all_reduce"].points]
        assert sent == [2 * (size - 1) / size * numel * 4 for numel in SHORT.sizes]
        assert link.seconds("all_gather", 10**8) > link.seconds("all_gather", 10**6) > 0
    products = {f"product/{one}" for one in ("float32", "bfloat16", "float64")}
    assert set(found.device.curves) == {"stream", "factors", *products}
    assert 0 <= found.device.hiding <= 1


def test_one_rank_measures_every_class() -> None:
    found = measure("cpu", Extent(budget=1e-4, spread=1 << 16))
    assert found.links == {}
    kinds = {key.partition("/")[0] for key in found.device.curves}
    assert kinds == set(OpClass)
    for key, curve in found.device.curves.items():
        assert len(curve.points) > 1 or key == OpClass.FREE, key
    large, small = TensorMeta((1024, 1024), torch.float32), TensorMeta((8, 8), torch.float32)
    slow = op_seconds(aten.mm.default, [large, large], [large], found.device)
    assert slow > 10 * op_seconds(aten.mm.default, [small, small], [small], found.device)


def test_the_command_keeps_what_the_planner_finds(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONOFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr("monoflow.plan.calibration._num_threads", lambda num_ranks: 1)  # as the ranks have
    done = run_cli("calibrate", "-n", "2", timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = Path(tmp_path, "calibration").iterdir()
    for words in ("2 ranks of 1 threads", "product/float32", "all_reduce", "GFLOP/s", path.name):
        assert words in done.stdout.replace("\n", "")
    found = load_calibration("cpu", 2)
    assert found is not None and found.setting == Setting.here("cpu", 2)
    assert machine_for(placement("cpu", [0, 1])).links == (found.links[2],)


def test_no_ranks_are_refused(run_cli: RunCli) -> None:
    done = run_cli("calibrate", "-n", "0")
    assert (done.returncode, done.stderr) == (1, "monoflow: -n 0: the number of ranks must be at least 1\n")
