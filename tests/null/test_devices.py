"""Machines to plan for: shipped tables, calibrations on disk, and what is wrong with them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from monoflow.boxing.curve import Curve
from monoflow.boxing.route import LinkCost
from monoflow.errors import PlanError
from monoflow.mesh import Placement, placement
from monoflow.plan.calibration import Calibration, Setting, calibration_path, load_calibration
from monoflow.plan.cost import Device
from monoflow.plan.devices import ACHIEVED, device_of, is_within_host, machine_for
from monoflow.plan.sheets import DEVICES, LINKS


def mesh(*shape: int, device_type: str = "cuda") -> Placement:
    ranks: list = list(range(int.__mul__(*shape) if len(shape) == 2 else shape[0]))
    if len(shape) == 2:
        ranks = [ranks[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]
    return placement(device_type, ranks)


def test_tables_are_complete_and_in_their_units() -> None:
    assert {"a100", "a100-40gb", "h100", "h200", "b200"} <= set(DEVICES)
    for sheet in DEVICES.values():
        assert {"float32", "bfloat16", "float16", "float64"} <= set(sheet.flops) and sheet.source
        assert set(sheet.links.values()) <= set(LINKS) and set(sheet.links) == {"host", "network"}
        device = device_of(sheet)
        assert 1e14 < device.flops["bfloat16"] < 1e16 and device.flops["bfloat16"] > device.flops["float32"]
        assert 1e12 < device.bandwidth < 1e13 and 39e9 < device.capacity < 2e11
    h100 = device_of(DEVICES["h100"])
    assert h100.flops["bfloat16"] == pytest.approx(989e12 * ACHIEVED.flops)
    assert h100.bandwidth == pytest.approx(3.35e12 * ACHIEVED.bandwidth)
    assert h100.capacity == 80 * 10**9


def test_the_inner_axis_is_in_a_host_and_the_outer_between_hosts() -> None:
    machine = machine_for(mesh(16, 8), "h100")
    outer, inner = machine.links
    assert inner.beta == pytest.approx(1 / (450e9 * ACHIEVED.link))
    assert outer.beta == pytest.approx(1 / (50e9 * ACHIEVED.link))
    assert inner.alpha == pytest.approx(3 * 3e-6) and outer.alpha == pytest.approx(4 * 12e-6)
    assert all(is_within_host(mesh(2, 4), axis) for axis in (0, 1))
    assert not is_within_host(mesh(4, 4), 0) and is_within_host(mesh(4, 4), 1)


def test_an_axis_longer_than_a_host_is_as_slow_as_the_network() -> None:
    (only,) = machine_for(mesh(128), "h100").links
    assert only.beta == pytest.approx(1 / (50e9 * ACHIEVED.link))


def test_options_override_the_table() -> None:
    machine = machine_for(mesh(16, 8), "a100", link="pcie4", capacity=10**9)
    assert machine.device.capacity == 10**9
    assert {link.beta for link in machine.links} == {1 / (32e9 * ACHIEVED.link)}


def test_unknown_devices_and_links_are_listed() -> None:
    with pytest.raises(PlanError, match="no table of a device 'h900'; there are a100-40gb, a100, h100-pcie"):
        machine_for(mesh(8), "h900")
    with pytest.raises(PlanError, match="no table of a link 'wet string'; there are nvlink3"):
        machine_for(mesh(8), "h100", link="wet string")


# --- this machine's calibration ---------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOFLOW_CACHE", str(tmp_path))
    return tmp_path


def calibration(num_ranks: int = 4) -> Calibration:
    curves = {"stream": Curve(((10.0, 1e-6), (1e6, 1e-3))), "product/float32": Curve(((1e3, 2e-6),))}
    device = Device("this", {"float32": 5e8}, 1e9, 1e-6, 10**10, curves)
    links = {n: LinkCost(n * 1e-4, 1e-9, 0.0, (("all_gather", Curve(((8.0, 1e-4),))),)) for n in (2, 4)}
    return Calibration(Setting.here("cpu", num_ranks), device, links)


def test_a_calibration_comes_back_as_it_was(cache: Path) -> None:
    made = calibration()
    path = calibration_path(made.setting)
    assert path.parent == cache / "calibration" and "cpu-4-ranks" in path.name
    assert load_calibration("cpu", 4) is None
    made.save(path)
    assert load_calibration("cpu", 4) == made
    assert load_calibration("cpu", 2) is None
    assert list(path.parent.iterdir()) == [path]


def test_axes_take_the_links_of_their_size(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = calibration()
    made.save(calibration_path(made.setting))
    with caplog.at_level(logging.WARNING, "monoflow"):
        machine = machine_for(mesh(2, 2, device_type="cpu"))
        line = machine_for(mesh(4, device_type="cpu"))
        flat = machine_for(placement("cpu", [[0, 1, 2, 3]]))
    assert not caplog.records
    assert machine.device == made.device and machine.links == (made.links[2], made.links[2])
    assert line.links == (made.links[4],) and flat.links[1] == made.links[4]
    assert flat.links[0].seconds("all_reduce", 1000) == 0.0


def test_axes_that_leave_the_host_have_a_shipped_link(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calibration(4)
    made.save(calibration_path(made.setting))
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    outer, inner = machine_for(mesh(2, 4, device_type="cpu")).links
    assert inner == made.links[4] and outer.beta == pytest.approx(1 / (12.5e9 * ACHIEVED.link))
    outer, inner = machine_for(mesh(4, 2, device_type="cpu")).links
    assert inner == made.links[2] and outer.beta == pytest.approx(1 / (12.5e9 * ACHIEVED.link))
    (line,) = machine_for(mesh(8, device_type="cpu")).links
    assert line.beta == outer.beta and line.alpha == pytest.approx(3 * 3e-5)


def test_a_machine_that_was_not_measured_is_guessed_and_says_so(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "monoflow.plan"):
        machine = machine_for(mesh(2, 2, device_type="cpu"))
    assert "monoflow calibrate -n 4`" in caplog.text and "not calibrated for 4 ranks" in caplog.text
    assert len(machine.links) == 2 and machine.device.flops["float32"] > 1e9


def test_ranks_that_are_planned_for_have_the_threads_that_a_launcher_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.setattr("torch.get_num_threads", lambda: 5)
    assert [Setting.here("cpu", n).num_threads for n in (1, 4, 100)] == [5, 3, 1]
    assert Setting.here("cpu", 4).command == "OMP_NUM_THREADS=3 monoflow calibrate -n 4"
    assert Setting.here("xpu", 4).command == "monoflow calibrate -n 4"


def test_a_stale_calibration_says_what_differs(cache: Path) -> None:
    made = calibration()
    old = replace(made, setting=replace(made.setting, torch="1.0", device="another"))
    old.save(calibration_path(made.setting))
    with pytest.raises(
        PlanError, match=r"stale \(device 'another', here .*, torch '1.0', here '2.*calibrate -n 4"
    ):
        load_calibration("cpu", 4)


def test_a_calibration_of_another_format_is_stale(cache: Path) -> None:
    made = calibration()
    path = calibration_path(made.setting)
    made.save(path)
    path.write_text(path.read_text().replace("monoflow calibration 3", "monoflow calibration 2"))
    with pytest.raises(PlanError, match=r"stale \(format 'monoflow calibration 2', here .*calibrate -n 4"):
        load_calibration("cpu", 4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"format"', '"shape"'),
        lambda text: text.replace('"links"', '"chains"'),
        lambda text: text.replace("[\n     10.0,", "[\n     -1.0,"),
        lambda text: json.dumps(3),
    ],
)
def test_a_damaged_calibration_is_refused(cache: Path, damage) -> None:
    made = calibration()
    path = calibration_path(made.setting)
    made.save(path)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(PlanError, match=r"is damaged .*monoflow calibrate -n 4"):
        load_calibration("cpu", 4)
