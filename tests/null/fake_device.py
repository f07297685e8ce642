"""An accelerator that is not there: kernels run later, in any order that streams and events allow.

Memory is handed out as by torch's caching allocator: what is freed goes, at once, to whoever asks next in the
same stream. A kernel knows addresses, and keeps no tensor alive. So work that is not ordered as it must be
reads what is not yet, or no longer, there.
"""

from __future__ import annotations

import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten
_READS = frozenset({aten._local_scalar_dense.default, aten.equal.default})


class Event:
    """Is over when its stream has come to it."""

    def __init__(self) -> None:
        self.is_over = False


class Stream:
    """Kernels, and events to reach or to wait for, in order."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], object] | tuple[bool, Event]] = deque()
        self.free: dict[int, list[np.ndarray]] = defaultdict(list)

    def record_event(self) -> Event:
        event = Event()
        self.queue.append((True, event))
        return event

    def wait_event(self, event: Event) -> None:
        if self.device.waits:
            self.queue.append((False, event))

    def synchronize(self) -> None:
        """The host waits for this stream."""
        while self.queue:
            assert self.device.run_one(self), "the streams wait for each other"

    def __enter__(self) -> None:
        self.device.entered.append(self)

    def __exit__(self, *error: object) -> None:
        self.device.entered.pop()


class FakeDevice(TorchDispatchMode):
    """Within it, ops on CPU tensors are kernels of the current stream.

    Args:
        draw: in which order kernels run.
        waits: whether streams wait for events.

    Attributes:
        num_bytes: of all memory that was ever handed out, what is used again counted once.
    """

    def __init__(self, draw: random.Random, waits: bool = True) -> None:
        super().__init__()
        self.draw, self.waits, self.num_bytes = draw, waits, 0
        self.streams: list[Stream] = []
        self.entered = [self.make()]
        self.blocks: dict[int, np.ndarray] = {}
        self.eagerness = draw.choice([0.0, 0.3, 0.9])  # of the device, while the host goes on
        self.speed = defaultdict(lambda: draw.choice([0.05, 1.0, 20.0]))

    def current(self) -> Stream:
        return self.entered[-1]

    def make(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    # --- kernels -----------------------------------------------------------------------------------

    def run_one(self, first: Stream | None = None) -> bool:
        """Lets one stream go one on; any that can, fast ones more often."""
        able = [one for one in self.streams if one.queue and self._can(one.queue[0])]
        if not able:
            return False
        stream = self.draw.choices(able, [self.speed[id(one)] for one in able])[0]
        if first in able and self.draw.random() < 0.5:
            stream = first
        entry = stream.queue.popleft()
        if isinstance(entry, tuple):
            entry[1].is_over |= entry[0]
        else:
            with _disable_current_modes():
                entry()
        return True

    @staticmethod
    def _can(entry: Callable[[], object] | tuple[bool, Event]) -> bool:
        return not isinstance(entry, tuple) or entry[0] or entry[1].is_over

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        stream = self.current()
        if func in _READS:
            stream.synchronize()
            return func(*args, **kwargs)
        raw = pytree.tree_map_only(Tensor, self._address, (args, kwargs))
        if func._schema.is_mutable:
            made = self._written(func, args, kwargs)
            stream.queue.append(partial(func, *raw[0], **raw[1]))
        else:
            like = self._like(func, args, kwargs)
            made = pytree.tree_map_only(Tensor, self._handed_out, like)
            targets = [self._address(one) for one in pytree.tree_leaves(made)]

            def kernel() -> None:
                found = pytree.tree_leaves(func(*raw[0], **raw[1]) if self._has_tensors(raw) else like)
                for target, value in zip(targets, found, strict=True):
                    target.copy_(value)

            stream.queue.append(kernel)
        while self.draw.random() < self.eagerness and self.run_one():
            pass
        return made

    @staticmethod
    def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an op returns that writes: what it wrote."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                return kwargs[argument.name] if argument.name in kwargs else args[position]
        raise AssertionError(f"{func} writes nothing")

    @staticmethod
    def _has_tensors(arguments: Any) -> bool:
        return any(isinstance(one, Tensor) for one in pytree.tree_leaves(arguments))

    def _like(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an op makes: its shapes, or itself if it reads no tensor."""
        if not self._has_tensors((args, kwargs)):
            return func(*args, **kwargs)
        shapes = pytree.tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        return func(*shapes[0], **shapes[1])

    # --- memory ------------------------------------------------------------------------------------

    def _handed_out(self, like: Tensor) -> Tensor:
        """Memory of the current stream, with whatever is in it."""
        size = max(1, like.numel()) * like.dtype.itemsize
        free = self.current().free[size]
        if free:
            block = free.pop()
        else:
            block = np.full(size, 0xFF, np.uint8)  # NaN
            self.num_bytes += size
        handle = block[:]
        self.blocks[block.ctypes.data] = block
        weakref.finalize(handle, self._freed, block, free)
        return torch.from_numpy(handle).view(like.dtype)[: like.numel()].view(like.shape)

    def _freed(self, block: np.ndarray, free: list[np.ndarray]) -> None:
        del self.blocks[block.ctypes.data]
        free.append(block)

    def _address(self, tensor: Tensor) -> Tensor:
        """The same memory, which it does not keep."""
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:  # it is not of this device's making, and stays
            return tensor
        whole = torch.from_numpy(block).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
