"""How long capture and planning take, and how much memory: `python bench/plan.py --help`.

Needs no device and no weights: models are built on the meta device. Every case runs in a process of its own,
so that its peak memory is its own; the last rows are ratios of the seconds above them.
"""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from monoflow import compiler
from monoflow.capture import trace as capture_module
from monoflow.mesh import placement

Mesh = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One model on one mesh. `plan` names the plan, "" for capture alone; `cpu` is which clock to read."""

    model: str
    layers: int
    mesh: Mesh
    plan: str
    cpu: bool

    @property
    def name(self) -> str:
        return f"{self.model} {self.layers}"


@dataclass(frozen=True)
class Measured:
    """Seconds by stage, nodes of the graph, and peak resident bytes of the process."""

    seconds: Mapping[str, float]
    nodes: int
    peak_bytes: int


def gpt2(layers: int) -> nn.Module:
    """GPT-2, 124 M parameters at 12 layers, fp32."""
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))


def llama(layers: int) -> nn.Module:
    """The shape of Llama-70B at 80 layers, in bf16."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


MODELS: Mapping[str, Callable[[int], nn.Module]] = {"gpt2": gpt2, "llama-70b": llama}
BATCH = (8, 512)

#: where the compiler and the capture call a stage by name, and how it is called here
STAGES = {
    "lift": (capture_module, "lift"),
    "trace": (capture_module, "traced"),
    "functionalize": (capture_module, "functionalize"),
    "roles": (capture_module, "step_graph"),
    "verify": (compiler, "verify"),
    "plan": (compiler, "plan"),
}


@contextmanager
def timed_stages(clock: Callable[[], float]) -> Iterator[Mapping[str, float]]:
    """Within: the seconds of every stage add up in the mapping that is given."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += clock() - start

        return call

    before = [(owner, name, getattr(owner, name)) for owner, name in STAGES.values()]
    passes = compiler.PASSES
    for stage, (owner, name) in STAGES.items():
        setattr(owner, name, timed(stage, getattr(owner, name)))
    setattr(compiler, "PASSES", {key: timed("passes", one) for key, one in passes.items()})  # noqa: B010
    try:
        yield seconds
    finally:
        setattr(compiler, "PASSES", passes)  # noqa: B010
        for owner, name, function in before:
            setattr(owner, name, function)


def step_of(model: nn.Module) -> tuple[Callable, torch.optim.Optimizer]:
    """A whole training step as a user writes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def train_step(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step, optimizer


def measure(case: Case) -> Measured:
    """Captures and plans one case in this process."""
    model = MODELS[case.model](case.layers)
    step, optimizer = step_of(model)
    ids = torch.zeros(BATCH, dtype=torch.int64)
    clock = time.process_time if case.cpu else time.perf_counter
    with timed_stages(clock) as seconds:
        start = clock()
        captured = compiler.trace(
            step, compiler.subject_of([model, optimizer]), ({"input_ids": ids, "labels": ids},), {}
        )
        captured_at = clock()
        if case.plan:
            ranks = torch.arange(torch.Size(case.mesh).numel()).reshape(case.mesh).tolist()
            compiler.plan(captured, [placement("cpu", ranks)], case.plan, {}, refine=True)
        totals = {"capture": captured_at - start, "capture + plan": clock() - start}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    nodes = sum(1 for _ in captured.graph.calls())
    return Measured({**seconds, **totals}, nodes, peak)


def report(cases: Sequence[Case], measured: Sequence[Measured], console: Console) -> None:
    """Prints a row a case, and below them the ratio of each model's deepest case to every other."""
    stages = list(STAGES)
    stages = [*stages[:-1], "passes", "capture", "plan", "capture + plan"]
    clock = "CPU seconds" if cases[0].cpu else "seconds"
    table = Table(
        title=f"{clock}, batch {BATCH[0]} x {BATCH[1]}, {os.cpu_count()} cores", title_justify="left"
    )
    table.add_column("model, layers")
    for column in ("mesh", *stages, "nodes", "peak GB"):
        table.add_column(column, justify="right")
    for case, one in zip(cases, measured, strict=True):
        mesh = "x".join(map(str, case.mesh)) if case.plan else ""
        times = (f"{one.seconds[stage]:.2f}" if stage in one.seconds else "" for stage in stages)
        peak = f"{one.peak_bytes / 1e9:.2f}"
        table.add_row(case.name, mesh, *times, f"{one.nodes:,}", peak)
    for case, one in zip(cases, measured, strict=True):
        deepest = max(
            (pair for pair in zip(cases, measured, strict=True) if pair[0].model == case.model),
            key=lambda pair: pair[0].layers,
        )
        if deepest[0] is not case:
            ratios = (_ratio(deepest[1].seconds, one.seconds, stage) for stage in stages)
            nodes = f"{deepest[1].nodes / one.nodes:.2f}x"
            table.add_row(f"{deepest[0].name} / {case.layers}", "", *ratios, nodes, "")
    console.print(table)


def _ratio(above: Mapping[str, float], below: Mapping[str, float], stage: str) -> str:
    return f"{above[stage] / below[stage]:.2f}x" if stage in above and stage in below else ""


def main(
    gpt2_layers: Annotated[list[int], typer.Option(help="depths of GPT-2; 0 leaves it out")] = [12],  # noqa: B006
    llama_layers: Annotated[list[int], typer.Option(help="depths of Llama; 0 leaves it out")] = [20, 80],  # noqa: B006
    plan: Annotated[
        str, typer.Option(help="auto, a template for two axes, or '' for capture alone")
    ] = "auto",
    cpu: Annotated[bool, typer.Option(help="count CPU seconds, for a machine that others use too")] = False,
) -> None:
    """Measures capture and planning of GPT-2 on 4 x 2 devices and of a Llama-70B shape on 16 x 8."""
    cases = [Case("gpt2", layers, (4, 2), plan, cpu) for layers in gpt2_layers if layers]
    cases += [Case("llama-70b", layers, (16, 8), plan, cpu) for layers in llama_layers if layers]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        measured = list(pool.map(measure, cases))
    if cases:
        report(cases, measured, Console(width=180))


if __name__ == "__main__":
    typer.run(main)
