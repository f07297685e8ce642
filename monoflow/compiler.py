"""Read this first: a step function becomes results in four stages.

    trace -> plan -> lower -> load

Each stage returns one frozen object that its own verifier has checked; `text()` shows it.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from .capture.subject import Slot, Subject, subject_of
from .capture.trace import Captured, capture
from .config import SETTINGS
from .errors import PlanError
from .graph.passes import GRADIENTS, PASSES, guard
from .graph.step_graph import Input, Output, Role, StepGraph, info_of
from .graph.verify import verify
from .log import stage_logger
from .lower.building import check_mode, describer, use_compiled
from .lower.compiled import Library
from .lower.lower import Lowered, lower
from .mesh import Placement
from .plan.balance import balanced
from .plan.checked import Checked, Registers
from .plan.choose import best_of
from .plan.devices import default_limit, machine_for
from .plan.parts import Parts
from .plan.plan import Plan, fingerprint
from .plan.planner import AUTO, plan_step
from .plan.predict import predict
from .runtime.actors import Engine
from .runtime.finding import Origin
from .runtime.firing import Homes
from .runtime.lanes import Ticket
from .runtime.launch import before_leaving
from .runtime.liveness import needed_bytes, verify_live
from .runtime.network import Network
from .runtime.observe import About, observing
from .runtime.transport import CommStats, DistTransport, SimTransport
from .runtime.world import World, current_world, share_key

__all__ = [
    "AUTO",
    "GRADIENTS",
    "Captured",
    "CommStats",
    "Compiled",
    "Homes",
    "Host",
    "Input",
    "Library",
    "Origin",
    "Output",
    "Plan",
    "Role",
    "Slot",
    "StepGraph",
    "Subject",
    "Ticket",
    "World",
    "before_leaving",
    "check_mode",
    "compile_step",
    "current_world",
    "fingerprint",
    "load",
    "lower_step",
    "plan",
    "share_key",
    "subject_of",
    "trace",
    "with_prediction",
]


class Host(NamedTuple):
    """What this process is to a placement.

    Attributes:
        ranks: those that it hosts: one, or all in a simulation.
        device: where its tensors live.
        mesh: torch's device mesh of the placement; None where this process hosts all ranks.
    """

    ranks: Sequence[int]
    device: torch.device
    mesh: DeviceMesh | None


@dataclass(frozen=True, eq=False)
class Compiled:
    """A step that is ready to run: what every stage made of it, and the engine that runs it."""

    captured: Captured
    plan: Plan
    lowered: Lowered
    engine: Engine
    transport: DistTransport | SimTransport

    def stats(self) -> CommStats:
        """Collectives and bytes that this process' (first) rank has sent so far, by axis and kind."""
        return _stats(self.transport, min(self.lowered.programs))


def _stats(transport: DistTransport | SimTransport, rank: int) -> CommStats:
    return transport.stats(rank) if isinstance(transport, SimTransport) else transport.stats()


def compile_step(
    function: Callable,
    subject: Subject,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    planner: Callable[[Captured], Plan],
    host: Callable[[Placement], Host],
    batch_stats: str = "global",
    every_gradient: bool = False,
    observe: bool = False,
    mode: str = "off",
    library: Library | None = None,
) -> Compiled:
    """Compiles one step function for one signature of its arguments.

    Args:
        planner: makes the plan, with `plan` below, and sees to it that all ranks have the same.
        host: what this process is to a placement.
        batch_stats: whether batch norm in training is over the "global" batch, or a rank's "local" rows.
        every_gradient: as `trace` takes it.
        observe, mode, library: as `lower_step` takes them.
    """
    captured = trace(function, subject, args, kwargs, batch_stats, every_gradient)
    planned = planner(captured)
    here = host(planned.placement)
    lowered = lower_step(planned, here.ranks, here.device, observe, mode, library)
    return load(captured, lowered, here.mesh)


@contextmanager
def _keeping() -> Iterator[None]:
    """Within: no garbage is looked for.

    A graph, and plans of it, are many objects that nearly all stay: to look through them again and again took
    a third of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_keeping()
def trace(
    function: Callable,
    subject: Subject,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_stats: str = "global",
    every_gradient: bool = False,
) -> Captured:
    """Captures the step and runs the graph passes.

    Args:
        every_gradient: whether state may change only if all gradients are finite, whatever that takes.
    """
    log = stage_logger("capture")
    start = time.perf_counter()
    code = getattr(function, "__code__", None)
    source = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    name = getattr(function, "__name__", "step")
    captured = capture(function, subject, args, kwargs, name=name, source=source, batch_stats=batch_stats)
    graph = replace(verify(captured.graph, "capture"), draft=True)  # nobody else has it
    cleaned_first = {"clean": PASSES["clean"], "guard": guard(captured.losses, every_gradient)}
    for key, one in {**cleaned_first, **PASSES}.items():
        graph = verify(one(graph), key)
        log.debug("after %s: %d nodes", key, len(graph.graph.nodes))
    log.info("captured %s: %d nodes in %.2f s", name, len(graph.graph.nodes), time.perf_counter() - start)
    return replace(captured, graph=replace(graph, draft=False))


@_keeping()
def plan(
    captured: Captured,
    placements: Sequence[Placement],
    name: str,
    pins: Mapping[str, tuple],
    memory: int | None = None,
    stages: Mapping[str, int] | None = None,
    micro_batches: int | None = None,
    balance: str = "static",
    *,
    refine: bool = False,
    num_stages: int | None = None,
    zero_bubble: bool = False,
) -> Plan:
    """Plans the captured step; warns of every op that has no rule, with what its replication costs.

    Args:
        placements: grids of the same devices to choose from.
        name: "auto", or a template.
        memory: bytes that a rank may hold; 0 for no limit, None for what an accelerator has.
        stages: per pattern of module names, the stage of a pipeline that they lie at.
        micro_batches: in how many the batch is walked; None to let the planner choose.
        balance: whether every rank walks its own, "static", or pulls them as it is free, "dynamic".
        refine: whether "auto" may make a part of a grid's outermost axis an axis of a pipeline's stages.
        num_stages: of a pipeline; one a rank of its axis when left out.
        zero_bubble: whether a pipeline's stages compute the gradients of weights when nobody waits for them.
    """
    log = stage_logger("plan")
    start = time.perf_counter()
    candidates, refused = [], []
    for placement in placements:
        machine = machine_for(placement) if placement.size > 1 and name == AUTO else None
        limit = memory if memory is not None else default_limit(placement)
        try:
            one = plan_step(
                captured.graph,
                placement,
                name,
                pins,
                machine,
                limit=limit,
                stages=stages,
                micro_batches=micro_batches,
                refine=refine,
                num_stages=num_stages,
                zero_bubble=zero_bubble,
                seconds=SETTINGS.plan_seconds,
            )
            candidates.append(with_prediction(balanced(one)) if balance == "dynamic" else one)
        except PlanError as error:  # another grid may fit
            refused.append(error)
    if not candidates:
        raise refused[0]
    made = best_of(candidates)
    nodes = {node.name: node for node in made.graph.calls()}
    if made.placement.size > 1:
        for key, num_bytes in made.unruled.items():
            info = info_of(nodes[key])
            log.warning(
                "%s has no rule: it runs whole on every rank (%s bytes each), at %s %s",
                nodes[key].target, f"{num_bytes:,}", info.source, info.module,
            )  # fmt: skip
    seconds = time.perf_counter() - start
    log.info("planned %s as %r on %s in %.2f s", made.graph.name, name, made.placement, seconds)
    if made.has_time:
        log.info("the batch is walked in %d micro-batches", made.micro_batches)
    if made.search is not None and made.predicted is not None:
        log.info(
            "predicted %.4g s a step, %s bytes at the peak; no plan is more than %.1f %% faster before moves "
            "hide behind compute",
            made.predicted.seconds, f"{made.predicted.peak_bytes:,}", 100 * made.search.gap,
        )  # fmt: skip
        if made.search.left_out:
            log.info(
                "%d plans were not looked at: that would take more than MONOFLOW_PLAN_SECONDS=%d of work",
                made.search.left_out, SETTINGS.plan_seconds,
            )  # fmt: skip
    return made


def with_prediction(made: Plan) -> Plan:
    """A plan that was read back, with what a step will cost on the machine that it was made for."""
    return made if made.machine is None else replace(made, predicted=predict(made, made.machine))


def lower_step(
    made: Plan,
    ranks: Sequence[int],
    device: torch.device,
    observe: bool = False,
    mode: str = "off",
    library: Library | None = None,
) -> Lowered:
    """Lowers a plan for some ranks.

    Args:
        observe: whether the programs also give out the gradients that the optimizers see.
        mode: when tasks are compiled: "background", "ahead" or "off".
        library: compiled code that the tasks may use and add to.
    """
    log = stage_logger("lower")
    start = time.perf_counter()
    lowered = lower(made, ranks, device, observe)
    num_tasks = len(next(iter(lowered.programs.values())).tasks)
    log.info("lowered %s: %d tasks in %.2f s", made.graph.name, num_tasks, time.perf_counter() - start)
    return use_compiled(lowered, mode, library)


def load(captured: Captured, lowered: Lowered, mesh: DeviceMesh | None) -> Compiled:
    """Connects programs to a transport: over torch's device mesh, or within this process if there is none."""
    placement = lowered.plan.placement
    ranks = list(lowered.programs)
    transport = SimTransport(placement) if mesh is None else DistTransport(placement, ranks[0])
    lanes = SETTINGS.lanes and lowered.plan.overlaps
    engine = Engine(lowered.programs, placement, transport, describer(lowered.plan.graph), lanes)
    if (observer := observing()) is not None:

        def sent() -> dict[str, int]:
            stats = _stats(transport, ranks[0])
            return {axis: stats.num_bytes(axis=axis) for axis in placement.axes}

        observer.attach(engine, _about(lowered.plan), sent)
    planned = (
        replace(lowered.plan, memory=_checked(lowered, engine.network)) if SETTINGS.verify else lowered.plan
    )
    return Compiled(captured, planned, lowered, engine, transport)


def _checked(lowered: Lowered, network: Network) -> Checked:
    """What the programs need; asserts that they cannot deadlock.

    Of the ranks that are not here, the first rank of the job checks one of every stage, whose programs meet
    those that are: ranks of one stage run the same tasks.
    """
    placement = network.placement
    stages = [placement.rank_at(one) for one in Parts(lowered.schedule).stages(placement.shape)]
    if not set(stages) <= set(network.programs) and placement.ranks[0] in network.programs:
        observes = any(one.observed for one, _ in lowered.schedule.outputs)
        whole = lower(lowered.plan, stages, torch.device(placement.device_type), observes)
        network = verify_live(Network(whole.programs, placement, network.one_order))
    num_bytes = needed_bytes(network)
    return Checked(
        {
            rank: Registers(
                len(program.registers),
                num_bytes[rank],
                max((one.slots for one in program.registers), default=1),
            )
            for rank, program in network.programs.items()
        }
    )


def _about(planned: Plan) -> About:
    """What `monoflow top` says of a step: the first tensors of its batch tell how large that is."""
    batch = [one.meta for one in planned.graph.inputs if one.role is Role.BATCH and one.meta.shape]
    texts = [meta.shape for meta in batch if len(meta.shape) == 2 and not meta.dtype.is_floating_point]
    return About(
        planned.graph.name,
        batch[0].shape[0] if batch else 0,
        math.prod(texts[0]) if texts else 0,
        planned.predicted.peak_bytes if planned.predicted is not None else 0,
    )
