"""Passes over StepGraphs, one file each, in the order they run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..rewrite import Pass
from .clean import clean
from .guard import GRADIENTS, guard
from .norms import join_norms
from .owners import name_owners
from .prologue import hoist_counts

__all__ = ["GRADIENTS", "PASSES", "guard"]

#: The passes that every captured graph goes through, `guard` after the first. The name is what log and timing
#: show.
PASSES: Mapping[str, Pass] = MappingProxyType(
    {"clean": clean, "join-norms": join_norms, "hoist-counts": hoist_counts, "name-owners": name_owners}
)
