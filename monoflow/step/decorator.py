"""The decorator and the compiled step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..compiler import (
    CommStats,
    Compiled,
    Plan,
    Role,
    StepGraph,
    Subject,
    compile_step,
    load,
    lower_step,
    subject_of,
    trace,
)
from ..errors import CaptureError, FlowError, LayoutError, PlacementError
from ..log import stage_logger
from ..mesh import Placement, placement as make_placement
from ..runtime.world import World, current_world, share_key
from ..sbp.layout import NdSbp, Sbp
from ..sbp.random_mode import RandomMode, draw_key, op_numbers
from ..sbp.vocabulary import parse
from .report import Report, compare
from .reference import Reference
from .store import Store

_MANY_SIGNATURES = 8


def graph(
    *things: Any,
    placement: Placement | None = None,
    plan: str | None = None,
) -> Callable[[Callable], Step]:
    """Makes a step function a compiled step: captured once, planned over all devices, run as a program.

    Args:
        things: the modules and optimizers that the step uses.
        placement: the devices; all ranks of the job in one line when left out.
        plan: "data" (the default), "zero", "tensor", or one a axis as in "data x tensor".

    Returns:
        A decorator. The step is called as the function was, with the global batch.
    """
    if (
        len(things) == 1
        and not isinstance(things[0], (torch.nn.Module, torch.optim.Optimizer))
        and callable(things[0])
    ):
        raise CaptureError(
            "write @flow.graph(model, optimizer), with what the step uses, not @flow.graph alone"
        )
    subject = subject_of(things)

    def decorate(function: Callable) -> Step:
        return Step(function, subject, placement, plan)

    return decorate


class Step:
    """A step function that is captured, planned and compiled at its first call with arguments of a kind.

    Call it as the function it was made from. Scalars come back as plain tensors, equal on all ranks; larger
    results as global tensors (`out.full_tensor()` gathers) when there are several ranks.
    """

    def __init__(
        self, function: Callable, subject: Subject, placement: Placement | None, plan: str | None
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._subject = function, subject
        self._placement, self._plan_name = placement, plan
        self._pins: dict[str, tuple[Sbp, ...]] = {}
        self._compiled: dict[tuple, list[Compiled]] = {}
        self._last: Compiled | None = None
        self._observed: dict[Compiled, Compiled] = {}

    # --- what a user calls -------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled_for(args, kwargs)
        self._last = compiled
        return self._run(compiled, args, kwargs)[0]

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function eagerly on this process, with the random numbers that the compiled step would draw.

        With several ranks, state that is split is gathered for the call and cut again afterwards.
        """
        world = self._world()
        key = share_key(draw_key(), world, torch.device("cpu"))
        reference = Reference(self._subject, self._function)
        if not any(isinstance(p, DTensor) for p in self._subject.params.values()):
            with op_numbers(), RandomMode(key):
                return self._function(*args, **kwargs)
        with reference.on_whole_state(write_back=True):
            return reference.run(key, args, kwargs)

    def pin(self, pattern: str, sbp: Sbp | str | Sequence[Sbp]) -> Step:
        """Fixes how parameters, buffers, inputs or results lie; the plan fills in the rest.

        Args:
            pattern: a name, or a pattern with `*`, such as "*.wte.weight", "batch.0.input_ids" or "result".
            sbp: a layout such as "S(0)" or "(S(0), B)": one SBP per axis of the placement.

        Raises:
            LayoutError: the number of SBPs is not the number of axes. What matches nothing or does not fit is
                reported when the step is compiled.
        """
        layout = parse(sbp) if isinstance(sbp, str) else tuple(sbp) if isinstance(sbp, Sequence) else (sbp,)
        num_axes = self._devices(self._world()).num_axes
        if len(layout) != num_axes:
            raise LayoutError(
                f"pin {pattern!r} gives {len(layout)} SBPs {sbp}; the placement has {num_axes} axes"
            )
        self._pins[pattern] = layout
        self._compiled.clear()
        return self

    def capture(self, *args: Any, **kwargs: Any) -> StepGraph:
        """The captured graph for these arguments; touches no memory beyond metadata, so meta models do too."""
        return trace(self._function, self._subject, args, kwargs).graph

    def compile(self, *args: Any, **kwargs: Any) -> Plan:
        """Compiles for these arguments without running; returns the plan."""
        self._last = self._compiled_for(args, kwargs)
        return self._last.plan

    def verify(self, *args: Any, steps: int = 3, **kwargs: Any) -> Report:
        """Runs the plan and the one-device reference from the same state and compares them.

        The state is afterwards what it was before. All ranks must call it.

        Args:
            args, kwargs: arguments of the step, used for every step.
            steps: how many steps to run.

        Returns:
            The largest deviations of results, gradients, parameters, buffers and optimizer state.
        """
        return compare(self, args, kwargs, steps)

    def text(self, stage: str = "plan") -> str:
        """What a stage made of the step last called: "graph", "plan" or "program" (of this process' first rank)."""
        compiled = self._require()
        if stage == "graph":
            return compiled.plan.graph.text()
        if stage == "plan":
            return compiled.plan.text()
        if stage == "program":
            return next(iter(compiled.lowered.programs.values())).text()
        raise FlowError(f"no stage {stage!r}; choose graph, plan or program")

    def stats(self) -> CommStats:
        """Collectives and bytes that this rank has sent since the step was compiled, by axis and kind."""
        return self._require().stats()

    @property
    def plan(self) -> Plan:
        """The plan of the step last called or compiled."""
        return self._require().plan

    def _require(self) -> Compiled:
        if self._last is None:
            raise FlowError(f"{self._name} has not run yet; call it once, or {self._name}.compile(batch)")
        return self._last

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", "the step")

    # --- compiling ---------------------------------------------------------------------------------

    def _world(self) -> World:
        return current_world(self._device_type())

    def _device_type(self) -> str:
        if self._placement is not None:
            return self._placement.device_type
        for param in self._subject.params.values():
            return param.device.type
        return "cpu"

    def _devices(self, world: World) -> Placement:
        if self._placement is not None:
            return self._placement
        return make_placement(self._device_type(), range(world.size), axes=("data",))

    def _compiled_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compiled:
        world = self._world()
        key = (world, *_argument_signature(args, kwargs), self._subject.signature())
        for found in self._compiled.get(key, ()):
            if found.captured.fits(self._subject):
                return found
        devices = self._devices(world)
        if self._device_type() == "meta":
            raise PlacementError(
                f"{self._name} cannot run on meta parameters, which have no values; use {self._name}.capture(batch)"
                " to look at its graph, or give the model memory with model.to_empty(device=...)"
            )
        compiled = compile_step(
            self._function,
            self._subject,
            args,
            kwargs,
            placement=devices,
            plan_name=self._plan_name or "data",
            pins=self._pins,
            ranks=world.hosted(devices),
            device=_device(devices),
            simulated=world.simulated,
        )
        self._settle(compiled, world)
        self._compiled.setdefault(key, []).append(compiled)
        if len(self._compiled) == _MANY_SIGNATURES:
            stage_logger("capture").warning(
                "%s was captured %d times, for arguments %s; pad batches to a few shapes, every new one is "
                "captured and planned again",
                self._name, len(self._compiled), "; ".join(_shapes(one) for one in self._compiled),
            )  # fmt: skip
        return compiled

    def _settle(self, compiled: Compiled, world: World) -> None:
        """Brings parameters and state into the plan's storage, and begins state that does not exist yet."""
        store = self._store(compiled, world)
        layouts = compiled.plan.inputs
        for name, slot in compiled.captured.slots.items():
            if name in compiled.plan.graph.input_of and slot.role is not Role.GRAD and slot.get() is not None:
                store.settle(slot, layouts[name])
        for name, (begins, index, key) in compiled.captured.initial.items():
            slot = compiled.captured.slots[name]
            param = self._subject.params[slot.of].detach()
            meta = compiled.plan.graph.input_of[name].meta
            local = param.to_local() if isinstance(param, DTensor) else param
            value = begins.value(index, key, local)
            if tuple(value.shape) == meta.shape or store.is_whole:
                slot.put(value)
                store.settle(slot, layouts[name])
            else:
                slot.put(store.wrapped(value, layouts[name], meta.shape))

    def _store(self, compiled: Compiled, world: World) -> Store:
        return Store(compiled.plan.placement, tuple(compiled.lowered.programs), world.simulated)

    def _observed_form(self, compiled: Compiled) -> Compiled:
        """The same plan with programs that also give out the gradients."""
        if compiled not in self._observed:
            ranks, device = list(compiled.lowered.programs), _device(compiled.plan.placement)
            lowered = lower_step(compiled.plan, ranks, device, observe=True)
            self._observed[compiled] = load(compiled.captured, lowered, self._world().simulated)
        return self._observed[compiled]

    # --- running -----------------------------------------------------------------------------------

    def _run(
        self,
        compiled: Compiled,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: torch.Tensor | None = None,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """One step; returns the user's result and whole observed outputs (if the programs give any)."""
        world = self._world()
        store = self._store(compiled, world)
        inputs = self._inputs(compiled, store, world, args, kwargs, key)
        results = compiled.engine.run(inputs)
        return self._take(compiled, store, results)

    def _inputs(
        self,
        compiled: Compiled,
        store: Store,
        world: World,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: torch.Tensor | None,
    ) -> dict[int, list[torch.Tensor]]:
        captured, planned = compiled.captured, compiled.plan
        program = next(iter(compiled.lowered.programs.values()))
        leaves = [x for x in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
        batch = dict(zip(captured.batch_names, leaves, strict=True))
        inputs: dict[int, list[torch.Tensor]] = {rank: [] for rank in store.ranks}
        device = _device(planned.placement)
        for port in program.inputs:
            layout = planned.inputs[port.name]
            role = planned.graph.input_of[port.name].role
            if role is Role.BATCH:
                values = store.cut(batch[port.name].detach(), layout)
                values = {rank: value.to(device) for rank, value in values.items()}
            elif role is Role.RANDOM:
                drawn = key if key is not None else draw_key()
                values = dict.fromkeys(store.ranks, share_key(drawn, world, device))
            elif role is Role.HYPER:
                values = dict.fromkeys(store.ranks, self._hyper(port.name, planned))
            elif role is Role.CONSTANT:
                values = store.cut(planned.graph.constants[port.name].detach().to(device), layout)
            else:
                values = store.read(captured.slots[port.name], layout)
                if port.donated and store.simulated:
                    values = {rank: value.clone() for rank, value in values.items()}
            for rank, value in values.items():
                inputs[rank].append(value)
        return inputs

    def _hyper(self, name: str, planned: Plan) -> torch.Tensor:
        for number, optimizer in enumerate(self._subject.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if self._subject.hyper_name(number, index, key) == name:
                        dtype = planned.graph.input_of[name].meta.dtype
                        return (
                            value.detach()
                            if isinstance(value, torch.Tensor)
                            else torch.tensor(value, dtype=dtype)
                        )
        raise AssertionError(f"no hyper-parameter {name}")

    def _take(
        self, compiled: Compiled, store: Store, results: Mapping[int, Sequence[torch.Tensor]]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        captured, planned = compiled.captured, compiled.plan
        program = next(iter(compiled.lowered.programs.values()))
        outputs = {one.name: one for one in planned.graph.outputs}
        taken = {
            port.name: {rank: values[position] for rank, values in results.items()}
            for position, port in enumerate(program.outputs)
        }
        own: dict[str, torch.Tensor] = {}
        observed: dict[str, torch.Tensor] = {}
        for name, values in taken.items():
            one, layout = outputs[name], planned.outputs[name]
            if not one.replaces:
                target = observed if one.observed else own
                target[name] = self._handed_out(store, values, layout, one.meta.shape, name)
        for name, values in taken.items():
            one = outputs[name]
            if one.replaces:
                store.write(captured.slots[one.replaces], planned.outputs[name], values, one.meta.shape)
        for name in captured.cleared_grads:
            captured.slots[name].put(None)
        leaves = [None if name is None else own[name] for name in captured.result_names]
        return pytree.tree_unflatten(leaves, captured.out_spec), observed

    def _handed_out(
        self,
        store: Store,
        values: Mapping[int, torch.Tensor],
        layout: NdSbp,
        shape: tuple[int, ...],
        name: str,
    ) -> torch.Tensor:
        """A result as the user gets it: never memory that the next step will write."""
        if store.simulated:
            return store.joined(values, layout, name).clone()
        local = next(iter(values.values()))
        if store.placement.size == 1 or not shape:
            return local.clone()
        return store.wrapped(local.clone(), layout, shape)


def _device(placement: Placement) -> torch.device:
    if placement.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(placement.device_type, torch.accelerator.current_device_index())


def _argument_signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
    return (str(spec), tuple(_leaf_signature(leaf) for leaf in leaves), autocast, torch.is_grad_enabled())


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        layout = leaf.placements if isinstance(leaf, DTensor) else None
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, layout)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf


def _shapes(key: tuple) -> str:
    leaves = key[2]
    return ", ".join(str(list(one[0])) if isinstance(one, tuple) and one else repr(one) for one in leaves)
