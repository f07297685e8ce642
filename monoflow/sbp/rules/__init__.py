"""All rules, one file an op family. A file exports RULES: {overload: OpRule}; this table merges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..registry import OpRule


def _merge(*tables: Mapping[Callable, OpRule]) -> Mapping[Callable, OpRule]:
    merged: dict[Callable, OpRule] = {}
    for table in tables:
        twice = merged.keys() & table.keys()
        assert not twice, f"two rules for {sorted(map(str, twice))}"
        merged |= table
    return MappingProxyType(merged)


RULES: Mapping[Callable, OpRule] = _merge()
