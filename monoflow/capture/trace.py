"""The capture itself: lift the step's tensors, trace it on fakes, make the trace a StepGraph."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..graph.step_graph import Role, StepGraph
from ..sbp.random_mode import op_numbers
from .finish import step_graph
from .functional import functionalize
from .lift import arguments_of, lift, lift_constants
from .optimizers import InitialState
from .run import Run
from .subject import Slot, Subject

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, eq=False)
class Captured:
    """A StepGraph and how it is bound to the live objects.

    Attributes:
        graph: the captured step.
        slots: for every input or next value that is not a batch argument: where its live tensor is.
        initial: for states that do not exist yet: how they begin (optimizer, parameter, key).
        out_spec: how the user's result is built from the results, with None leaves kept.
        result_names: names of the outputs that are the user's, one per leaf (None for a None leaf).
        clears_grads: the step clears every gradient before it reads one, so those it finds do not matter.
        cleared_grads: slots of gradients that exist before the step and are None after it.
        grads: the parameters that had a gradient when the step was captured.
        begins: states that the step itself creates (SGD with dampening starts with the first gradient).
        batch_names: the input name of every tensor among the leaves of (args, kwargs), in order; the graph
            has those that it uses.
        losses: names of the results that backward passes began at.
    """

    graph: StepGraph
    slots: Mapping[str, Slot]
    initial: Mapping[str, tuple[InitialState, int, str]]
    out_spec: pytree.TreeSpec
    result_names: tuple[str | None, ...]
    clears_grads: bool
    cleared_grads: tuple[str, ...] = ()
    grads: frozenset[str] = frozenset()
    begins: frozenset[str] = frozenset()
    batch_names: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    def fits(self, subject: Subject) -> bool:
        """Whether the gradients and optimizer states that exist now are those the graph is for."""
        if not self.clears_grads and self.grads != subject.grads():
            return False
        if any(self.slots[name].get() is not None for name in self.begins):
            return False
        states = [
            one.name for one in self.graph.inputs if one.role is Role.STATE and one.name not in self.initial
        ]
        return all(self.slots[name].get() is not None for name in states)


def capture(
    function: Callable,
    subject: Subject,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    source: str,
    batch_stats: str = "global",
) -> Captured:
    """Captures one call of a step function as a StepGraph.

    Runs `function` once on fake tensors. Real parameters, buffers and optimizer state are neither read nor
    written, and module and optimizer are left exactly as they were.

    Args:
        name, source: how the step is called, and the "file:line" where it is defined.
        batch_stats: whether batch norm in training is over the "global" batch, or a rank's "local" rows.

    Raises:
        CaptureError: the step does something that one graph cannot hold; the message names the line.
    """
    for index, model in enumerate(subject.models):
        _refuse_compiled(index, model)
    subject.check()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    arguments = arguments_of(args, kwargs)
    lifted = lift(mode, subject, arguments)
    run = Run(function, subject, mode, lifted, arguments, source)
    with _quiet_python(), op_numbers():
        module = traced(run, list(lifted.fakes.values()))
        lift_constants(mode, module, lifted)
        functional = functionalize(module, list(lifted.fakes.values()), batch_stats)
        graph = step_graph(functional, lifted, run.outputs, name, source)
    used = set(graph.input_of) | {output.replaces for output in graph.outputs} | set(run.cleared)
    return Captured(
        graph,
        {key: slot for key, slot in lifted.slots.items() if key in used},
        {key: value for key, value in lifted.initial.items() if key in used},
        run.out_spec,
        tuple(run.result_names),
        not run.reads_grads,
        tuple(run.cleared),
        subject.grads(),
        frozenset(run.begun),
        tuple(arguments.names.values()),
        tuple(run.losses),
    )


def traced(run: Run, fakes: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The ops that the step ran on fakes, in-place ones as they are."""
    with _use_lazy_graph_module(True):  # nobody runs it: that would be Python code to write and compile
        module = make_fx(run)(*fakes)
    assert isinstance(module, fx.GraphModule)
    return module


def _refuse_compiled(index: int, model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"model {index} given to flow.graph" + f", in module {name!r}," * bool(name)
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{where} is TorchScript ({type(module).__name__}), which runs past Python; pass the plain "
                "module that it was scripted or traced from, and call that in the step"
            )
        if _is_optimized(module) or module._compiled_call_impl is not None:
            raise CaptureError(
                f"{where} is compiled by torch.compile; pass the plain module (compiled._orig_mod, or one "
                "without a call of .compile()), and call that in the step: monoflow captures it itself"
            )


def _is_optimized(module: nn.Module) -> bool:
    """Whether torch.compile made a module. Where it is not imported, it made none."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


@contextmanager
def _quiet_python() -> Iterator[None]:
    """Within: the backward pass runs in the calling thread, where the trace is.

    And torch logs no trace of an op that fails on fakes: it raises too.
    """
    threads, silenced = torch.autograd.is_multithreading_enabled(), _FAKE_LOG.disabled
    torch.autograd.set_multithreading_enabled(False)
    _FAKE_LOG.disabled = True
    try:
        yield
    finally:
        _FAKE_LOG.disabled = silenced
        torch.autograd.set_multithreading_enabled(threads)
