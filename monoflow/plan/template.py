"""Templates: named plans. Each says how one axis stores the state; propagation fills in the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch

from ..errors import LayoutError, PlanError
from ..graph.step_graph import Input, Role, StepGraph, tensor_args
from ..mesh import Placement
from ..sbp.layout import B, NdSbp, Partial, Sbp, Split, fits
from .axis import AxisGoal

aten = torch.ops.aten

#: pattern -> how matching inputs or outputs lie, one SBP per axis
Pins = Mapping[str, NdSbp]


def batch_size(graph: StepGraph) -> int | None:
    """The global batch size: the leading extent that most of the batch's tensors have."""
    leading = [one.meta.shape[0] for one in graph.inputs if one.role is Role.BATCH and one.meta.shape]
    return Counter(leading).most_common(1)[0][0] if leading else None


def _batch_split(graph: StepGraph) -> dict[str, Sbp]:
    size = batch_size(graph)
    return {
        one.name: Split(0)
        for one in graph.inputs
        if one.role is Role.BATCH and one.meta.shape and one.meta.shape[0] == size
    }


def data(graph: StepGraph, axis_size: int, taken: Mapping[str, set[int]]) -> AxisGoal:
    """The batch is split, the state is replicated."""
    return AxisGoal(axis_size, _batch_split(graph))


def zero(graph: StepGraph, axis_size: int, taken: Mapping[str, set[int]]) -> AxisGoal:
    """The batch is split, and the state too, gathered at use (Rajbhandari et al., "ZeRO", 2020, stage 3)."""
    stored = _batch_split(graph)
    used: dict[str, Sbp] = {}
    for one in graph.inputs:
        layout = _state_split(one, axis_size, taken.get(one.name, set()))
        if one.role is Role.PARAM:
            stored[one.name], used[one.name] = layout, B
            for other in graph.inputs:
                if other.of == one.name and other.role in (Role.STATE, Role.GRAD):
                    stored[other.name] = layout if other.meta.shape == one.meta.shape else B
    return AxisGoal(axis_size, stored, used)


def _state_split(one: Input, axis_size: int, taken: set[int]) -> Sbp:
    """The dim of a parameter to store split: the first that divides evenly, else the first long enough."""
    dims = [d for d, extent in enumerate(one.meta.shape) if extent >= axis_size and d not in taken]
    even = [d for d in dims if one.meta.shape[d] % axis_size == 0]
    return Split((even or dims)[0]) if dims else B


def tensor(graph: StepGraph, axis_size: int, taken: Mapping[str, set[int]]) -> AxisGoal:
    """Weights are split where they are used: columns then rows of matching products, heads, vocabulary."""
    free: dict[str, Sequence[Sbp]] = {}
    blocks = block_counts(graph)
    looked_up = _looked_up(graph)
    for one in graph.inputs:
        if one.role is not Role.PARAM:
            continue
        shape, found = one.meta.shape, []
        for dim, extent in enumerate(shape[:1] if one.name in looked_up else shape):
            for count in (1, *blocks):
                layout = Split(dim, count)
                if (
                    extent >= axis_size
                    and fits(extent, layout, axis_size)
                    and dim not in taken.get(one.name, set())
                ):
                    found.append(layout)
        free[one.name] = tuple(found) if found and len(shape) > 1 else (*found, B)
    return AxisGoal(axis_size, {}, free=free)


def _looked_up(graph: StepGraph) -> set[str]:
    """Parameters that are look-up tables: these are split along the vocabulary."""
    tables = set()
    for name, node in graph.placeholders.items():
        for user in node.users:
            if user.target is aten.embedding.default and user.args[0] is node:
                tables.add(name)
    return tables


def block_counts(graph: StepGraph) -> list[int]:
    """In how many pieces fused projections of this graph are taken apart."""
    counts: set[int] = set()
    for node in graph.calls():
        if node.target in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int):
            counts.add(len(node.meta["val"]))
        elif node.target in (aten.slice.Tensor, aten.select.int):
            source, dim = tensor_args(node)[0], node.args[1] if len(node.args) > 1 else 0
            whole = source.meta["val"].shape[dim]
            part = node.meta["val"].shape[dim] if node.target is aten.slice.Tensor else 1
            if part and whole % part == 0:
                counts.add(whole // part)
    return sorted(count for count in counts if 1 < count <= 8)


#: From graph, axis size and the dims by which other axes split what is stored.
Template = Callable[[StepGraph, int, Mapping[str, set[int]]], AxisGoal]
#: Those that say how an axis stores the state.
TEMPLATES: Mapping[str, Template] = MappingProxyType({"data": data, "zero": zero, "tensor": tensor})


#: The one that cuts the step into stages (`stages.py`).
PIPELINE = "pipeline"


def parse(name: str, placement: Placement) -> tuple[str, ...]:
    """The template of every axis: "data", or one an axis as in "data x tensor".

    Raises:
        PlanError: an unknown template, or as many templates as the placement has axes are not given, or more
            than one axis is to be a pipeline.
    """
    names = [part.strip() for part in name.split(" x ")] if " x " in name else [name.strip()]
    unknown = [one for one in names if one not in (*TEMPLATES, PIPELINE)]
    if unknown:
        raise PlanError(
            f"no plan named {unknown[0]!r}; choose auto (alone), {', '.join(TEMPLATES)}, {PIPELINE}, or a "
            "product of templates such as 'data x tensor' on a placement of two axes"
        )
    if len(names) == 1:
        names *= placement.num_axes
    if len(names) != placement.num_axes:
        raise PlanError(
            f"plan {name!r} names {len(names)} axes, {placement} has {placement.num_axes}; give one template "
            "per axis, or a placement with as many axes"
        )
    if names.count(PIPELINE) > 1:
        raise PlanError(
            f"plan {name!r} makes a pipeline of {names.count(PIPELINE)} axes of {placement}; a step has one, "
            "so name what the other axes do, as in 'pipeline x data'"
        )
    return tuple(names)


def apply_pins(goal: AxisGoal, graph: StepGraph, pins: Pins, axis: int) -> AxisGoal:
    """The goal with a user's pins in place of the template's choices.

    Raises:
        LayoutError: a pin matches nothing, has a wrong number of axes, or its split does not fit.
    """
    stored, used, free, outputs = dict(goal.stored), dict(goal.used), dict(goal.free), dict(goal.outputs)
    for pattern, layout in pins.items():
        one = layout[axis]
        inputs = [i for i in graph.inputs if fnmatchcase(i.name, pattern) and i.role is not Role.HYPER]
        results = [
            o for o in graph.outputs if fnmatchcase(o.name, pattern) and not o.replaces and not o.observed
        ]
        if not inputs and not results:
            known = ", ".join(i.name for i in graph.inputs if i.role is not Role.RANDOM)
            known = known if len(known) < 200 else known[:200].rpartition(", ")[0] + ", ..."
            raise LayoutError(
                f"pin {pattern!r} matches no parameter, buffer, input or output; names are {known}"
            )
        for match in inputs:
            _check_pin(pattern, match.name, match.meta.shape, one, goal.size)
            if isinstance(one, Partial) and match.role is not Role.BATCH:
                raise LayoutError(f"pin {pattern!r}: {match.name} cannot be stored as {one}; use S(dim) or B")
            stored[match.name] = one
            used.pop(match.name, None)
            free.pop(match.name, None)
            for other in graph.inputs:
                if other.of == match.name and other.role in (Role.STATE, Role.GRAD):
                    stored[other.name] = one if other.meta.shape == match.meta.shape else B
        for match in results:
            _check_pin(pattern, match.name, match.meta.shape, one, goal.size)
            if isinstance(one, Partial):
                raise LayoutError(
                    f"pin {pattern!r}: {match.name} cannot be handed out as {one}; use S(dim) or B"
                )
            outputs[match.name] = one
    return replace(goal, stored=stored, used=used, free=free, outputs=outputs)


def _check_pin(pattern: str, name: str, shape: Sequence[int], one: Sbp, axis_size: int) -> None:
    if not isinstance(one, Split):
        return
    if not -len(shape) <= one.dim < len(shape):
        raise LayoutError(
            f"pin {pattern!r}: {name} has {len(shape)} dims {tuple(shape)}, {one} names dim {one.dim}"
        )
    if not fits(shape[one.dim], one, axis_size):
        raise LayoutError(
            f"pin {pattern!r}: {name} has {shape[one.dim]} elements along dim {one.dim}; {one} over "
            f"{axis_size} ranks needs a multiple of {one.blocks * axis_size}"
        )
