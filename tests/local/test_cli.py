"""The command line's own answers; `tests/dist/test_launch.py` has the jobs."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from monoflow import config, log
from monoflow.cli.doctor import Finding, _compiler, _torch_age, examine
from monoflow.cli.run import agent_options
from monoflow.errors import FlowError
from tests.conftest import RunCli


def test_version_and_doctor(run_cli: RunCli) -> None:
    assert run_cli("--version").stdout.startswith("monoflow ")
    report = run_cli("doctor")
    assert report.returncode == 0, report.stderr
    for word in (torch.__version__, "cores", "distributed back ends", "gloo", "C++ compiler"):
        assert word in report.stdout


def test_doctor_says_what_fixes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [finding.name for finding in examine("0")]
    assert names[:3] == ["python", "monoflow", "torch"]
    assert not any(finding.is_fatal for finding in examine("0"))
    monkeypatch.setattr("monoflow.cli.doctor._installed", lambda package: None)
    findings = {finding.name: finding for finding in examine("0")}
    assert findings["highspy"] == Finding("highspy", "missing", "pip install highspy", is_fatal=True)
    assert findings["transformers"] == Finding(
        "transformers", "missing (optional)", "pip install 'monoflow[hf]'"
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert _compiler().found.startswith("missing")
    assert "g++" in _compiler().fix or "xcode" in _compiler().fix


def test_doctor_knows_old_torches() -> None:
    upgrade = "pip install --upgrade 'torch>=2.13,<2.15'"
    assert _torch_age("2.10.1") == Finding("torch is recent enough", "no", upgrade, is_fatal=True)
    assert _torch_age("2.11.0+cpu") == Finding("torch is recent enough", "for one device only", upgrade)
    assert _torch_age("2.14.0") == Finding("torch is recent enough", "yes")


def test_requests_that_cannot_run_say_why(run_cli: RunCli, tmp_path: Path) -> None:
    missing = run_cli("run", "nowhere.py", cwd=tmp_path)
    assert missing.returncode == 1
    assert missing.stderr == f"monoflow: no script 'nowhere.py' in {tmp_path}\n"
    (tmp_path / "script.py").write_text("")
    none = run_cli("run", "-n", "0", "script.py", cwd=tmp_path)
    assert (none.returncode, none.stderr) == (1, "monoflow: -n 0: the number of ranks must be at least 1\n")
    backend = run_cli("run", "-n", "2", "--rdzv-backend", "pigeon", "script.py", cwd=tmp_path)
    assert backend.returncode == 1
    assert backend.stderr.startswith("monoflow: the hosts did not find each other: ")
    assert "pigeon" in backend.stderr


def test_options_of_several_hosts_are_passed_on() -> None:
    options = [("nnodes", "2"), ("node-rank", 0), ("rdzv-id", None), ("rdzv-endpoint", "host:1")]
    assert agent_options(options) == ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "host:1")


def test_settings_come_from_the_environment() -> None:
    env = {"MONOFLOW_LOG": "plan, lower", "MONOFLOW_VERIFY": "0", "RANK": "3", "WORLD_SIZE": "4"}
    settings = config.Settings.from_env(env)
    assert settings.log_stages == {"plan", "lower"}
    assert (settings.verify, settings.rank, settings.world_size) == (False, 3, 4)
    assert config.Settings.from_env({"MONOFLOW_LOG": "all"}).log_stages == set(config.STAGES)
    assert config.Settings.from_env({}) == config.Settings()
    assert config.Settings.from_env({"MONOFLOW_LINK_DELAY": "2e-4:1e-8"}).link_delay == (2e-4, 1e-8)
    caches = {"XDG_CACHE_HOME": "/x"}, {"XDG_CACHE_HOME": "/x", "MONOFLOW_CACHE": "/y"}
    assert [config.Settings.from_env(env).cache for env in caches] == ["/x/monoflow", "/y"]


@pytest.mark.parametrize(
    ("env", "facts"),
    [
        (
            {"MONOFLOW_LOG": "plan,plane"},
            r"MONOFLOW_LOG='plan,plane' names \['plane'\]; the stages are capture",
        ),
        ({"MONOFLOW_VERIFY": "maybe"}, "MONOFLOW_VERIFY='maybe' is not one of 0, 1"),
        ({"MONOFLOW_WATCHDOG": "-1"}, "MONOFLOW_WATCHDOG='-1' is less than 0"),
        ({"RANK": "first"}, "RANK='first' is not an integer"),
        ({"MONOFLOW_LINK_DELAY": "fast"}, "MONOFLOW_LINK_DELAY='fast' is not seconds .*such as 2e-4:1e-8"),
        ({"MONOFLOW_LINK_DELAY": "-1:0"}, "MONOFLOW_LINK_DELAY='-1:0' is not seconds"),
    ],
)
def test_settings_that_are_not_understood(env: dict[str, str], facts: str) -> None:
    with pytest.raises(FlowError, match=facts):
        config.Settings.from_env(env)


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What lands on stderr under some settings, in a program without logging of its own (pytest has one)."""

    def run(settings: config.Settings, *messages: tuple[str, int, str]) -> str:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        log.configure(settings)
        for stage, level, text in messages:
            log.stage_logger(stage).log(level, text)
        return capsys.readouterr().err

    yield run
    log.configure(config.Settings.from_env(os.environ))


def test_log_shows_the_chosen_stages(show) -> None:
    settings = config.Settings(log_stages=frozenset({"plan"}))
    shown = show(
        settings,
        ("plan", logging.INFO, "two\nlines"),
        ("capture", logging.INFO, "hidden"),
        ("capture", logging.WARNING, "always"),
    )
    assert shown == "[plan] two\n[plan] lines\n[capture] always\n"


def test_log_of_other_ranks(show) -> None:
    settings = config.Settings(log_stages=frozenset({"plan"}), rank=1)
    assert show(settings, ("plan", logging.INFO, "x"), ("plan", logging.WARNING, "y")) == ""
    everywhere = replace(settings, log_all_ranks=True)
    assert show(everywhere, ("plan", logging.INFO, "heard")) == "[rank 1 plan] heard\n"
