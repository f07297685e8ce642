"""One accelerator: torch eager, torch.compile and monoflow on the same models: `python bench/gpu.py --help`.

bf16 autocast, AdamW. First the losses of a few steps are compared with eager's; then the step times, taken in
turn, and the rest. Needs torch >= 2.11, no network and under five minutes on one GPU; `--tiny` runs on a CPU.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, Decoder, Shape
from torch import nn

import monoflow as flow
from monoflow.plan.sheets import DEVICES

Batch = tuple[torch.Tensor, torch.Tensor]
CHECKED = 3  # steps whose losses are compared
#: How far a loss may be from eager's: bf16 rounds to 3 digits, and compilers keep more between ops.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Row:
    """One contender on one model; times in seconds, memory in bytes, -1 where there is none to measure."""

    model: str
    contender: str
    first_step: float
    step: float
    tokens_per_second: float
    utilization: float
    peak_bytes: int
    kernels: int
    deviation: float


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Callable[[Batch], torch.Tensor]:
    """The training step as torch runs it."""

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def compiled(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> Callable[[Batch], torch.Tensor]:
    """The same with torch.compile on the model."""
    return eager(torch.compile(model), optimizer, device)  # pyright: ignore[reportArgumentType]


def ours(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Callable[[Batch], torch.Tensor]:
    """The same as one graph."""
    return flow.graph(model, optimizer)(eager(model, optimizer, device))


CONTENDERS = {"torch eager": eager, "torch.compile": compiled, "monoflow": ours}


@dataclass
class Contestant:
    """A contender that has taken its first steps."""

    name: str
    step: Callable[[Batch], torch.Tensor]
    first_step: float
    losses: list[float]
    peak_bytes: int
    num_params: int


def begun(name: str, shape: Shape, batch: Batch, device: str) -> Contestant:
    """Builds a contender from the same seed and runs the steps that are compared."""
    others = torch.cuda.memory_allocated() if device != "cpu" else 0
    torch.manual_seed(0)
    model = Decoder(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = CONTENDERS[name](model, optimizer, device)
    _quiet(device)
    start = time.perf_counter()
    losses = [step(batch).item()]
    first = time.perf_counter() - start
    losses += [step(batch).item() for _ in range(CHECKED - 1)]
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    losses.append(step(batch).item())
    peak = torch.cuda.max_memory_allocated() - others if device != "cpu" else -1
    return Contestant(name, step, first, losses, peak, sum(one.numel() for one in model.parameters()))


def kernels(step: Callable[[Batch], torch.Tensor], batch: Batch, device: str) -> int:
    """Kernels that one step launches; -1 off a GPU."""
    if device == "cpu":
        return -1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(batch)
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")


def contest(title: str, batch_size: int, rounds: int, device: str) -> list[Row]:
    """All contenders on one model: alike first, then timed in turn."""
    shape = SHAPES[title]
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(shape.vocabulary, (batch_size, shape.context + 1), generator=generator).to(device)
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    those = [begun(name, shape, batch, device) for name in CONTENDERS]
    times: Mapping[str, list[float]] = {one.name: [] for one in those}
    for _ in range(rounds):
        for one in those:
            _quiet(device)
            start = time.perf_counter()
            one.step(batch).item()
            times[one.name].append(time.perf_counter() - start)
    peak = _peak_flops(device)
    rows = []
    for one in those:
        seconds = statistics.median(times[one.name])
        tokens = batch[0].numel()
        pairs = zip(one.losses, those[0].losses, strict=True)
        deviation = max(abs(a - b) / abs(b) for a, b in pairs)
        used = shape.flops(one.num_params, tokens) / seconds / peak if peak else -1.0
        rows.append(
            Row(
                title, one.name, one.first_step, seconds, tokens / seconds, used, one.peak_bytes,
                kernels(one.step, batch, device), deviation,
            )
        )  # fmt: skip
    return rows


def _peak_flops(device: str) -> float:
    """The device's dense bf16 peak by its data sheet; 0 if it is not known."""
    name = torch.cuda.get_device_name() if device != "cpu" else ""
    sheets = (one for one in DEVICES.values() if all(mark in name for mark in one.marks))
    return next((one.flops["bfloat16"] * 1e12 for one in sheets), 0.0)


def _quiet(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _table(rows: list[Row], where: str) -> Table:
    table = Table(title=f"One training step on {where}, bf16 autocast, torch {torch.__version__}")
    heads = "model contender|first step s|step ms|to eager|tokens/s|MFU|peak GB|kernels|loss deviation"
    for head in heads.replace(" contender", "|contender").split("|"):
        table.add_column(head, justify="left" if head in ("model", "contender") else "right")
    base = {row.model: row.step for row in rows if row.contender == "torch eager"}
    for row in rows:
        table.add_row(
            row.model, row.contender, f"{row.first_step:.1f}", f"{1e3 * row.step:.2f}",
            f"{row.step / base[row.model]:.2f}", f"{row.tokens_per_second:,.0f}",
            _or_none(row.utilization, "{:.1%}"), _or_none(row.peak_bytes / 1e9, "{:.2f}"),
            _or_none(row.kernels, "{}"), f"{row.deviation:.1e}",
        )  # fmt: skip
    return table


def _or_none(value: float, form: str) -> str:
    return form.format(value) if value > 0 else "-"


def main(
    tiny: Annotated[bool, typer.Option(help="Small models, on the CPU if there is no GPU.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Runs the contests and prints the table; exits with 1 if a loss is not eager's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        raise typer.BadParameter("there is no GPU here; --tiny runs small models on the CPU")
    sizes = {"tiny GPT-2": 2, "tiny Llama": 2} if tiny else {"GPT-2 124M": 16, "Llama 1B": 4}
    where = torch.cuda.get_device_name() if device != "cpu" else "the CPU"
    rows: list[Row] = []
    for title, size in sizes.items():
        rows += contest(title, size, rounds, device)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    Console(width=140).print(_table(rows, where))
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    wrong = [row for row in rows if row.deviation > TOLERANCE]
    for row in wrong:
        print(f"{row.contender} on {row.model}: a loss is {row.deviation:.1e} from eager's")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
