"""Core ATen: which of torch's own list of ops have a rule, which can have none and why, which are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from monoflow.sbp.rules import RULES

_RANDOM = "draws: capture puts a counter-based op in its place, which has a rule"
_SIZE = "a size as a number, not a tensor: constant in a captured graph"

#: Why a core op can have no rule.
WITHOUT: Mapping[str, str] = {
    "_local_scalar_dense": "reads a value to Python: refused at capture with its line",
    "native_dropout": _RANDOM,
    "nonzero": "the size of its result depends on data: refused at capture with its line",
    "rand": _RANDOM,
    "randn": _RANDOM,
    "randperm": "draws a permutation: refused at capture by name",
    "sym_is_contiguous": "a fact of strides, not a tensor: constant in a captured graph",
    "sym_numel": _SIZE,
    "sym_size": _SIZE,
    "sym_storage_offset": _SIZE,
    "sym_stride": _SIZE,
}


class Coverage(NamedTuple):
    """Core overloads: with a rule, without one for a reason, and missing, all by name."""

    ruled: tuple[str, ...]
    without: Mapping[str, str]
    missing: tuple[str, ...]


def coverage() -> Coverage:
    """Where every overload that torch tags as core stands."""
    ruled, without, missing = [], {}, []
    for op in core_overloads():
        name = str(op).removeprefix("aten.")
        reason = _mutation(op) or WITHOUT.get(name.split(".")[0])
        if op in RULES:
            ruled.append(name)
        elif reason is not None:
            without[name] = reason
        else:
            missing.append(name)
    return Coverage(tuple(ruled), without, tuple(missing))


def core_overloads() -> list[torch._ops.OpOverload]:
    """Every overload of torch.ops.aten with the tag `core`."""
    schemas = [one for one in torch._C._jit_get_all_schemas() if one.name.startswith("aten::")]
    packets = {one.name: getattr(torch.ops.aten, one.name.removeprefix("aten::"), None) for one in schemas}
    overloads = [
        getattr(packet, one.overload_name or "default", None)
        for one in schemas
        if isinstance(packet := packets[one.name], torch._ops.OpOverloadPacket)
    ]
    return [op for op in overloads if op is not None and torch.Tag.core in op.tags]


def _mutation(op: torch._ops.OpOverload) -> str | None:
    return "writes to an argument: capture leaves its functional form" if op._schema.is_mutable else None
