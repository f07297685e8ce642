"""`monoflow calibrate`: measure this machine as its ranks find it, and keep that for the planner."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import rich.progress
import torch
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..boxing.curve import Curve
from ..boxing.route import LinkCost
from ..errors import FlowError
from ..plan.calibration import Calibration, calibration_path
from ..plan.op_class import ARITHMETIC
from .measure import Progress

_SCRIPT = Path(__file__).with_name("calibrate_rank.py")


def calibrate(num_ranks: Sequence[int], console: Console) -> int:
    """Measures each number of local ranks in turn, prints what was found and keeps it.

    Args:
        num_ranks: how many ranks share this machine; all alone and one per core or device when empty.

    Returns:
        The exit status.

    Raises:
        FlowError: the number of ranks is not positive, or they failed (their own traceback is printed
        before).
    """
    for count in num_ranks or default_counts():
        if count < 1:
            raise FlowError(f"-n {count}: the number of ranks must be at least 1")
        measured = _measure(count, console)
        path = calibration_path(measured.setting)
        measured.save(path)
        console.print(report(measured))
        console.print(f"kept in {path}\n", soft_wrap=True)
    return 0


def default_counts() -> list[int]:
    """One rank, and as many as there are accelerators, or cores."""
    most = torch.accelerator.device_count() if _device_type() != "cpu" else os.cpu_count() or 1
    return [1, most] if most > 1 else [1]


def _device_type() -> str:
    here = torch.accelerator.current_accelerator()
    return here.type if here is not None and torch.accelerator.is_available() else "cpu"


def _measure(num_ranks: int, console: Console) -> Calibration:
    """Runs the ranks, showing what they do."""
    with tempfile.TemporaryDirectory(prefix="monoflow-") as folder:
        out = Path(folder, "calibration.json")
        command = [sys.executable, "-m", "monoflow.cli", "run", "-n", str(num_ranks), str(_SCRIPT)]
        command += ["--device-type", _device_type(), "--out", str(out)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(_search_path())}
        with (
            _bar(console) as bar,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
        ):
            task = bar.add_task(f"{num_ranks} rank{'s' * (num_ranks > 1)}", total=None, what="starting")
            for line in process.stdout or ():
                told = Progress.of(line)
                bar.update(task, completed=told.done, total=told.total, what=told.text)
        if process.returncode:
            raise FlowError(f"the ranks ended with status {process.returncode}; nothing was kept")
        return Calibration.read(out)


def _search_path() -> list[str]:
    """Where this package is imported from, before what the environment says."""
    return [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]


def _bar(console: Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
        console=console,
        transient=True,
    )


def report(measured: Calibration) -> RenderableType:
    """What was found, as tables: ops by class, then collectives by group size."""
    where, device = measured.setting, measured.device
    threads = f" of {where.num_threads} threads" if where.num_threads else ""
    memory = f"{device.capacity / 1e9:,.1f} GB"
    head = f"{where.device}: {where.num_ranks} ranks{threads} with {memory} each, torch {where.torch}"
    parts: list[RenderableType] = [head, _ops(device.curves)]
    if measured.links:
        parts.append(_collectives(measured.links))
        parts.append(f"compute does not feel {device.hiding:.0%} of the seconds of a move beside it")
    moving = f", moves {measured.moving:.2f} times" * bool(measured.links)
    parts.append(f"as in whole steps, where computing takes {measured.computing:.2f} times as long{moving}")
    return Group(*parts)


def _ops(curves: Mapping[str, Curve]) -> Table:
    table = _table("ops", "smallest call", "largest call", "rate there")
    for key, curve in sorted(curves.items()):
        amount, seconds = curve.points[-1]
        unit = "FLOP/s" if key.partition("/")[0] in ARITHMETIC else "/s"
        rate = f"{amount / seconds / 1e9:,.2f} G{unit}" * (amount > 1)
        table.add_row(key, _time(curve.points[0][1]), _time(seconds), rate)
    return table


def _collectives(links: Mapping[int, LinkCost]) -> Table:
    table = _table("collectives", "ranks", "alpha", "beta", "bandwidth of the largest")
    for size, kind, curve in _curves(links):
        (least, alpha), (most, seconds) = curve.points[0], curve.points[-1]
        beta = max(seconds - alpha, 0.0) / (most - least)
        rate = f"{most / seconds / 1e9:.2f} GB/s"
        table.add_row(kind, str(size), _time(alpha), f"{beta * 1e9:.3f} ns/byte", rate)
    return table


def _curves(links: Mapping[int, LinkCost]) -> Iterator[tuple[int, str, Curve]]:
    return ((size, kind, curve) for size, link in sorted(links.items()) for kind, curve in link.curves)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"
