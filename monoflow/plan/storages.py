"""How inputs may be stored, for a search that is free to choose."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..boxing.route import fits_mesh
from ..graph.step_graph import Input, Role, StepGraph
from ..mesh import Placement
from ..sbp.layout import B, NdSbp, Sbp, Split, fits, is_even
from .axis import AxisGoal
from .problem import Goal
from .template import Pins, apply_pins, block_counts

_BATCH_DIMS = 2  # a batch's samples, and the positions of a sequence


def free_goal(graph: StepGraph, placement: Placement, pins: Pins) -> Goal:
    """Parameters and their state stored in any way, the batch cut in any way, but for what is pinned.

    Raises:
        LayoutError: a pin matches nothing or does not fit.
    """
    mesh = placement.shape
    blocks = (1, *block_counts(graph))
    known: dict[Any, list[NdSbp]] = {}
    storages = {one.name: _free(graph, one, mesh, blocks, known) for one in graph.inputs}
    outputs: dict[str, NdSbp] = {}
    if pins:
        goals = [apply_pins(AxisGoal(size, {}), graph, pins, axis) for axis, size in enumerate(mesh)]
        for name in goals[0].stored:
            storages[name] = [tuple(goal.stored[name] for goal in goals)]
        for name in goals[0].outputs:
            outputs[name] = tuple(goal.outputs[name] for goal in goals)
    return Goal(storages, outputs)


def _free(
    graph: StepGraph, one: Input, mesh: Sequence[int], blocks: Sequence[int], known: dict[Any, list[NdSbp]]
) -> list[NdSbp]:
    """The layouts of one input; layers' parameters are alike and share them in `known`."""
    shape = one.meta.shape
    per_axis = tuple((B, *_splits(graph, one, size, blocks)) for size in mesh)
    if (shape, per_axis) not in known:
        known[shape, per_axis] = [
            layout
            for layout in itertools.product(*per_axis)
            if fits_mesh(shape, layout, mesh) and _nests_evenly(shape, layout, mesh)
        ]
    return known[shape, per_axis]


def _splits(graph: StepGraph, one: Input, size: int, blocks: Sequence[int]) -> list[Sbp]:
    shape = one.meta.shape
    if one.role is Role.BATCH:
        return [Split(dim) for dim, extent in enumerate(shape[:_BATCH_DIMS]) if extent > 1]
    owner = graph.input_of.get(one.of, one)
    if one.role not in (Role.PARAM, Role.STATE, Role.GRAD) or shape != owner.meta.shape:
        return []
    return [
        Split(dim, count)
        for dim, extent in enumerate(shape)
        for count in blocks
        if extent >= size and fits(extent, Split(dim, count), size)
    ]


def _nests_evenly(shape: Sequence[int], layout: NdSbp, mesh: Sequence[int]) -> bool:
    """Whether a dim that several axes split is even on all of them, and by blocks on the last alone.

    Stored tensors must be so, since a DTensor holds no others.
    """
    left: Mapping[int, list[tuple[Split, int]]] = {dim: [] for dim in range(len(shape))}
    for split, size in zip(layout, mesh, strict=True):
        if isinstance(split, Split):
            left[split.dim].append((split, size))
    for dim, splits in left.items():
        extent = shape[dim]
        if any(split.blocks > 1 for split, _ in splits[:-1]):
            return False
        for split, size in splits if len(splits) > 1 else ():
            if not is_even(extent, split, size):
                return False
            extent //= size
    return True
