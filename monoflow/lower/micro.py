"""Micro-batches as lowering sees them: which are of one shape, and ops that are another for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..graph.step_graph import metas_of
from ..plan.plan import Plan
from ..plan.schedule import Schedule
from ..runtime.pulled import coordinate_of
from ..sbp.layout import Split, chunk_range, first_holder, local_shape, num_units
from ..sbp.signature import LocalOp


def alike(plan: Plan, made: Schedule) -> list[list[int]]:
    """The micro-batches by the shapes of their tensors, the first one's first; without time there is one.

    Where they are pulled, the units of work.
    """
    if not plan.has_time:
        return [[0]]
    if plan.is_pulled:
        return _alike_units(plan, made)
    units: set[int] = set()
    for item in made.items:
        for value in (*item.inputs, *item.outputs):
            split, meta = value.layout[-1], metas_of(value.node)[value.index]
            if isinstance(split, Split) and meta is not None:
                layout = value.layout[:-1]
                held = local_shape(meta.shape, layout, plan.placement.shape, first_holder(layout))
                units.add(num_units(held[split.dim], split))
    classes: dict[tuple[int, ...], list[int]] = {}
    for time in range(plan.micro_batches):
        shares = (chunk_range(total, plan.micro_batches, time) for total in sorted(units))
        classes.setdefault(tuple(stop - start for start, stop in shares), []).append(time)
    return list(classes.values())


def _alike_units(plan: Plan, made: Schedule) -> list[list[int]]:
    """The units by the shapes of their tensors, in which each has its own part along every axis."""
    seen = {
        (meta.shape, value.layout)
        for item in made.items
        if item.walked
        for value in (*item.inputs, *item.outputs)
        if (meta := metas_of(value.node)[value.index]) is not None
    }
    cut = [one for one in seen if any(isinstance(sbp, Split) for sbp in one[1])]
    classes: dict[tuple, list[int]] = {}
    for unit in range(num_work_units(plan)):
        place = coordinate_of(unit, plan.mesh)
        shapes = tuple(local_shape(shape, layout, plan.mesh, place) for shape, layout in cut)
        classes.setdefault(shapes, []).append(unit)
    return list(classes.values())


def num_work_units(plan: Plan) -> int:
    """The units that ranks pull: a micro-batch of each; 0 where every rank walks its own."""
    return plan.placement.size * plan.micro_batches if plan.is_pulled else 0


@dataclass(frozen=True)
class _Slot:
    """Where a tensor goes among an op's arguments."""

    index: int


def is_same(one: LocalOp, other: LocalOp) -> bool:
    """Whether two local forms, made for the same tensors, are the same call."""
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(map(_is_equal, leaves, others))


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)


def by_time(forms: Mapping[int, LocalOp], tensors: Sequence[Any]) -> Callable:
    """A function of the micro-batch's number and an op's tensors that is another call for each.

    Args:
        forms: by micro-batch.
        tensors: what stands for the tensors in the forms' arguments.
    """
    slots = {id(one): _Slot(index) for index, one in enumerate(tensors)}
    calls = {}
    for time, (target, args, kwargs) in forms.items():
        leaves, spec = pytree.tree_flatten((args, kwargs))
        calls[time] = target, [slots.get(id(leaf), leaf) for leaf in leaves], spec

    def timed(time: int, *given: torch.Tensor) -> Any:
        target, leaves, spec = calls[time]
        filled = [given[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return target(*args, **kwargs)

    return timed
