"""Runs one captured step under many layouts, on ranks simulated in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import monoflow as flow
import monoflow.compiler as compiler
from monoflow.compiler import Captured
from monoflow.mesh import Placement
from monoflow.step import Report, Step

from .models import Batch, training


class Layout(NamedTuple):
    """Devices as a grid of ranks, a plan's name, and the bytes that a rank may hold (0 for no limit)."""

    grid: tuple
    plan: str
    memory: int = 0

    @property
    def placement(self) -> Placement:
        return flow.placement("cpu", list(self.grid))

    @property
    def num_ranks(self) -> int:
        return self.placement.size

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Within: this process stands for the ranks of the layout."""
        with flow.simulate(self.num_ranks) if self.num_ranks > 1 else nullcontext():
            yield

    def compiled(self, *things: Any, **options: Any) -> Callable[[Callable], Step]:
        """flow.graph on this layout."""
        return flow.graph(*things, placement=self.placement, plan=self.plan, memory=self.memory, **options)


_SQUARE = ([0, 1], [2, 3])
LAYOUTS: Mapping[str, Layout] = {
    "one": Layout((0,), "data"),
    "data-2": Layout((0, 1), "data"),
    "data-4": Layout((0, 1, 2, 3), "data"),
    "zero-2": Layout((0, 1), "zero"),
    "zero-4": Layout((0, 1, 2, 3), "zero"),
    "tensor-2": Layout((0, 1), "tensor"),
    "tensor-4": Layout((0, 1, 2, 3), "tensor"),
    "data-x-tensor": Layout(_SQUARE, "data x tensor"),
    "zero-x-tensor": Layout(_SQUARE, "zero x tensor"),
}
OTHERS: Mapping[str, Layout] = {
    "data-3": Layout((0, 1, 2), "data"),
    "zero-3": Layout((0, 1, 2), "zero"),
    "tensor-3": Layout((0, 1, 2), "tensor"),
    "data-x-data": Layout(_SQUARE, "data x data"),
    "zero-x-zero": Layout(_SQUARE, "zero x zero"),
    "data-x-zero": Layout(_SQUARE, "data x zero"),
    "tensor-x-data": Layout(_SQUARE, "tensor x data"),
    "tensor-x-tensor": Layout(_SQUARE, "tensor x tensor"),
}
ALL_LAYOUTS: Mapping[str, Layout] = {**LAYOUTS, **OTHERS}
SEVERAL = tuple(name for name in LAYOUTS if name != "one")


class Case:
    """A model, its optimizer and step function. Captured once a batch shape: no layout changes a capture."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, function: Callable[[Batch], Any]
    ) -> None:
        self.model, self.optimizer, self.function = model, optimizer, function
        self._begin = copy.deepcopy(model.state_dict())
        self._captured: dict[tuple, Captured] = {}

    @contextmanager
    def under(self, layout: Layout, **options: Any) -> Iterator[Step]:
        """The compiled step, from the state that the model was built with, within the ranks of the layout."""
        self.model.load_state_dict(self._begin)
        self.optimizer.state.clear()
        trace = compiler.trace

        def remembered(function: Callable, subject: Any, args: Any, *rest: Any) -> Captured:
            shapes = (tuple(one.shape) for one in pytree.tree_leaves(args) if isinstance(one, torch.Tensor))
            key = id(function), tuple(shapes)
            if key not in self._captured:
                self._captured[key] = trace(function, subject, args, *rest)
            return self._captured[key]

        with pytest.MonkeyPatch.context() as patch, layout.ranks():
            patch.setattr(compiler, "trace", remembered)
            yield layout.compiled(self.model, self.optimizer, **options)(self.function)


class Cases:
    """The cases of a test session by their settings, each built once."""

    def __init__(self) -> None:
        self._built: dict[tuple, Case] = {}

    def __call__(self, name: str, optimizer: str, dropout: float = 0.1, autocast: bool = False) -> Case:
        key = name, optimizer, dropout, autocast
        if key not in self._built:
            self._built[key] = Case(*training(name, optimizer, dropout, autocast))
        return self._built[key]


#: What each kind of tensor may deviate by in float32 (see Report for relative to what).
TOLERANCE: Mapping[str, float] = {
    "result": 1e-5,
    "gradient": 1e-5,
    "parameter": 1e-4,
    "buffer": 1e-5,
    "optimizer state": 1e-4,
}


def assert_exact(report: Report, tolerance: Mapping[str, float] = TOLERANCE) -> None:
    """Every kind of tensor is within its tolerance, and entries were judged."""
    for one in report.deviations:
        assert one.largest <= tolerance[one.kind], report.text()
        assert one.judged > 0, report.text()


def verified(layout: Layout, things: list[Any], function: Callable, *args: Any, steps: int = 2) -> Step:
    """Compiles, runs and verifies a step under a layout; returns it for what else a test asks."""
    with layout.ranks():
        step = layout.compiled(*things)(function)
        assert_exact(step.verify(*args, steps=steps))
        return step
