"""What `flow.lazy` writes down: for memory that was never taken, the ops that would have filled it.

The record hangs on the meta storage itself, so that every tensor that shares it (a parameter's `.data`, a
view, a tied weight) finds it, and that it goes when they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

_ATTRIBUTE = "_monoflow_memory"


@dataclass(eq=False, repr=False)
class Memory:
    """The memory that one meta storage stands for.

    Attributes:
        num_bytes: its size.
        device: where the user's code asked for it.
        recording: the `flow.lazy` in which it was made.
        writes: what filled and changed it, oldest first. Memory that nothing has written is zero.
        constant: the tensor that it began as; one that was there when it was used.
    """

    num_bytes: int
    device: torch.device
    recording: Recording
    writes: list[Op] = field(default_factory=list)
    constant: torch.Tensor | None = None


class View(NamedTuple):
    """A tensor as a piece of memory: sizes, strides and offset in elements of `dtype`."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        return torch.Size(self.size).numel()

    @property
    def is_all(self) -> bool:
        """Whether the tensor is its whole memory, row-major."""
        covers = self.num_elements * self.dtype.itemsize == self.memory.num_bytes
        return covers and self.stride == contiguous_strides(self.size)

    def of(self, buffer: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in memory that is there."""
        return torch.empty(0, dtype=self.dtype).set_(buffer, self.offset, self.size, self.stride)  # pyright: ignore[reportArgumentType, reportCallIssue]


@dataclass(eq=False, repr=False)
class Op:
    """One call that was recorded.

    Attributes:
        number: its place among all calls that were recorded in this process.
        args, kwargs: as they were called, with a `View` for every tensor.
        written: those of the views that it writes.
        outputs: a view for every tensor that it makes in memory of its own.
        key: what its random numbers derive from; None if it draws none.
        default_dtype: torch's at the time of the call.
    """

    number: int
    func: Callable
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[View, ...]
    outputs: tuple[View | None, ...]
    key: torch.Tensor | None
    default_dtype: torch.dtype

    @property
    def read(self) -> list[View]:
        """The views among its arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs), is_leaf=_is_view)
        return [leaf for leaf in leaves if isinstance(leaf, View)]

    def with_tensors(self, tensor_of: Callable[[View], torch.Tensor]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) with tensors for the views."""
        return pytree.tree_map(
            lambda leaf: tensor_of(leaf) if isinstance(leaf, View) else leaf,
            (self.args, self.kwargs),
            is_leaf=_is_view,
        )


@dataclass(eq=False)
class Recording:
    """What one `flow.lazy` was asked.

    Attributes:
        weights: where values come from in the place of the initialization, by name; None for nowhere.
        strict: whether names must match those of the files.
        rename: a model's name -> the files' name.
    """

    weights: str | None = None
    strict: bool = True
    rename: Callable[[str], str] | None = None


def contiguous_strides(size: Iterable[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor, as torch gives them."""
    strides, step = [], 1
    for extent in reversed(tuple(size)):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """What a tensor that was built lazily will be filled with; None for any other tensor."""
    with torch._C.DisableTorchFunction():  # within `flow.lazy` it says that it is elsewhere
        if tensor.device.type != "meta" or tensor.layout is not torch.strided:
            return None
        return getattr(tensor.untyped_storage(), _ATTRIBUTE, None)


def attach(tensor: torch.Tensor, memory: Memory) -> None:
    """Makes a meta tensor's storage stand for a memory."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, memory)


def view_of(tensor: torch.Tensor) -> View:
    """A lazily built tensor as a piece of its memory."""
    memory = memory_of(tensor)
    assert memory is not None, f"a tensor of shape {tuple(tensor.shape)} was not built lazily"
    return View(memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def needed_ops(
    memories: Iterable[Memory],
    through: Callable[[View], bool] = lambda view: True,
    before: float = float("inf"),
) -> list[Op]:
    """The ops that make what memories hold, in order. What is overwritten as a whole is left out.

    Args:
        through: whether to look for what made a view that an op reads.
        before: the number of an op before which they hold it; now when left out.
    """
    found: dict[int, Op] = {}
    todo: list[tuple[Memory, float]] = [(memory, before) for memory in memories]
    seen: dict[Memory, float] = {}
    while todo:
        memory, until = todo.pop()
        if seen.get(memory, -1.0) >= until:
            continue
        seen[memory] = until
        for op in _last_writes(memory, until):
            if op.number not in found:
                found[op.number] = op
                todo += [(view.memory, op.number) for view in op.read if through(view)]
    return [found[number] for number in sorted(found)]


def _last_writes(memory: Memory, until: float) -> Iterator[Op]:
    """The writes before op `until` that still show in it, latest first."""
    for op in reversed(memory.writes):
        if op.number < until:
            yield op
            if _overwrites(op, memory):
                return


#: In-place ops that do not look at what they write to.
FILLS = frozenset(
    {
        "aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_",
        "aten::bernoulli_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_", "aten::geometric_",
    }
)  # fmt: skip


def _overwrites(op: Op, memory: Memory) -> bool:
    """Whether nothing of what a memory was before shows after an op."""
    if any(view is not None and view.memory is memory for view in op.outputs):
        return True
    if op.func._schema.name not in FILLS:  # type: ignore[attr-defined]
        return False
    others = op.read[1:]
    return any(view.memory is memory and view.is_all for view in op.written) and not any(
        view.memory is memory for view in others
    )


def _is_view(leaf: Any) -> bool:
    return isinstance(leaf, View)
