"""One device: a step of ours against torch eager and torch.compile, `python bench/step.py --help`.

Every number is a ratio of what was measured side by side, in turn, in one process (steps), or in fresh
processes one after the other (first steps, memory). All peers train the identical model.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from figures import Figure, write
from peers import OURS, PEERS, WORKS, Train, dlrm
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

WARM_UP = 3


def seconds(step: Train, batch: Any) -> float:
    """The time of one step."""
    start = time.perf_counter()
    step(batch)
    return time.perf_counter() - start


# --- steps -----------------------------------------------------------------------------------------


def contest(name: str, peers: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step of every peer, taken in turn.

    Raises:
        AssertionError: a peer's loss is another one's; it takes no part.
    """
    works = {peer: WORKS[name]() for peer in peers}
    first = works[peers[0]]
    if name == "dlrm":
        works["eager, sparse=True"] = dlrm(sparse=True)
    steps: dict[str, Train] = {}
    for work in works.values():
        work.model.load_state_dict(first.model.state_dict())
    losses = {}
    for peer, work in works.items():
        steps[peer] = PEERS[peer.split(",")[0]](work)
        losses[peer] = [float(steps[peer](first.batch)) for _ in range(WARM_UP)]
    for peer, found in losses.items():
        torch.testing.assert_close(found, losses[peers[0]], rtol=1e-3, atol=0.0, msg=f"{peer}: {losses}")
    taken: dict[str, list[float]] = {peer: [] for peer in steps}
    for number in range(rounds):
        for peer in random.Random(number).sample(list(steps), len(steps)):
            taken[peer].append(seconds(steps[peer], first.batch))
    return taken


def ratios(taken: Mapping[str, Sequence[float]], to: str = "eager") -> dict[str, float]:
    """The median of each peer's seconds, by those of another in the same round."""
    return {
        peer: statistics.median(own / other for own, other in zip(found, taken[to], strict=True))
        for peer, found in taken.items()
    }


def matmul_flops() -> float:
    """What this machine's matrix product reaches now, per second."""
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(seconds(lambda _: a @ b, None) for _ in range(10))
    return 2 * size**3 / best


# --- in processes of their own ---------------------------------------------------------------------


def child(task: str, name: str, peer: str) -> None:
    """Prints one JSON value: what a fresh process measured."""
    if task == "start":
        print(json.dumps(start(name, peer)))
    elif task == "memory":
        print(json.dumps(peak(name, peer)))


def start(name: str, peer: str) -> tuple[float, float]:
    """Seconds to the end of the first step, and to the first of three steps that are as fast as can be."""
    work = WORKS[name]()
    begin = time.perf_counter()
    step = PEERS[peer](work)
    step(work.batch)
    first = time.perf_counter() - begin
    ends, times = [], []
    for _ in range(8):
        times.append(seconds(step, work.batch))
        ends.append(time.perf_counter() - begin)
    fast = 1.5 * statistics.median(times)
    return first, next(end - own for own, end in zip(times, ends, strict=True) if own <= fast)


def peak(name: str, peer: str) -> int:
    """The most bytes of tensors that are alive at a time in a step at batch 1, the model's included."""
    work = WORKS[name](1)
    step = PEERS[peer](work)
    for _ in range(WARM_UP):
        step(work.batch)
    tensors = [*work.model.parameters(), *work.model.buffers()]
    optimizer_state = 2 * sum(one.numel() * one.element_size() for one in work.model.parameters())
    held = sum(one.numel() * one.element_size() for one in tensors) + optimizer_state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step(work.batch)
    now = most = 0
    profiler: Any = record.profiler
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return held + most


def measured(task: str, name: str, peer: str, cache: str) -> Any:
    """What a fresh process with a given cache of compiled code finds.

    Raises:
        RuntimeError: it failed; it has printed why.
    """
    command = [sys.executable, __file__, "--child", task, "--models", name, "--peers", peer]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


# --- figures -------------------------------------------------------------------------------------------


def step_figures(name: str, taken: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Our step by that of torch's fastest way; of tables of embeddings, by both forms of their gradients."""
    if OURS not in taken:
        return []
    if name == "dlrm":
        sparse = "eager, sparse=True"
        return [
            Figure("dlrm, step / torch with dense gradients", ratios(taken)[OURS], 0.2),
            Figure("dlrm, step / torch with sparse=True", ratios(taken, sparse)[OURS], 0.95),
        ]
    torchs = [peer for peer in taken if not peer.startswith(OURS)]
    best = min(torchs, key=lambda peer: statistics.median(taken[peer]))
    return [Figure(f"{name}, step / {best}", ratios(taken, best)[OURS], 0.97)]


def start_figures(name: str, found: Mapping[str, Sequence[Sequence[float]]]) -> list[Figure]:
    """How soon we are at full speed, with no code kept and with all, by torch.compile with none."""
    peer = "torch.compile all"
    if OURS not in found or peer not in found:
        return []
    cold, warm = (one[1] / found[peer][0][1] for one in found[OURS])
    return [
        Figure(f"{name}, time to full speed / {peer}", cold, 0.4),
        Figure(f"{name}, second run's / {peer}, first run's", warm, 0.1),
    ]


# --- tables ----------------------------------------------------------------------------------------


def step_table(
    models: Sequence[str], peers: Sequence[str], rounds: int, console: Console, figures: list[Figure]
) -> Table:
    table = Table(title="seconds of a step, by eager's (medians of rounds)")
    for column in ("model", "eager ms", *(peer for peer in peers if peer != "eager"), "sparse=True", "peak"):
        table.add_column(column, justify="right")
    for name in models:
        console.print(f"{name}: compiling")
        taken = contest(name, peers, rounds)
        found = ratios(taken)
        figures += step_figures(name, taken)
        flops = WORKS[name]().flops
        best = statistics.median(taken[OURS]) if OURS in taken else 0.0
        share = f"{flops / best / matmul_flops():.0%}" if flops and best else ""
        table.add_row(
            name,
            f"{1e3 * statistics.median(taken['eager']):.1f}",
            *(f"{found[peer]:.3f}" for peer in peers if peer != "eager"),
            f"{found['eager, sparse=True']:.3f}" if "eager, sparse=True" in found else "",
            share,
        )
    return table


def start_table(
    models: Sequence[str], peers: Sequence[str], console: Console, figures: list[Figure]
) -> Table:
    table = Table(title="seconds to the first step and to full speed: cold, and with a warm cache")
    for column in ("model", "peer", "first", "full speed", "first, warm", "full speed, warm"):
        table.add_column(column, justify="right")
    for name in models:
        found = {}
        for peer in peers:
            console.print(f"{name}: starting {peer}")
            with tempfile.TemporaryDirectory(prefix="monoflow-bench-") as cache:
                cold, warm = found[peer] = [measured("start", name, peer, cache) for _ in range(2)]
            table.add_row(name, peer, *(f"{value:.1f}" for value in (*cold, *warm)))
        figures += start_figures(name, found)
    return table


def memory_table(
    models: Sequence[str], peers: Sequence[str], console: Console, figures: list[Figure]
) -> Table:
    table = Table(title="peak bytes of a step with AdamW at batch 1, by eager's")
    for column in ("model", "eager MB", *(peer for peer in peers if peer != "eager")):
        table.add_column(column, justify="right")
    for name in models:
        console.print(f"{name}: memory")
        with tempfile.TemporaryDirectory(prefix="monoflow-bench-") as cache:
            found = {peer: measured("memory", name, peer, cache) for peer in peers}
        own = (f"{found[peer] / found['eager']:.3f}" for peer in peers if peer != "eager")
        if OURS in found:
            figures.append(Figure(f"{name}, peak bytes / eager", found[OURS] / found["eager"], 0.8))
        table.add_row(name, f"{found['eager'] / 1e6:.1f}", *own)
    return table


def main(
    models: Annotated[str, typer.Option(help="which, with commas")] = "gpt,bert,vit,resnet18,dlrm",
    peers: Annotated[str, typer.Option(help="which, with semicolons; eager always")] = ";".join(PEERS),
    rounds: Annotated[int, typer.Option(help="steps of every peer")] = 30,
    what: Annotated[str, typer.Option(help="steps, start, memory, with commas")] = "steps,start,memory",
    out: Annotated[Path | None, typer.Option(help="write the tables")] = None,
    figures: Annotated[Path | None, typer.Option(help="write what has a goal, for bench/all.py")] = None,
    is_child: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Measures a step, the start and the memory of every peer on one device; prints ratios."""
    names, chosen = models.split(","), peers.split(";")
    if is_child:
        return child(is_child, names[0], chosen[0])
    chosen = list(dict.fromkeys(["eager", *chosen]))
    console = Console(record=out is not None, width=130)
    load = os.getloadavg()[0]
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {load:.1f}")
    with_adamw = [name for name in names if name != "dlrm"]
    told: list[Figure] = []
    if "steps" in what:
        console.print(step_table(names, chosen, rounds, console, told))
    if "start" in what:
        console.print(start_table(["gpt12"], chosen, console, told))
    if "memory" in what:
        console.print(memory_table(with_adamw, chosen, console, told))
    if figures is not None:
        write(figures, told)
    if out is not None:
        out.write_text(console.export_text())
    return None


if __name__ == "__main__":
    typer.run(main)
