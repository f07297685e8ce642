"""A recorded initialization made real, whole: on the CPU, with random numbers from counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..sbp.random_mode import has_form, op_numbers, random_or
from .record import Memory, Op, View, needed_ops

Buffers = dict[Memory, torch.UntypedStorage]


@contextmanager
def plainly() -> Iterator[None]:
    """Within: torch as it is outside every mode, without autograd and autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())  # pyright: ignore[reportArgumentType]
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.no_grad())
        yield


def value_of(view: View) -> torch.Tensor:
    """What a lazily built tensor holds, in memory of its own, strided as it is."""
    with plainly():
        return view.of(values_of([view.memory])[view.memory])


def values_of(memories: Sequence[Memory], ops: Sequence[Op] | None = None) -> Buffers:
    """What memories hold after their ops. What is made on the way is dropped after its last use.

    Args:
        ops: what to run; all that made them when left out.
    """
    ops = needed_ops(memories) if ops is None else ops
    last = {memory: op.number for op in ops for memory in _memories(op)}
    buffers: Buffers = {}
    with plainly():
        for op in ops:
            _run(op, buffers)
            for memory in _memories(op):
                if last[memory] == op.number and memory not in memories:
                    buffers.pop(memory, None)
        for memory in memories:
            if memory not in buffers:
                buffers[memory] = beginning(memory)
    return buffers


def _memories(op: Op) -> list[Memory]:
    views = [*op.read, *op.written, *op.outputs]
    return [view.memory for view in views if view is not None]


def beginning(memory: Memory) -> torch.UntypedStorage:
    """A memory before its first op: its constant, or zeros."""
    if memory.constant is not None:
        return memory.constant.clone().untyped_storage()
    return torch.zeros(memory.num_bytes, dtype=torch.uint8).untyped_storage()


def _run(op: Op, buffers: Buffers) -> None:
    def tensor_of(view: View) -> torch.Tensor:
        if view.memory not in buffers:
            buffers[view.memory] = beginning(view.memory)
        return view.of(buffers[view.memory])

    args, kwargs = op.with_tensors(tensor_of)
    result = call(op, args, kwargs)
    for view, made in zip(op.outputs, pytree.tree_leaves(result), strict=True):
        if view is not None:
            buffers[view.memory] = _stored(view, made)


def _stored(view: View, made: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a result, laid out as recorded."""
    fits = made.stride() == view.stride and made.storage_offset() == view.offset
    if fits and made.untyped_storage().nbytes() == view.memory.num_bytes:
        return made.untyped_storage()
    buffer = torch.empty(view.memory.num_bytes, dtype=torch.uint8).untyped_storage()
    view.of(buffer).copy_(made)
    return buffer


def call(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs one recorded op on tensors that are there."""
    kwargs = dict(kwargs)
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    before = torch.get_default_dtype()
    torch.set_default_dtype(op.default_dtype)
    try:
        if op.key is None:
            return op.func(*args, **kwargs)
        if has_form(op.func):
            with op_numbers():
                return random_or(op.key, op.func, args, kwargs)
        with _seeded(int(op.key)):
            return op.func(*args, **kwargs)
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within: torch draws on the CPU from a seed. Its generator is as before afterwards."""
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
