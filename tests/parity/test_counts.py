"""What a step of an example costs, counted: a slower form shows without a clock.

    tasks        of rank 0, each fired by an actor
    collectives  that rank 0 takes part in; moves that go together are one
    bytes        that rank 0 sends
    kernels      calls of ops that compute or copy, by rank 0's tasks; views are free
    allocations  tensors in new memory that a step makes, on one device

`tests/golden/counts.txt` holds them. Whoever lowers a count writes the row anew; whoever raises one says why.
"""

from __future__ import annotations

import importlib
import operator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import monoflow as flow
from monoflow.runtime.program import Program, Rate
from tests.conftest import ROOT


class Counts(NamedTuple):
    """The numbers of a row."""

    tasks: int
    collectives: int
    bytes: int
    kernels: int
    allocations: int | None


class Row(NamedTuple):
    """An example, a plan, and the number of ranks."""

    example: str
    plan: str
    ranks: int


def golden() -> dict[Row, Counts]:
    lines = (ROOT / "tests" / "golden" / "counts.txt").read_text().splitlines()
    assert lines[0].split() == [*Row._fields, *Counts._fields]
    cells = [line.split() for line in lines[1:]]
    return {Row(one[0], one[1], int(one[2])): Counts(*map(_number, one[3:])) for one in cells}


def _number(cell: str) -> Any:
    return None if cell == "-" else int(cell)


def kernels(program: Program) -> int:
    """What a rank's tasks call, from their graphs."""
    return sum(
        program.micro_batches if task.rate is Rate.MICRO else 1
        for task in program.tasks
        if task.compute is not None
        for node in task.compute.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
        if not (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)
    )


class _Counting(TorchDispatchMode):
    """Counts the tensors in new memory that calls of torch make."""

    allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.allocations += len(_memory(out) - _memory((args, kwargs)))
        return out


def _memory(things: Any) -> set[int]:
    leaves = pytree.tree_leaves(things)
    return {one.untyped_storage()._cdata for one in leaves if isinstance(one, torch.Tensor)}


GOLDEN = golden()


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: "-".join(map(str, row)))
def test_a_step_costs_what_it_did(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    placement = flow.placement("cpu", range(row.ranks))
    with flow.simulate(placement.size) if placement.size > 1 else nullcontext():
        step, batch = importlib.import_module("cases").CASES[row.example](row.plan, placement)
        step(batch)
        sent = step.stats()
        with _Counting() if placement.size == 1 else nullcontext() as seen:
            step(batch)
        program = step._require().lowered.programs[0]
    new = None if seen is None else seen.allocations
    found = Counts(len(program.tasks), sent.calls(), sent.num_bytes(), kernels(program), new)
    assert found == GOLDEN[row], f"found: {' '.join(map(str, (*row, *found)))}"
