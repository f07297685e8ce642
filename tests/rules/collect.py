"""All calls that rules are proven on: torch's samples, our own, and those made from schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from monoflow.sbp.registry import OpRule
from monoflow.sbp.rules import RULES, batch_norm
from tests.rules.by_schema import samples_by_schema
from tests.rules.own_samples import own_samples
from tests.rules.record import Sample, recorded

#: What is proven. Left out: batch norm over a rank's own rows, which is exact by definition only.
PROVABLE: Mapping[Callable, OpRule] = {op: rule for op, rule in RULES.items() if op not in batch_norm.RULES}


def collected(limit: int) -> dict[Callable, list[Sample]]:
    """Samples of every provable op, at most `limit` of one from torch. Needs `kernels_as_maths`."""
    found = recorded(lambda op: op in PROVABLE, limit=limit)
    for op, samples in own_samples().items():
        found[op] = [*samples, *found.get(op, [])]
    for op in PROVABLE:
        if op not in found:
            found[op] = samples_by_schema(op)
    return {op: found[op] for op in PROVABLE}
