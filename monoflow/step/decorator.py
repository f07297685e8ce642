"""The decorator and the compiled step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..checkpoint import Group
from ..compiler import (
    CommStats,
    Compiled,
    Host,
    Library,
    Plan,
    StepGraph,
    Subject,
    World,
    compile_step,
    current_world,
    load,
    lower_step,
    share_key,
    subject_of,
    trace,
)
from ..errors import CaptureError, FlowError, LayoutError, NonFiniteError, PlacementError, PlanError
from ..mesh import Placement
from ..mesh import placement as make_placement
from ..sbp.layout import Broadcast, Partial, Sbp, Split
from ..sbp.random_mode import draw_key
from ..sbp.vocabulary import parse
from ..tensor import device_mesh
from .agree import check_same, digest_of
from .binding import Binding
from .intercept import interception
from .materialize import fill, fill_attributes, meant_device
from .options import Options, checked
from .pending import synchronize, untouched
from .planning import Wish, make_plan
from .reference import Reference, live_state
from .refusal import Refusals
from .report import Report, compare
from .settle import agree, settle
from .store import Store
from .versions import PARTS, Kind, Versions, kind_of

#: The step that is being captured in this thread, if any.
_CAPTURING: ContextVar[str] = ContextVar("step that is captured", default="")
#: torch traces one function at a time.
_ONE_CAPTURE = threading.RLock()


def graph(
    *things: Any,
    placement: Placement | Literal["auto"] | None = None,
    plan: str | Path | None = None,
    memory: int | str | None = None,
    batch_stats: str = "global",
    micro_batches: int | Literal["auto"] = "auto",
    balance: Literal["static", "dynamic"] = "static",
    stages: int | None = None,
    schedule: Literal["1f1b", "zero-bubble"] = "1f1b",
    compile: Literal["background", "ahead", "off"] = "off",
    on_nan: Literal["raise", "skip", "rollback"] = "raise",
) -> Callable[[Callable], Step]:
    """Makes a step function a compiled step: captured once, planned over all devices, run as a program.

    Args:
        things: the modules and optimizers that the step uses.
        placement: the devices and their grid; "auto" (the default) for all ranks of the job, in the grid that
            suits the plan.
        plan: "auto" (the default) for the fastest plan that a search finds; a template, "data", "zero",
            "tensor", "pipeline", or one an axis as in "pipeline x data"; or the `Path` of a saved plan.
        memory: what a rank may hold at any time during a step, in bytes or as "80GB", for "auto". Left out:
            most of an accelerator's memory, and no limit on a CPU.
        batch_stats: batch norm in training takes its statistics over the "global" batch, the same on every
            layout, or over the rows of a rank alone ("local", as DistributedDataParallel does; the running
            statistics are the ranks' mean, and `plan` is "data" unless given). "local" changes the numbers
            with the layout, so that `verify` is not expected to hold.
        micro_batches: in how many parts the batch is walked, one after the other, with the same numbers: less
            is held at a time, and gradients add up in place. "auto" (the default) is one, or where nothing
            fits `memory` then, the fewest that do. An op that needs the whole batch at once is refused.
        balance: "static" gives every rank its own micro-batches; under "dynamic" ranks pull them from one
            stream as they are free, so that a slow or busy one does fewer, with the same sums. For plans
            whose ranks do not meet within a micro-batch: `plan` is "data" unless given.
        stages: how many a pipeline has; one a rank of its axis unless given. With twice as many, every rank
            has two (stage s lies at rank s mod p), which takes turns, and idles half as long ("interleaved
            1F1B").
        schedule: how the stages of a pipeline go through the micro-batches: "1f1b" (the default), one forward
            and one backward in turns; "zero-bubble" leaves the gradients of weights for when a stage would
            idle, and keeps what they read until then (ZB-H1).
        compile: "background" runs the first steps op by op, compiles the program beside them and goes on with
            that when it is ready; "ahead" compiles before the first step; "off" (the default) never does. The
            numbers are the same within rounding.
        on_nan: what becomes of a step whose loss (a result that a backward pass began at, or a part or a copy
            of it) or gradients are NaN or Inf; it changes no state in any case. "raise" (the default) names
            the op that made the first one; "skip" goes on with the next batch (`num_skipped` counts);
            "rollback" loads the last snapshot of the step's `flow.checkpointer` before it does. Under
            "raise", gradients are looked at where the step takes a norm of them anyway, to clip them; else
            only through the next loss.

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
    options = checked(
        placement, plan, memory, batch_stats, micro_batches, balance, stages, schedule, compile, on_nan
    )
    subject = subject_of(things)

    def decorate(function: Callable) -> Step:
        return Step(function, subject, options)

    return decorate


class Step:
    """A step function that is captured, planned and compiled at its first call with arguments of a kind.

    Call it as the function it was made from. Scalars come back as plain tensors, equal on all ranks; larger
    results as global tensors (`out.full_tensor()` gathers) when there are several ranks.
    """

    def __init__(self, function: Callable, subject: Subject, options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function, self._subject, self._options = function, subject, options
        self._library = Library()
        self._pins: dict[str, tuple[Sbp, ...]] = {}
        self._stages: dict[str, int] = {}
        self._versions = Versions(self.name)
        self._lock = threading.RLock()
        self._agreed: tuple[Kind, dict[str, int]] | None = None
        self._last: Compiled | None = None
        self._forms: dict[tuple[Compiled, bool], Compiled] = {}
        self._bindings: dict[Compiled, Binding] = {}
        self._loaded_state: Callable[[], bool] | None = None
        self.refusals = Refusals(self.name, options.on_nan)
        #: How many steps were taken, before what a checkpoint was loaded from too.
        self.num_steps = 0
        #: Through which ranks agree when they save and load; made when they first do.
        self.save_group: Group | None = None

    # --- what a user calls -------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._entered():
            before = self._followed_by(args, kwargs)
            if before is None:
                synchronize()
                self.refusals.settle()
            try:
                compiled = self._compiled_for(args, kwargs)
            except BaseException:
                synchronize()  # if the step before has failed, on other ranks first, that is what to say
                raise
            if compiled is not before:
                synchronize()
            self._last = compiled
            try:
                result = self._begun(compiled, args, kwargs)
            except NonFiniteError:
                self.num_steps += 1  # as on lanes, where it is refused after it was counted
                raise
            self.num_steps += 1
            return result

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function eagerly, with the random numbers that the compiled step would draw.

        With several ranks, every one runs the whole batch, so all of them must call it; state that is split
        is gathered for the call and cut again afterwards.
        """
        synchronize()
        self.refusals.settle()
        self._fill_whole()
        self.begin_loaded_state()
        key = share_key(draw_key(), self._world(), torch.device("cpu"))
        reference = Reference(self._subject, self._function)
        is_split = any(isinstance(value, DTensor) for value in live_state(self._subject).values())
        with reference.on_whole_state(write_back=True) if is_split else nullcontext():
            result = reference.call(key, args, kwargs)
        self.num_steps += 1
        return result

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
        if not all(isinstance(one, (Split, Broadcast, Partial)) for one in layout):
            raise LayoutError(f"pin {pattern!r}: {sbp!r} is not a layout; write S(0), B, or (S(0), B)")
        num_axes = self._devices(self._world()).num_axes
        if len(layout) != num_axes:
            raise LayoutError(
                f"pin {pattern!r} gives {len(layout)} SBPs {sbp}; the placement has {num_axes} axes"
            )
        self._pins[pattern] = layout
        self.forget_compiled()
        return self

    def stage(self, pattern: str, stage: int) -> Step:
        """Fixes at which stage of a pipeline modules lie: forward, backward, update and parameters of them.

        Args:
            pattern: a module's name, or a pattern with `*` and ranges of numbers: "layers.0-5" is layers.0 to
                layers.5 and all that is in them.
            stage: from 0. What matches nothing, is not there or would send forward work back to an earlier
                stage is reported when the step is compiled.

        Raises:
            PlanError: the stage is no such number.
        """
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            raise PlanError(f"stage {pattern!r} at {stage!r}: stages are numbered from 0")
        self._stages[pattern] = stage
        self.forget_compiled()
        return self

    def capture(self, *args: Any, **kwargs: Any) -> StepGraph:
        """The captured graph for these arguments; reads no values, so meta models do."""
        fill_attributes(self._subject)
        options = self._options
        return trace(
            self._function, self._subject, args, kwargs, options.batch_stats, options.checks_gradients
        ).graph

    def compile(self, *args: Any, **kwargs: Any) -> Plan:
        """Compiles for these arguments without running; returns the plan."""
        synchronize()
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
        synchronize()
        return compare(self, args, kwargs, steps)

    def text(self, stage: str = "plan") -> str:
        """What a stage made of the step last called.

        Args:
            stage: "graph", "plan" or "program" (of this process' first rank).
        """
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
        synchronize()
        return self._require().stats()

    @property
    def num_skipped(self) -> int:
        """How many steps changed nothing, because their loss or gradients were not finite."""
        synchronize()
        return self.refusals.count

    @property
    def plan(self) -> Plan:
        """The plan of the step last called or compiled."""
        return self._require().plan

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the step last called or compiled; None before that."""
        return self._last.plan if self._last is not None else None

    @property
    def subject(self) -> Subject:
        """The models and optimizers that the step works on."""
        return self._subject

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the job that run the step as processes. Joins them if they are not yet."""
        world = self._world()
        if world.simulated or interception() is not None:
            return (0,)
        return self._devices(world).ranks

    def settled(self) -> int:
        """How many steps were taken; where a refused one sends the step back, it has been by then."""
        if self._options.on_nan == "rollback":
            synchronize()
            self.refusals.settle()
        return self.num_steps

    def load_later(self, begin: Callable[[], bool] | None) -> None:
        """Has `begin` called once optimizer state has begun; it returns whether it began some itself."""
        self._loaded_state = begin

    def begin_loaded_state(self) -> bool:
        """Loads the optimizer state that waits for its layout; what has not begun begins as whole tensors."""
        begin, self._loaded_state = self._loaded_state, None
        return begin is not None and begin()

    def _require(self) -> Compiled:
        if self._last is None:
            raise FlowError(f"{self.name} has not run yet; call it once, or {self.name}.compile(batch)")
        return self._last

    @property
    def plan_name(self) -> str | None:
        """The plan, or the path of a saved one, that was asked for; None where monoflow chooses."""
        return str(self._options.plan) if self._options.plan is not None else None

    @property
    def pins(self) -> Mapping[str, tuple[Sbp, ...]]:
        """What was pinned."""
        return MappingProxyType(self._pins)

    @property
    def name(self) -> str:
        """The function's own name."""
        return getattr(self._function, "__name__", "the step")

    # --- compiling ---------------------------------------------------------------------------------

    def _world(self) -> World:
        return current_world(self._device_type())

    def _device_type(self) -> str:
        if self._options.placement is not None:
            return self._options.placement.device_type
        for param in self._subject.params.values():
            with untouched():
                return meant_device(param).type
        return "cpu"

    def _devices(self, world: World) -> Placement:
        if (taken := interception()) is not None:
            return taken.placement
        if self._options.placement is not None:
            return self._options.placement
        return make_placement(self._device_type(), range(world.size), axes=("data",))

    def _mesh(self, devices: Placement, world: World) -> DeviceMesh | None:
        return None if world.simulated or devices.size == 1 else device_mesh(devices)

    def _compiled_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], observe: bool = False
    ) -> Compiled:
        """What was compiled for such arguments, compiled now if nothing was.

        Args:
            observe: the form whose programs also give out the gradients.
        """
        if (taken := interception()) is not None:
            taken.take(self, args, kwargs)
        world = self._world()
        if self._subject.refresh():
            self.forget_compiled()
        with untouched():  # a step that is on its way changes values alone
            kind, devices = kind_of(world, self._subject, args, kwargs), self._devices(world)
            several = not world.simulated and devices.size > 1
            if several:
                self._same_call(kind, devices, world.rank)
            found = self._versions.find(kind, self._subject)
        if found is not None:
            return self._form(found, observe)
        synchronize()
        if self._device_type() == "meta":
            raise PlacementError(
                f"{self.name} cannot run on meta parameters, which have no values; look at its graph with "
                f"{self.name}.capture(batch), build the model in flow.lazy(), or give it memory with "
                "model.to_empty(device=...)"
            )
        fill_attributes(self._subject)
        with _ONE_CAPTURE, self._capturing():
            compiled = self._compile(args, kwargs, devices, world, observe)
        self._forms[compiled, observe] = compiled
        placement = compiled.plan.placement
        if fill(self._subject, self._bound(compiled).store, compiled.plan.inputs, _device(placement)):
            kind = kind_of(world, self._subject, args, kwargs)
        if several:
            agree(compiled, args, kwargs, world.rank)
        settle(compiled, self._subject, self._bound(compiled).store)
        for old in self._versions.add(kind, compiled):
            self._forget(old)
        if self.begin_loaded_state():  # of more state than was captured
            return self._compiled_for(args, kwargs, observe)
        return compiled

    def _compile(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        devices: Placement,
        world: World,
        observe: bool,
    ) -> Compiled:
        options = self._options
        wish = Wish(
            options.placement, options.plan_or_default, options.memory, self._pins, self._stages,
            options.micro_batches, options.balance, options.stages, options.zero_bubble,
        )  # fmt: skip
        before = self._last.plan if self._last is not None else None
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        batch = [one for one in leaves if isinstance(one, torch.Tensor)]

        def host(placement: Placement) -> Host:
            return Host(world.hosted(placement), _device(placement), self._mesh(placement, world))

        return compile_step(
            self._function,
            self._subject,
            args,
            kwargs,
            planner=lambda captured: make_plan(captured, wish, devices, world, before, batch),
            host=host,
            batch_stats=options.batch_stats,
            every_gradient=options.checks_gradients,
            observe=observe,
            mode=options.mode,
            library=self._library,
        )

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        token = _CAPTURING.set(self.name)
        try:
            yield
        finally:
            _CAPTURING.reset(token)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Within: this thread alone runs the step. Refuses a step that is called inside another."""
        if _CAPTURING.get():
            raise CaptureError(
                f"{self.name} is called inside {_CAPTURING.get()}, which is being captured; call the "
                f"function that it was made from, {self.name}.__wrapped__(...), or one step after the other"
            )
        with self._lock:
            yield

    def _same_call(self, kind: Kind, devices: Placement, rank: int) -> None:
        """Sees to it that every rank makes the same kind of call. Off the CPU only when it is a new one."""
        if self._agreed is None or self._agreed[0] != kind:
            self._agreed = kind, {text: digest_of(getattr(kind, part)) for part, text in PARTS.items()}
        elif devices.device_type != "cpu":
            return
        rates = tuple(
            float(group["lr"]) for optimizer in self._subject.optimizers for group in optimizer.param_groups
        )
        parts = self._agreed[1] | {"the learning rates": digest_of(rates)}
        check_same(parts, f"call {self.name} differently", devices, rank)

    def _fill_whole(self) -> None:
        """Gives a lazily built model its memory, whole."""
        world = self._world()
        devices = self._devices(world)
        fill(self._subject, Store(devices, world.hosted(devices), world.simulated), {}, _device(devices))

    def forget_compiled(self) -> None:
        """Forgets what was compiled: it is for other modules, pins or states."""
        for known in (self._versions, self._forms, self._bindings):
            known.clear()
        self._last = None

    def _forget(self, compiled: Compiled) -> None:
        for form in (self._forms.pop((compiled, observe), None) for observe in (False, True)):
            if form is not None:
                self._bindings.pop(form, None)

    def _bound(self, compiled: Compiled) -> Binding:
        """How a compiled step reads and writes the live objects."""
        if compiled not in self._bindings:
            device = _device(compiled.plan.placement)
            self._bindings[compiled] = Binding(compiled, self._subject, self._world(), device, self.refusals)
        return self._bindings[compiled]

    def _form(self, compiled: Compiled, observe: bool) -> Compiled:
        """The same plan with programs that give out the gradients too, or that do not."""
        if (compiled, observe) not in self._forms:
            ranks, device = list(compiled.lowered.programs), _device(compiled.plan.placement)
            lowered = lower_step(compiled.plan, ranks, device, observe, self._options.mode, self._library)
            self._forms[compiled, observe] = load(
                compiled.captured, lowered, self._mesh(compiled.plan.placement, self._world())
            )
        return self._forms[compiled, observe]

    # --- running -----------------------------------------------------------------------------------

    def _followed_by(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compiled | None:
        """What is on its way, if it is this step and such a call need not wait for it."""
        bound = self._bindings.get(self._last) if self._last is not None else None
        return self._last if bound is not None and bound.is_followed(args, kwargs) else None

    def _begun(self, compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One step; where it has lanes, its result may still be on its way (see `pending`)."""
        if not compiled.engine.runs_beside:
            return self._run(compiled, args, kwargs)[0]
        with torch.no_grad():
            return self._bound(compiled).begin(args, kwargs)

    def _run(
        self,
        compiled: Compiled,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: torch.Tensor | None = None,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """One step; returns the user's result and whole observed outputs (if the programs give any)."""
        bound = self._bound(compiled)
        with torch.no_grad():
            inputs = bound.read(args, kwargs, key)
            kept = bound.kept(inputs)
            ticket = compiled.engine.start(inputs)
            del inputs
            return bound.take(ticket.result(), kept)


def _device(placement: Placement) -> torch.device:
    if placement.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(placement.device_type, torch.accelerator.current_device_index())
