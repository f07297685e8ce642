"""Which plan a step runs by: what was asked for, what is stored already, and one plan for all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..compiler import AUTO, Captured, Plan, Role, World, fingerprint, plan, with_prediction
from ..errors import FlowError, PlanError
from ..mesh import Placement
from ..mesh import placement as make_placement
from ..sbp.layout import NdSbp
from ..tensor import from_placements, home_of
from .agree import check_same, digest_of


@dataclass(frozen=True)
class Wish:
    """What a user asks of a step's plan.

    Attributes:
        placement: the devices; None for the best grid of all of them.
        plan: "auto", a template, or the path of a saved plan.
        memory: bytes that a rank may hold; 0 for no limit, None for what an accelerator has.
        pins: pattern -> layout, one SBP per axis.
        stages: pattern of module names -> the stage of a pipeline that they lie at.
        micro_batches: in how many the batch is walked; None to let the planner choose.
        balance: whether every rank walks its own, "static", or pulls them as it is free, "dynamic".
        num_stages: of a pipeline; None for one a rank.
        zero_bubble: whether its stages compute the gradients of weights when nobody waits for them.
    """

    placement: Placement | None
    plan: str | Path
    memory: int | None
    pins: Mapping[str, NdSbp]
    stages: Mapping[str, int]
    micro_batches: int | None
    balance: str
    num_stages: int | None = None
    zero_bubble: bool = False


def make_plan(
    captured: Captured,
    wish: Wish,
    line: Placement,
    world: World,
    before: Plan | None,
    batch: Sequence[torch.Tensor],
) -> Plan:
    """The plan of a captured step, the same on every rank: the first one makes it.

    Args:
        batch: the tensors among the step's arguments. One that comes in parts is read as it is cut.
        line: all devices in one line, or the placement that was asked for.
        before: a plan by which this step ran before; what is stored stays as that stores it.

    Raises:
        PlanError, LayoutError: there is no such plan; the same error on all ranks.
    """

    def make() -> Plan:
        if isinstance(wish.plan, Path):
            return _loaded(wish.plan, captured, line)
        grids, stored = _as_stored(captured, before, wish, world)
        parts = _in_parts(captured, batch, line) if wish.plan == AUTO and not wish.pins else {}
        if parts and (not grids or list(grids) == [line]):
            grids, stored = [line], {**stored, **parts}
        pins = {**stored, **wish.pins}
        where = grids or _grids(wish, line, world)
        free = wish.placement is None and not grids
        return plan(
            captured,
            where,
            wish.plan,
            pins,
            wish.memory,
            wish.stages,
            wish.micro_batches,
            wish.balance,
            refine=free,
            num_stages=wish.num_stages,
            zero_bubble=wish.zero_bubble,
        )

    if world.simulated or line.size == 1:
        return make()
    digest = {"the captured graphs": digest_of(fingerprint(captured.graph))}
    check_same(digest, f"captured {captured.graph.name} differently", line, world.rank)
    return _shared(make, captured, line, world)


def _loaded(path: Path, captured: Captured, line: Placement) -> Plan:
    made = with_prediction(Plan.load(path, captured.graph))
    if made.placement.size != line.size or made.placement.device_type != line.device_type:
        raise PlanError(f"the plan in {path} is for {made.placement}, this job has {line}; plan again")
    return made


def _grids(wish: Wish, line: Placement, world: World) -> Sequence[Placement]:
    """The grids of the devices that a search looks at: one line, and two axes of every shape."""
    if wish.placement is not None or wish.plan != AUTO or wish.pins:
        return [line]
    return [line, *_rectangles(line, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))]


def _rectangles(line: Placement, host: int) -> Iterator[Placement]:
    """Two axes: with several hosts, hosts by the devices of one; else from square to long."""
    size = line.size
    if host < size and size % host == 0 and host > 1:
        shapes = [(size // host, host)]
    else:
        shapes = [(a, size // a) for a in range(2, int(size**0.5) + 1) if size % a == 0]
    for outer, inner in shapes:
        rows = [list(line.ranks[i * inner : (i + 1) * inner]) for i in range(outer)]
        yield make_placement(line.device_type, rows, axes=("outer", "inner"))


def _as_stored(
    captured: Captured, before: Plan | None, wish: Wish, world: World
) -> tuple[Sequence[Placement], dict[str, NdSbp]]:
    """The grid and the layouts in which state lies already: it is not moved to and fro between steps."""
    if wish.plan != AUTO:
        return (), {}
    inputs = captured.graph.input_of
    state = {key for key, one in inputs.items() if one.role in (Role.PARAM, Role.STATE, Role.BUFFER)}
    if before is not None:
        kept = {key: one for key, one in before.inputs.items() if key in state}
        return [before.placement], kept
    live = {key: slot.get() for key, slot in captured.slots.items() if key in state}
    cut = {
        key: one for key, one in live.items() if isinstance(one, DTensor) and home_of(one.device_mesh) is None
    }
    if not cut or world.simulated:
        return (), {}
    mesh = next(iter(cut.values())).device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    where = make_placement(mesh.device_type, mesh.mesh.tolist(), axes=names)
    if wish.placement is not None and wish.placement != where:
        return (), {}
    return [where], {
        key: from_placements(one.placements) for key, one in cut.items() if one.device_mesh == mesh
    }


def _in_parts(captured: Captured, batch: Sequence[torch.Tensor], line: Placement) -> dict[str, NdSbp]:
    """How the batch's tensors lie of which a rank holds a part, such as those of `flow.stream`."""
    return {
        name: from_placements(one.placements)
        for name, one in zip(captured.batch_names, batch, strict=True)
        if isinstance(one, DTensor)
        and name in captured.graph.input_of
        and one.device_mesh.ndim == line.num_axes
        and tuple(one.device_mesh.mesh.shape) == line.shape
        and tuple(one.device_mesh.mesh.flatten().tolist()) == line.ranks
    }


def _shared(make: Callable[[], Plan], captured: Captured, line: Placement, world: World) -> Plan:
    """The first rank's plan on all of them: it is sent as its JSON, an error as its text."""
    first = line.ranks[0]
    if world.rank == first:
        try:
            made = make()
        except FlowError as error:
            _send(f"{type(error).__name__}: {error}", failed=True, line=line, world=world)
            raise
        _send(made.dumps(), failed=False, line=line, world=world)
        return made
    text, failed = _send("", failed=False, line=line, world=world)
    if failed:
        raise PlanError(f"rank {first} could not plan: {text}")
    return with_prediction(Plan.parse(text, captured.graph, f"the plan of rank {first}"))


def _send(text: str, *, failed: bool, line: Placement, world: World) -> tuple[str, bool]:
    """Broadcasts a text and a flag from the first rank of a placement of all ranks."""
    device = torch.device(line.device_type)
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    head = torch.tensor([data.numel(), int(failed)], device=device)
    dist.broadcast(head, line.ranks[0])
    size, flag = head.tolist()
    if world.rank != line.ranks[0]:
        data = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(data, line.ranks[0])
    return bytes(data.cpu().tolist()).decode(), bool(flag)
