"""A job under `monoflow run --elastic` that trains `gpt.py`, and the curve that it leaves."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from monoflow.checkpoint import checkpoints
from tests.conftest import ROOT, cli_environment

SCRIPT = Path(__file__).with_name("gpt.py")
#: Seconds in which something must happen; a job for which it does not hangs.
PATIENCE = 150
#: Seconds without a sign of life after which ranks are taken for hung.
WATCHDOG = 12


class Line(NamedTuple):
    """A step as rank 0 noted it.

    Attributes:
        samples: a sum over the batch's tokens, which tells batches apart.
        pid: of the rank 0 that took it.
    """

    step: int
    loss: float
    samples: int
    num_ranks: int
    pid: int


class Hang(AssertionError):
    """Nothing happened for too long."""


class Job:
    """One job.

    Args:
        folder: of its checkpoints and its curve.
        num_ranks: of this host; it may go on with fewer.
        options: of the script.
        meeting: options of the command by which several hosts meet; each brings so many ranks.
    """

    def __init__(self, folder: Path, num_ranks: int, *options: str, meeting: Sequence[str] = ()) -> None:
        self.folder, self.num_ranks, self.options, self.meeting = folder, num_ranks, options, meeting
        self.saves = folder / "saves"
        self.errors = folder / "errors.txt"
        self.start()

    def start(self) -> None:
        """Starts the command, for the first time or again."""
        n, most = self.num_ranks, self.num_ranks * (2 if self.meeting else 1)
        command = [sys.executable, "-m", "monoflow.cli", "run", "-n", str(n), "--elastic", f"1:{most}"]
        command += self.meeting
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen(
                [*command, str(SCRIPT), str(self.folder), *self.options],
                cwd=ROOT,
                env=cli_environment() | {"MONOFLOW_WATCHDOG": str(WATCHDOG)},
                stdout=errors,
                stderr=errors,
            )

    def lines(self) -> list[Line]:
        """The steps that were noted so far, also those taken twice."""
        try:
            text = (self.folder / "curve.txt").read_text()
        except FileNotFoundError:
            return []
        rows = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [Line(int(a), float(b), int(c), int(d), int(e)) for a, b, c, d, e in rows]

    def ranks(self) -> list[int]:
        """The processes of the ranks, at least one."""
        found: list[int] = []

        def look() -> bool:
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            pids = [int(pid) for pid in path.read_text().split()]
            found[:] = [pid for pid in pids if b"gpt.py" in _command(pid)]
            return bool(found)

        self.wait(look, "ranks")
        return found

    def snapshots(self) -> list[Path]:
        """The folders of snapshots in memory."""
        return [one for one in Path("/dev/shm").glob(f"monoflow-*-{self.process.pid}-*/*") if one.is_dir()]

    def newest(self, in_memory: bool) -> int:
        """The step of the newest checkpoint on disk, or of snapshots in memory too; 0 if there is none.

        One of a step that is yet to come is damaged: the job went back to before it.
        """
        last = self.lines()[-1].step
        folders = [self.saves, *(self.snapshots() if in_memory else ())]
        numbers = [number for folder in folders for number, _ in checkpoints(folder)]
        return max((number for number in numbers if number <= last), default=0)

    def ask(self, what: str) -> None:
        """Asks the script for something, by a file of that name."""
        (self.folder / what).touch()

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Raises Hang if it takes too long, AssertionError if the job ends meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline or self._hang(what)
            time.sleep(0.05)

    def _hang(self, what: str) -> bool:
        raise Hang(f"no {what} within {PATIENCE} s\n{self.errors.read_text()[-4000:]}")

    def is_over(self) -> bool:
        """Whether the command has ended."""
        return self.process.poll() is not None

    def close(self) -> None:
        """Ends what is left of it."""
        if not self.is_over():
            self.process.kill()
            self.process.wait()


def _command(pid: int) -> bytes:
    """What a process was started with; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def without_faults(folder: Path, *options: str) -> dict[int, Line]:
    """The curve of one rank that nothing happens to, by step."""
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *options],
        cwd=ROOT, env=cli_environment(), check=True, timeout=PATIENCE,
    )  # fmt: skip
    job = Job.__new__(Job)
    job.folder = folder
    return {line.step: line for line in job.lines()}
