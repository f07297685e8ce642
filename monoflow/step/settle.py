"""Before a compiled step first runs: whole tensors are alike on all ranks, and all lies as the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..compiler import Compiled, Role, Subject
from .agree import check_alike, make_alike
from .store import Store


def agree(compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any], rank: int) -> None:
    """Sees to it that whole tensors are the same on every rank."""
    placement, captured = compiled.plan.placement, compiled.captured
    leaves = [one for one in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(one, torch.Tensor)]
    batch = dict(zip(captured.batch_names, leaves, strict=True))
    check_alike(batch | dict(compiled.plan.graph.constants), placement, rank)
    live = {name: slot.get() for name, slot in captured.slots.items()}
    make_alike({name: one for name, one in live.items() if one is not None}, placement, rank)


def settle(compiled: Compiled, subject: Subject, store: Store) -> None:
    """Brings parameters and state into the plan's storage, and begins state that does not exist yet."""
    layouts, graph = compiled.plan.inputs, compiled.plan.graph
    written = {one.replaces for one in graph.outputs}
    for name, slot in compiled.captured.slots.items():
        if name in graph.input_of and slot.role is not Role.GRAD:
            store.settle(slot, layouts[name], name in written)
    for name, (begins, index, key) in compiled.captured.initial.items():
        slot = compiled.captured.slots[name]
        param = subject.params[slot.of].detach()
        meta = graph.input_of[name].meta
        local = param.to_local() if isinstance(param, DTensor) else param
        value = begins.value(index, key, local)
        if tuple(value.shape) == meta.shape or store.is_whole:
            slot.put(value)
            store.settle(slot, layouts[name], True)
        else:
            slot.put(store.wrapped(value, layouts[name], meta.shape))
