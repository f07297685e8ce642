"""Every bench with short settings, and one table of what they find: `make bench`.

All of it is given 30 minutes; what has not ended by then is ended and named. Numbers of a machine that does
something else as well are not worth reading.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from figures import Figure, markdown, read

from monoflow.plan.calibration import device_name

HERE = Path(__file__).parent


class Told(NamedTuple):
    """A figure in what a bench prints.

    Attributes:
        pattern: finds it; `{what}` is the name of the figure, with the groups of the pattern that have names.
        scale: what its `value` is multiplied by.
    """

    what: str
    pattern: str
    goal: float | None = None
    scale: float = 1.0

    def find(self, text: str) -> list[Figure]:
        """All such figures of a text."""
        found = [
            Figure(self.what.format(**match.groupdict()), float(match["value"]) * self.scale, self.goal)
            for match in re.finditer(self.pattern, text)
        ]
        return found or [Figure(f"{self.what}: not printed", None, self.goal)]


class Bench(NamedTuple):
    """A bench with short settings.

    Attributes:
        command: a file of this folder, and its options.
        told: figures that it prints; without any it takes `--figures`.
    """

    command: tuple[str, ...]
    told: tuple[Told, ...] = ()

    @property
    def name(self) -> str:
        return Path(self.command[0]).stem


_PEERS = "torch.compile model;torch.compile all;monoflow op by op;monoflow"
BENCHES = (
    Bench(("step.py", "--what", "steps", "--rounds", "10", "--peers", _PEERS)),
    Bench(("step.py", "--what", "start", "--peers", "torch.compile all;monoflow")),
    Bench(("step.py", "--what", "memory", "--models", "gpt,bert,vit,resnet18", "--peers", "monoflow")),
    Bench(
        ("runtime.py", "--repeats", "20"),
        (
            Told("runtime beside the work, %", r"in 100 actors: (?P<value>[-\d.]+) %", 1.0),
            Told("us a message in {how}", r"(?P<how>one thread|thread to thread): (?P<value>[\d.]+) us"),
        ),
    ),
    Bench(
        ("following.py", "--pairs", "5", "--steps", "20"),
        (Told("{plan}: steps that follow / one by one", r"(?P<plan>\w+): .* ratio (?P<value>[\d.]+)", 1.0),),
    ),
    Bench(
        ("auto.py", "--ranks", "2", "--rounds", "10"),
        (
            Told(
                "{model}, auto / fastest template",
                r"(?m)^\W*(?P<model>[\w ]+?)\W+auto\b.*?(?P<value>\d\.\d{3}) \(",
                1.05,
            ),
        ),
    ),
)


def run(bench: Bench, until: float) -> list[Figure]:
    """What a bench finds until a moment of `time.monotonic`."""
    with tempfile.TemporaryDirectory(prefix="monoflow-bench-") as folder:
        out = Path(folder, "figures.json")
        command = [sys.executable, str(HERE / bench.command[0]), *bench.command[1:]]
        command += [] if bench.told else ["--figures", str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                text, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
                return [Figure("not in time", None)]
        if process.returncode:
            return [Figure(f"ended with {process.returncode}", None)]
        return [one for told in bench.told for one in told.find(text)] or read(out)


def main(
    out: Annotated[Path | None, typer.Option(help="write the table")] = None,
    only: Annotated[str, typer.Option(help="which benches, with commas")] = "",
    minutes: Annotated[float, typer.Option(help="that all may take together")] = 30.0,
) -> None:
    """Runs the benches one after the other; exits with 1 if one of them failed."""
    until = time.monotonic() + 60 * minutes
    names = only.split(",") if only else [one.name for one in BENCHES]
    found: list[tuple[str, Figure]] = []
    load = os.getloadavg()[0]
    for bench in (one for one in BENCHES if one.name in names):
        start = time.monotonic()
        figures = run(bench, until)
        found += [(bench.name, one) for one in figures]
        print(f"{bench.name}: {len(figures)} figures in {time.monotonic() - start:.0f} s", flush=True)
    text = _text(found, load)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    raise typer.Exit(any(one.value is None for _, one in found))


def _text(found: Sequence[tuple[str, Figure]], load: float) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    head = (
        f"{date.today()}, {device_name('cpu')} x {cores} cores, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, load {load:.1f} at the beginning"
    )
    return f"{head}\n\n{markdown(found)}"


if __name__ == "__main__":
    typer.run(main)
