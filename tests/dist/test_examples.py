"""The example scripts as a user runs them: golden loss curves, the saved model, Ctrl-C."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT, RunCli, cli_environment

GOLDEN = ROOT / "tests" / "golden"
LICENSE = ROOT / "LICENSE"  # a text that is the same on every machine

#: Options that make each run small. A curve is made anew by `train.py OPTIONS --losses tests/golden/X.txt`.
SMALL = {
    "gpt": f"--layers 2 --width 32 --heads 2 --context 32 --batch 7 --steps 12 --lr 1e-2 --text {LICENSE}",
    "vision": "--batch 30 --steps 6",
    "recsys": "--batch 64 --steps 12 --samples 2000 --lr 3e-2",
}


def losses(path: Path) -> list[float]:
    """The curve of a file with a line `step loss` each."""
    lines = [line.split() for line in path.read_text().splitlines()]
    assert [int(step) for step, _ in lines] == list(range(1, len(lines) + 1))
    return [float(loss) for _, loss in lines]


def unigram_entropy() -> float:
    """Of the text, from its definition."""
    text = LICENSE.read_bytes()
    return -sum(n / len(text) * math.log(n / len(text)) for n in Counter(text).values())


def script(example: str) -> Path:
    return ROOT / "examples" / example / "train.py"


def run(run_cli: RunCli, folder: Path, num_ranks: int, example: str, *options: str) -> str:
    """Runs an example in `folder`; returns what it printed. It must print no warning."""
    options = (*shlex.split(SMALL[example]), "--losses", "losses.txt", *options)
    done = run_cli("run", "-n", str(num_ranks), script(example), *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("example", ["vision", "recsys"])
def test_golden_losses(run_cli: RunCli, tmp_path: Path, example: str, num_ranks: int) -> None:
    output = run(run_cli, tmp_path, num_ranks, example)
    assert losses(tmp_path / "losses.txt") == pytest.approx(losses(GOLDEN / f"{example}.txt"), abs=1e-4)
    assert re.search(r"loss \d\.\d+ -> \d\.\d+", output)


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "data"), (2, "tensor")])
def test_golden_losses_of_gpt(run_cli: RunCli, tmp_path: Path, num_ranks: int, plan: str) -> None:
    golden = GOLDEN / "gpt.txt"
    output = run(run_cli, tmp_path, num_ranks, "gpt", "--plan", plan, "--compare", str(golden))
    assert losses(tmp_path / "losses.txt") == pytest.approx(losses(golden), abs=1e-4)
    gap = re.search(r"largest deviation of the first 12 losses: (\S+)", output)
    assert gap is not None and float(gap[1]) <= 1e-4
    held_out = re.search(
        r"held-out loss (\d\.\d+) nats a byte; unigram entropy of the text (\d\.\d+)", output
    )
    assert held_out is not None and float(held_out[2]) == pytest.approx(unigram_entropy(), abs=1e-3)
    assert output.count("saved runs/gpt/model.safetensors") == 1

    if num_ranks == 2:
        saved = tmp_path / "runs" / "gpt" / "model.safetensors"
        command = [sys.executable, str(ROOT / "examples/gpt/sample.py"), str(saved), "--bytes", "20"]
        sampled = subprocess.run(command, capture_output=True, env=cli_environment(), check=True)
        assert sampled.stdout.startswith(b"def ") and len(sampled.stdout) >= len(b"def ") + 20


@contextmanager
def training(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The GPT on two ranks."""
    words = [*shlex.split(SMALL["gpt"]), "--steps", "200", "--losses", "losses.txt"]
    command = [sys.executable, "-m", "monoflow.cli", "run", "-n", "2", "--elastic", "1:2", str(script("gpt"))]
    job = subprocess.Popen(
        [*command, *words, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cli_environment(), cwd=folder,
    )  # fmt: skip
    with job:
        yield job
        job.kill()


def read_until(job: subprocess.Popen[str], text: str) -> None:
    assert job.stdout is not None
    line = job.stdout.readline()
    while text not in line:
        assert line, f"it ended without {text!r}"
        line = job.stdout.readline()


def test_interrupted_and_killed_training_goes_on(tmp_path: Path) -> None:
    saving = ("--plan", "data", "--save", "saves", "--save-every", "15")
    with training(tmp_path, *saving) as job:
        read_until(job, "step    20")
        job.send_signal(signal.SIGINT)
        output, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (130, "")
    found = re.search(r"interrupted after (\d+) steps", output)
    assert found is not None and 20 <= (interrupted := int(found[1])) < 200
    assert len(losses(tmp_path / "losses.txt")) == interrupted
    assert (tmp_path / "runs" / "gpt" / "model.safetensors").is_file()

    with training(tmp_path, *saving) as job:
        read_until(job, f"going on after step {interrupted}")
        read_until(job, "step ")
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        os.kill(next(int(pid) for pid, words in commands.items() if b"train.py" in words), signal.SIGKILL)
        read_until(job, "going on after step ")
        output, errors = job.communicate(timeout=60)
    assert job.returncode == 0 and errors.count("the job re-forms with 2 ranks") == 1, errors
    (tmp_path / "plain").mkdir()
    with training(tmp_path / "plain", "--plan", "data") as job:
        job.communicate(timeout=60)
    assert losses(tmp_path / "losses.txt") == losses(tmp_path / "plain" / "losses.txt")
    assert len(losses(tmp_path / "losses.txt")) == 200
