"""The cut of a step into the stages of a pipeline: forward, backward and update of a layer together.

Forward ops are cut, in the order in which they run, into as many stretches as an axis has ranks, or as often
as many: stage s lies at rank s mod p, so that each of p ranks has several (Narayanan et al., "Efficient
large-scale language model training on GPU clusters", 2021). No forward work ever goes back to an earlier
stage. Cuts lie between repeated layers where there are enough of them. The stage that takes longest is as
short as it can be, its sends included; of cuts as good as that, the one that sends least. Along its axis
every op then runs whole at its stage's rank, and what is read at another is sent there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate

import numpy as np
from torch import fx

from ..errors import PlanError
from ..graph.step_graph import (
    Phase,
    StepGraph,
    info_of,
    is_getitem,
    metas_of,
    op_call,
    source_of,
    tensor_args,
)
from ..sbp.layout import At, B, Sbp
from ..sbp.registry import replicated, staged
from .axis import AxisPlan
from .cost import DeviceCost, work
from .positions import Positions, positions

#: pattern of module names -> the stage of those modules.
StagePins = Mapping[str, int]

_SLACK = 1e-9  # relative: rounding of sums
_LAYER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")
_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Cut:
    """Stretches of positions.

    Attributes:
        starts: the first position of every stage.
        seconds: of every stage, without sends.
        sent: bytes that cross from each stage to the next, and back.
    """

    starts: tuple[int, ...]
    seconds: tuple[float, ...]
    sent: tuple[int, ...]

    def stage_of(self, position: int) -> int:
        """The stage that a position lies in."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1


def plan_stages(
    graph: StepGraph, size: int, pins: StagePins, device: DeviceCost, num: int | None = None
) -> AxisPlan:
    """Plans an axis as the stages of a pipeline.

    Args:
        size: how many ranks.
        pins: modules that shall lie at given stages.
        num: how many stages, as often as many as ranks; one a rank when left out.

    Raises:
        PlanError: forward has fewer ops than there are stages, ranks cannot have equally many, or
            the pins cannot be met.
    """
    num = num or size
    if num % size or (size == 1 and num > 1):
        few = f"{size} or {2 * size}" if size > 1 else "1"
        raise PlanError(
            f"stages={num} on an axis of {size} ranks: each rank has equally many, and one alone has one; "
            f"give {few}, or another placement"
        )
    found = positions(graph)
    cut = cut_stages(graph, found, num, pins, device)
    stage = {node: cut.stage_of(at) % size for node, at in found.of.items()}
    everywhere = _read_at(graph, found, stage)
    layouts: dict[fx.Node, Sbp] = {node: At(one) for node, one in stage.items()}
    layouts |= {node: B if one is None else At(one) for node, one in everywhere.items()}
    signatures = {}
    for node in graph.calls():
        if not is_getitem(node):
            one, call = layouts[node], op_call(node)
            signatures[node] = staged(call, one.stage) if isinstance(one, At) else replicated(call)
    stored = {name: layouts[node] if node in stage else B for name, node in graph.placeholders.items()}
    outputs: dict[str, Sbp] = {}
    for one, node in zip(graph.outputs, graph.results, strict=True):
        given = layouts[source_of(node)[0]]
        of = one.replaces if one.replaces in stored else one.replaces.rsplit(":", 1)[0]
        outputs[one.name] = stored[of] if one.replaces else given if one.observed else B
    return AxisPlan(signatures, stored, outputs, (), 0.0, True, (), False, is_staged=True)


def _read_at(graph: StepGraph, found: Positions, stage: Mapping[fx.Node, int]) -> dict[fx.Node, int | None]:
    """Of what can be computed anywhere: the one rank that reads it, or None for several (then it is B)."""
    results = {source_of(node)[0] for node in graph.results}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.calls():
        if not is_getitem(node):
            for source in dict.fromkeys(source_of(one)[0] for one in tensor_args(node)):
                readers.setdefault(source, []).append(node)
    chosen: dict[fx.Node, int | None] = {}
    for node in reversed(found.anywhere):
        stages = {chosen[one] if one in chosen else stage[one] for one in readers.get(node, ())}
        several = node.op == "placeholder" or node in results or len(stages) != 1
        chosen[node] = None if several else stages.pop()
    return chosen


def cut_stages(graph: StepGraph, found: Positions, size: int, pins: StagePins, device: DeviceCost) -> Cut:
    """Cuts the forward ops into stages; see the top of this file for which cut is best."""
    count = len(found.forward)
    if count < size:
        raise PlanError(
            f"{graph.name} has {count} forward ops, too few for {size} stages; use an axis of fewer ranks"
        )
    pinned = _pinned(found, size, pins)
    seconds, crossing = _loads(graph, found, device)
    places = _places(found, pinned, size)
    sends = [0.0, *(device.link.seconds("send", int(one)) if one else 0.0 for one in crossing[1:]), 0.0]
    starts = _best(np.concatenate([[0.0], np.cumsum(seconds)]), np.array(sends), places, pinned, size)
    if starts is None:
        raise PlanError(
            f"{graph.name} cannot be cut into {size} stages with {_text(pins)}: every stage needs an op, in "
            "the order in which the modules run; pin fewer modules, or use an axis of another size"
        )
    ends = [*starts[1:], count]
    return Cut(
        tuple(starts),
        tuple(float(seconds[a:b].sum()) for a, b in zip(starts, ends, strict=True)),
        tuple(int(crossing[at]) for at in starts[1:]),
    )


def _loads(graph: StepGraph, found: Positions, device: DeviceCost) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every position, and bytes that cross a cut before it, forward and backward together."""
    count = len(found.forward)
    seconds = np.zeros(count)
    span: dict[tuple[fx.Node, int, bool], tuple[int, int]] = {}
    for node in graph.calls():
        if is_getitem(node) or node not in found.of:
            continue
        at = found.of[node]
        seconds[at] += work(node, device)
        again = info_of(node).phase not in (Phase.PROLOGUE, Phase.FORWARD)
        for source, index in dict.fromkeys(source_of(one) for one in tensor_args(node)):
            if source in found.of:
                key = (source, index, again and source.op == "placeholder")  # a parameter is sent again
                first, last = span.get(key, (found.of[source], found.of[source]))
                span[key] = min(first, at), max(last, at)
    crossing = np.zeros(count + 1, dtype=np.int64)
    for (source, index, _), (first, last) in span.items():
        meta = metas_of(source)[index]
        if meta is not None:
            crossing[first + 1] += meta.num_bytes
            crossing[last + 1] -= meta.num_bytes
    return seconds, np.cumsum(crossing)[:count]


def repeated_layers(graph: StepGraph) -> int:
    """How many numbered modules, such as `layers.0`, forward goes through."""
    nodes = [info_of(node) for node in graph.calls()]
    return len({_layer(one.module) for one in nodes if one.phase is Phase.FORWARD} - {""})


def _layer(module: str) -> str:
    """The layer that a module lies in; "" for none."""
    match = _LAYER.match(module)
    return match.group() if match else ""


# --- where cuts may lie ------------------------------------------------------------------------------


def _places(found: Positions, pinned: np.ndarray, size: int) -> list[int]:
    """Positions before which a cut may lie: between layers, else between modules, else between any ops."""
    modules = [info_of(node).module for node in found.forward]
    layers = [_layer(one) for one in modules]
    edges = {at for at in range(1, len(modules)) if pinned[at] != pinned[at - 1]}
    for names in (layers, modules, list(range(len(modules)))):
        places = {at for at in range(1, len(names)) if names[at] != names[at - 1]}
        if len(places) >= size - 1:
            break
    return [0, *sorted(places | edges), len(modules)]


def _best(
    before: np.ndarray, sends: np.ndarray, places: Sequence[int], pinned: np.ndarray, size: int
) -> list[int] | None:
    """The starts of the stages; None if no cut meets the pins.

    Args:
        before: seconds of all positions before each.
        sends: seconds to send what crosses a cut before each position.
    """
    at = np.array(places)
    time = before[at][None, :] - before[at][:, None] + sends[at][None, :] + sends[at][:, None]
    time = np.where(at[None, :] > at[:, None], time, np.inf)
    allowed = []
    for stage in range(size):
        others = np.concatenate([[0], np.cumsum((pinned >= 0) & (pinned != stage))])[at]
        allowed.append(np.where(others[None, :] == others[:, None], time, np.inf))
    shortest, _ = _walk(allowed, np.maximum)
    if not np.isfinite(shortest):
        return None
    cost = [
        np.where(one <= shortest * (1 + _SLACK), np.broadcast_to(sends[at][None, :], one.shape), np.inf)
        for one in allowed
    ]
    _, chosen = _walk(cost, np.add)
    return [int(at[one]) for one in chosen]


def _walk(stages: Sequence[np.ndarray], join: np.ufunc) -> tuple[float, list[int]]:
    """The least way from the first place to the last in one step a stage, and the place that each starts at.

    Args:
        stages: per stage, the cost of going from each place to each.
        join: of the cost of the way so far and of a step.
    """
    best = np.full(stages[0].shape[0], np.inf)
    best[0] = 0.0
    came = []
    for step in stages:
        total = join(best[:, None], step)
        came.append(total.argmin(0))
        best = total.min(0)
    place, starts = len(best) - 1, []
    for one in reversed(came):
        place = int(one[place])
        starts.insert(0, place)
    return float(best[-1]), starts


# --- pins --------------------------------------------------------------------------------------------


def _pinned(found: Positions, size: int, pins: StagePins) -> np.ndarray:
    """The stage that each position is pinned to, -1 for none.

    Raises:
        PlanError: a pattern matches nothing, a stage is not there, two pins differ on a module, or modules
            are pinned in another order than they run in.
    """
    modules = [info_of(node).module for node in found.forward]
    stages = np.full(len(modules), -1)
    for pattern, stage in pins.items():
        if not 0 <= stage < size:
            raise PlanError(f"stage {pattern!r} at {stage}: there are stages 0 to {size - 1}")
        form = module_pattern(pattern)
        matches = [at for at, name in enumerate(modules) if form.fullmatch(name)]
        if not matches:
            known = ", ".join(dict.fromkeys(filter(None, modules)))
            known = known if len(known) < 200 else known[:200].rpartition(", ")[0] + ", ..."
            raise PlanError(f"stage {pattern!r} matches no module that runs in forward; modules are {known}")
        for at in matches:
            if stages[at] not in (-1, stage):
                raise PlanError(
                    f"module {modules[at]!r} is pinned to stage {stages[at]} and to stage {stage}"
                )
            stages[at] = stage
    latest = -1
    for at, stage in enumerate(stages):
        if stage >= 0 and latest >= 0 and stage < stages[latest]:
            raise PlanError(
                f"module {modules[latest]!r} is pinned to stage {stages[latest]} and runs before module "
                f"{modules[at]!r}, which is pinned to stage {stage}: forward work would go back to an "
                "earlier stage; pin modules to stages in the order in which they run"
            )
        if stage >= 0:
            latest = at
    return stages


def module_pattern(pattern: str) -> re.Pattern[str]:
    """What matches a module's name, or one within it, given a name with `*` and number ranges.

    "layers.0-5" is layers.0 to layers.5 and all that is in them.
    """
    parts = []
    for part in pattern.split("."):
        numbers = _RANGE.fullmatch(part)
        if numbers is None:
            parts.append(translate(part).removesuffix(r"\Z").removesuffix(r"\z"))
        else:
            first, last = int(numbers[1]), int(numbers[2])
            parts.append(f"(?:{'|'.join(str(one) for one in range(first, last + 1))})")
    return re.compile(rf"{re.escape('.').join(parts)}(?:\..*)?", re.DOTALL)


def _text(pins: StagePins) -> str:
    return ", ".join(f"{pattern!r} at stage {stage}" for pattern, stage in pins.items()) or "no pins"
