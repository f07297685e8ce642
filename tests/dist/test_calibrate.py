"""Calibration by real ranks: what is measured, that all agree on it, and that it is kept and found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from monoflow.boxing.curve import Curve
from monoflow.boxing.route import LinkCost
from monoflow.cli import whole_steps
from monoflow.cli.measure import MOVES, Extent, measure
from monoflow.cli.probes import PROBES
from monoflow.mesh import placement
from monoflow.plan.calibration import Calibration, Setting, load_calibration
from monoflow.plan.cost import Device, op_seconds
from monoflow.plan.devices import machine_for
from monoflow.plan.op_class import OpClass
from monoflow.plan.predict import predict
from monoflow.sbp.signature import TensorMeta
from monoflow.step.decorator import Step
from tests.conftest import RunCli, RunRanks

aten = torch.ops.aten
SHORT = Extent(
    probes=[probe for probe in PROBES if probe.op in (aten.add.Tensor, aten.mm.default)],
    sizes=(1 << 10, 1 << 14),
    budget=1e-3,
    spread=1 << 20,
    steps=0.1,
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
    assert found.computing != 1.0 and found.moving != 1.0


def with_steps_that_take(factors: list[tuple[float, float]]) -> list[Calibration]:
    """A made-up calibration by steps that compute and move so many times longer than it says."""
    setting = replace(Setting.here("cpu", 2), num_ranks=2)
    device = Device("made up", {"float32": 1e9}, 1e9, 1e-6, 1 << 30, {"stream": Curve(((1.0, 1e-10),))}, 0.5)
    plain = Calibration(setting, device, {2: LinkCost(1e-2, 1e-6)})

    def timed(step: Step, batch: torch.Tensor, _: float) -> float:
        plan = step.compile(batch)
        return predict(plan, plain.scaled(*times).machine(plan.placement.shape)).seconds

    whole_steps._timed = timed
    found = []
    for times in factors:
        found.append(whole_steps.with_whole_steps(plain, 0.0))
    return found


def test_seconds_are_those_that_whole_steps_take(run_ranks: RunRanks) -> None:
    given = [(1.5, 0.7), (9.0, 1.0)]
    expected = [(1.5, 0.7), (4.0, 4.0)]  # within bounds
    for each in run_ranks(2, with_steps_that_take, given):
        for found, wanted in zip(each, expected, strict=True):
            assert (found.computing, found.moving) == pytest.approx(wanted, rel=3e-3)
            assert found.device.flops["float32"] == pytest.approx(1e9 / found.computing)
            assert found.device.launch == pytest.approx(1e-6 * found.computing)
            assert found.device.curves["stream"].points == ((1.0, pytest.approx(1e-10 * found.computing)),)
            assert found.links[2].seconds("all_gather", 10**6) == pytest.approx(found.moving * (1e-2 + 1.0))


def test_one_rank_measures_every_class() -> None:
    found = measure("cpu", Extent(budget=1e-4, spread=1 << 16, steps=0.0))
    assert found.links == {} and found.computing == found.moving == 1.0
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
