"""What a step was compiled for: one version for each kind of call, the latest few of them kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..compiler import Compiled, Subject, World
from ..log import stage_logger

_MANY = 8  # versions after which a step says what it is captured for
_MOST = 16  # versions that are kept


class Kind(NamedTuple):
    """Everything a captured graph depends on that is not a tensor's value: calls of a kind share a graph."""

    world: World
    structure: str
    arguments: tuple
    autocast: tuple
    grad_mode: bool
    parameters: tuple
    buffers: tuple
    modules: tuple
    optimizers: tuple


#: What to call the parts of a Kind in messages.
PARTS: Mapping[str, str] = {
    "structure": "the arguments' structure",
    "arguments": "the arguments' shapes, dtypes or values",
    "autocast": "autocast",
    "grad_mode": "grad mode",
    "parameters": "the parameters' shapes, dtypes or requires_grad",
    "buffers": "the buffers' shapes or dtypes",
    "modules": "the modules' train/eval mode, attributes or hooks",
    "optimizers": "the optimizers' settings (other than the learning rate)",
}


def kind_of(world: World, subject: Subject, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind:
    """The kind of a call."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
    arguments = tuple(_leaf(leaf) for leaf in leaves)
    return Kind(world, str(spec), arguments, autocast, torch.is_grad_enabled(), *subject.signature())


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        layout = leaf.placements if isinstance(leaf, DTensor) else None
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, layout)
    if isinstance(leaf, slice):
        return repr(leaf)
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), leaf  # 1, 1.0 and True are equal, but not the same step


class Versions:
    """Compiled versions by kind, the latest ones; using one makes it the latest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._of: dict[Kind, list[Compiled]] = {}
        self._num_added = 0

    def find(self, kind: Kind, subject: Subject) -> Compiled | None:
        """The version for a kind and the gradients and states that there are now."""
        versions = self._of.get(kind)
        if versions is None:
            return None
        self._of[kind] = self._of.pop(kind)
        return next((one for one in versions if one.captured.fits(subject)), None)

    def add(self, kind: Kind, compiled: Compiled) -> list[Compiled]:
        """Keeps a version; returns those that are no longer kept. Warns if there are suspiciously many."""
        last = next(reversed(self._of), None)
        self._of.setdefault(kind, []).append(compiled)
        self._num_added += 1
        if self._num_added == _MANY and last is not None:
            changed = [text for part, text in PARTS.items() if getattr(kind, part) != getattr(last, part)]
            stage_logger("capture").warning(
                "%s was captured %d times; what changed last: %s%s. Every new kind of call is captured and "
                "planned again: pad batches to a few shapes, and keep settings that change out of the step",
                self.name, self._num_added, "; ".join(changed) or "which gradients or states exist",
                f" ({_shapes(last)} to {_shapes(kind)})" if last.arguments != kind.arguments else "",
            )  # fmt: skip
        dropped: list[Compiled] = []
        while len(self._of) > _MOST:
            dropped += self._of.pop(next(iter(self._of)))
        return dropped

    def clear(self) -> None:
        """Forgets all versions."""
        self._of.clear()


def _shapes(kind: Kind) -> str:
    parts = [str(list(one[0])) if isinstance(one[0], tuple) else repr(one[1]) for one in kind.arguments]
    return ", ".join(parts) or "no arguments"
