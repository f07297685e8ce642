"""Signatures: for one op and one axis, layouts of inputs and outputs under which the op is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .layout import NdSbp, Sbp, dim_runs, local_shape


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class OpCall:
    """One call of an op: its arguments with every tensor replaced by its TensorMeta, and its outputs.

    `outputs` has one entry per tensor output (None for an absent one, such as a gradient not asked for).
    """

    op: Callable
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorMeta | None, ...]
    inputs: tuple[TensorMeta, ...] = field(init=False)

    def __post_init__(self) -> None:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        object.__setattr__(self, "inputs", tuple(x for x in leaves if isinstance(x, TensorMeta)))


@dataclass(frozen=True)
class Signature:
    """Along one axis: the SBP of every tensor input (in flattened argument order) and output.

    An output that is absent (None in OpCall.outputs) has SBP B.
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True)
class TensorShard:
    """What one rank holds of one tensor: global and local shape, and where its elements come from."""

    meta: TensorMeta
    sbp: NdSbp
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", local_shape(self.meta.shape, self.sbp, self.mesh, self.coordinate))

    def runs(self, dim: int) -> tuple[tuple[int, int], ...]:
        """The global index ranges, in local order, that this rank holds of `dim`."""
        return dim_runs(self.meta.shape[dim], dim, self.sbp, self.mesh, self.coordinate)

    def start(self, dim: int) -> int:
        """The first global index of `dim`; only for a shard that is one run (0 if it is empty)."""
        runs = self.runs(dim)
        assert len(runs) <= 1, f"dim {dim} under {self.sbp} is {len(runs)} runs, not one"
        return runs[0][0] if runs else 0

    def is_split(self, dim: int) -> bool:
        """Whether this rank holds less than the whole dim, or would on another coordinate."""
        return any(getattr(one, "dim", None) == dim for one in self.sbp)


class LocalCall:
    """A node to be lowered for one rank, as a rule's local form sees it.

    `args`/`kwargs` are the node's own, tensors as opaque leaves (fx nodes when lowering, tensors in the
    oracle); `inputs` and `outputs` are the shards of the tensor leaves and the results, in flattened order.
    """

    def __init__(
        self,
        op: Callable,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: Sequence[TensorShard],
        outputs: Sequence[TensorShard | None],
    ) -> None:
        self.op, self.args, self.kwargs = op, args, dict(kwargs)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)


#: (op, args, kwargs) to run on a shard instead of the node's own.
LocalOp = tuple[Callable, tuple[Any, ...], dict[str, Any]]
