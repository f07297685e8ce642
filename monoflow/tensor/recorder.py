"""Runs ops without memory and writes them down; the modes of torch through which it gets them.

One mode is below autograd: every op that makes memory makes none (a meta tensor), and every op on such
tensors is written down. The other is above it: such tensors say that they are where the code asked for them,
so that code that looks (`tensor.is_meta`, `tensor.device`) does what it would do on tensors with memory.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..sbp.random_mode import draw_key, is_random
from .record import Memory, Op, Recording, attach, memory_of, needed_ops, view_of
from .replay import plainly, value_of

aten = torch.ops.aten

_CPU, _META = torch.device("cpu"), torch.device("meta")
_TORCH_DIR, _OWN_DIR = os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))
#: Numbers recorded calls in their order, whichever `flow.lazy` they are in.
_NUMBERS = itertools.count()

_LIFTS = {aten.lift_fresh.default, aten.lift.default}
#: Ops whose result holds no value yet.
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
#: Forms that take a generator, and those that take none.
_WITHOUT_GENERATOR = {
    aten.rand.generator: aten.rand.default,
    aten.randn.generator: aten.randn.default,
    aten.randint.generator: aten.randint.default,
    aten.randint.low_generator: aten.randint.low,
    aten.randperm.generator: aten.randperm.default,
}
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]


class _Facts(NamedTuple):
    """What an op's schema says.

    Attributes:
        places: whether it takes a device.
        written: positions and names of the arguments that it writes.
        looks: whether its result depends on values in a way that only values can tell.
    """

    places: bool
    written: tuple[tuple[int, str], ...]
    looks: bool


class Recorder:
    """Runs ops without memory and writes them down."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._facts: dict[Callable, _Facts] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of torch's dispatcher."""
        kwargs = dict(kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func in _LIFTS:
            return func(*args) if memory_of(args[0]) is not None else self._constant(args[0])
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        facts = self._facts_of(func)
        lazies = [tensor for tensor in tensors if memory_of(tensor) is not None]
        if not lazies and not facts.places:
            return func(*args, **kwargs)
        written = [
            tensor
            for position, name in facts.written
            for tensor in pytree.tree_leaves(args[position] if position < len(args) else kwargs.get(name))
            if isinstance(tensor, torch.Tensor)
        ]
        if facts.looks or any(memory_of(tensor) is None for tensor in written):
            return self._on_values(func, args, kwargs)
        device = self._device(kwargs, lazies)
        if facts.places:
            kwargs["device"] = _META
            kwargs.pop("pin_memory", None)
        key = _own_key(kwargs) if is_random(func) else None
        func = _WITHOUT_GENERATOR.get(func, func)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._on_meta, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:
            if key is not None:
                raise
            return self._on_values(func, args, kwargs)
        self._note(func, args, kwargs, written, result, device, key)
        return result

    def _facts_of(self, func: Any) -> _Facts:
        if func not in self._facts:
            arguments = func._schema.arguments
            written = [
                (position, one.name)
                for position, one in enumerate(arguments)
                if one.alias_info is not None and one.alias_info.is_write
            ]
            looks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
            places = any(one.name == "device" for one in arguments)
            self._facts[func] = _Facts(places, tuple(written), bool(looks))
        return self._facts[func]

    def _device(self, kwargs: Mapping[str, Any], lazies: Sequence[torch.Tensor]) -> torch.device:
        """Where the code means the result to be."""
        given = kwargs.get("device")
        if given is not None and torch.device(given) != _META:
            return torch.device(given)
        memory = memory_of(lazies[0]) if lazies else None
        return memory.device if memory is not None else _CPU

    def _constant(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor that is there, as a memory that begins as a copy of it."""
        if real.device == _META:
            raise CaptureError(
                f"a meta tensor of shape {tuple(real.shape)} from outside flow.lazy() is used inside, "
                f"{user_line()}; it has no value. Make it inside, without device='meta'"
            )
        meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
        memory = Memory(meta.untyped_storage().nbytes(), real.device, self.recording)
        memory.constant = real.detach().cpu().clone()
        attach(meta, memory)
        return meta

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if memory_of(tensor) is not None else self._constant(tensor)

    def _note(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        written: Sequence[torch.Tensor],
        result: Any,
        device: torch.device,
        key: torch.Tensor | None,
    ) -> None:
        """Writes down one call."""
        made = [
            leaf if isinstance(leaf, torch.Tensor) and memory_of(leaf) is None else None
            for leaf in pytree.tree_leaves(result)
        ]
        for tensor in made:
            if tensor is not None:
                attach(tensor, Memory(tensor.untyped_storage().nbytes(), device, self.recording))
        if func in _EMPTY or (not written and not any(one is not None for one in made)):
            return
        views = [view_of(tensor) for tensor in written]
        outputs = tuple(None if tensor is None else view_of(tensor) for tensor in made)
        args, kwargs = pytree.tree_map_only(torch.Tensor, view_of, (args, kwargs))
        dtype = torch.get_default_dtype()
        op = Op(next(_NUMBERS), func, args, kwargs, tuple(views), outputs, key, dtype)
        changed = {view.memory: None for view in (*views, *outputs) if view is not None}
        for memory in changed:
            memory.writes.append(op)

    def _on_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an op that must know values on values, if those are not random."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.value, (tuple(args), dict(kwargs)))
        with plainly():
            result = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._constant, result)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a lazily built tensor holds, computed now.

        Raises:
            CaptureError: it is a parameter, or random.
        """
        memory = memory_of(tensor)
        if memory is None:
            return tensor
        if isinstance(tensor, nn.Parameter) or any(op.key is not None for op in needed_ops([memory])):
            what = "a parameter" if isinstance(tensor, nn.Parameter) else "a value that is drawn at random"
            raise CaptureError(
                f"{user_line()} looks at {what}, of shape {tuple(tensor.shape)}, but what flow.lazy() "
                "builds has no value yet; initialize with tensor code (torch.where for a branch) inside "
                "flow.lazy(), or after flow.materialize(model)"
            )
        return value_of(view_of(tensor))


def _own_key(kwargs: dict[str, Any]) -> torch.Tensor:
    """What one random op's numbers derive from, drawn from its generator, which it no longer needs."""
    generator = kwargs.pop("generator", None)
    with plainly():
        if generator is None:
            return draw_key()
        drawn = torch.randint(2**62, (), dtype=torch.int64, generator=generator, device=generator.device)
        return drawn.cpu()


class RecordMode(TorchDispatchMode):
    """Gives a recorder every op."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._recorder.run(func, tuple(args), kwargs or {})


class Pretence(TorchFunctionMode):
    """What lazily built tensors say of themselves, and values that Python asks for without an op."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _READS:
            return func(self._recorder.value(args[0]), *args[1:], **(kwargs or {}))
        if func in (_IS_META, _IS_CPU, _DEVICE):
            memory = memory_of(args[0])
            if memory is not None:
                if func == _DEVICE:
                    return memory.device
                return func == _IS_CPU and memory.device == _CPU
        return func(*args, **(kwargs or {}))


def user_line() -> str:
    """`file:line` of the innermost frame outside torch and monoflow."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH_DIR, _OWN_DIR, "<")) and not name.endswith("contextlib.py"):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
