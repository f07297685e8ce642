"""Every random op of torch as a counter-based function, for capture and for eager runs alike.

A random op gets a number from torch's own default generator, seeded alike at the start of every step. So
numbers do not depend on the layout, and `torch.utils.checkpoint`, which restores the generator before it
recomputes, gets the forward's numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import CaptureError
from . import ops as _ops  # defines torch.ops.monoflow  # noqa: F401

_NUMBERING_SEED = 0x6D6F6E6F
aten = torch.ops.aten


def draw_key() -> torch.Tensor:
    """A fresh key from torch's default generator: `torch.manual_seed` decides the run. int64, 0-dim."""
    return torch.randint(2**62, (), dtype=torch.int64)


@contextmanager
def op_numbers() -> Iterator[None]:
    """Within: random ops are numbered from the start. The generator is as before afterwards."""
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(_NUMBERING_SEED)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def next_op_number() -> int:
    """The number of the next random op."""
    # Drawn below every dispatch mode: numbering must not itself be traced or faked.
    with _disable_current_modes():
        return int(torch.randint(2**31, (), dtype=torch.int64))


class RandomMode(TorchDispatchMode):
    """Replaces torch's random ops by monoflow's, drawn from `key`."""

    def __init__(self, key: torch.Tensor) -> None:
        super().__init__()
        self.key = key

    def __torch_dispatch__(
        self, func: Callable, types: Sequence, args: Sequence = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return random_or(self.key, func, args, kwargs or {})


def random_or(key: torch.Tensor, func: Callable, args: Sequence, kwargs: dict[str, Any]) -> Any:
    """Runs `func`; a random op in its layout-independent form."""
    form = _FORMS.get(func)
    if form is not None:
        if kwargs.pop("generator", None) is not None:
            raise _refusal(func, "from a generator of its own")
        return form(key, *args, **kwargs)
    if is_random(func):
        raise _refusal(func, "in a form")
    return func(*args, **kwargs)


def is_random(func: Callable) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and func not in _DETERMINISTIC


def has_form(func: Callable) -> bool:
    """Whether a random op has a layout-independent form."""
    return func in _FORMS


def _refusal(func: Callable, how: str) -> CaptureError:
    return CaptureError(
        f"{func} draws random numbers {how} that monoflow cannot make equal on every layout; "
        "draw it outside the step and pass it in, or use torch.rand / randn / randint / bernoulli / dropout"
    )


def _uniform(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.ops.monoflow.uniform(key, next_op_number(), list(shape), dtype=dtype)


def _normal(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.ops.monoflow.normal(key, next_op_number(), list(shape), dtype=dtype)


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None else torch.get_default_dtype()


def _mask(key: torch.Tensor, like: torch.Tensor, p: Any) -> torch.Tensor:
    dtype = like.dtype if like.dtype is torch.float64 else torch.float32
    return _uniform(key, like.shape, dtype) < p


def _native_dropout(key: torch.Tensor, x: torch.Tensor, p: float, train: bool | None) -> tuple:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = _mask(key, x, 1 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x * keep * scale, keep


def _randint(key: torch.Tensor, low: int, high: int, shape: Sequence[int], dtype: torch.dtype | None) -> Any:
    if high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    bits = torch.ops.monoflow.bits(key, next_op_number(), list(shape))
    return (bits % (high - low) + low).to(dtype if dtype is not None else torch.int64)


def _fill(draw: Callable) -> Callable:
    """The in-place form of a random op on its first argument."""

    def form(key: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x.copy_(draw(key, x, *args, **kwargs))

    return form


def _exponential(key: torch.Tensor, x: torch.Tensor, lambd: float = 1) -> torch.Tensor:
    return -torch.log1p(-_uniform(key, x.shape, x.dtype)) / lambd


def _random_(key: torch.Tensor, x: torch.Tensor, *bounds: int | None) -> torch.Tensor:
    if len(bounds) == 2 and bounds[1] is not None:
        low, high = bounds[0] or 0, bounds[1]
    elif len(bounds) == 1 and bounds[0] is not None:
        low, high = 0, bounds[0]
    else:
        low = (bounds[0] or 0) if bounds else 0
        high = 2**24 if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
    return _randint(key, low, high, x.shape, x.dtype)


def _factory(draw: Callable) -> Callable:
    def form(key: torch.Tensor, shape: Sequence[int], *, dtype: Any = None, **_: Any) -> Any:
        return draw(key, shape, _dtype(dtype))

    return form


def _like(draw: Callable) -> Callable:
    def form(key: torch.Tensor, x: torch.Tensor, *, dtype: Any = None, **_: Any) -> Any:
        return draw(key, x.shape, dtype if dtype is not None else x.dtype)

    return form


def _gaussian(key: torch.Tensor, x: torch.Tensor, mean: float = 0, std: float = 1) -> torch.Tensor:
    return _normal(key, x.shape, x.dtype) * std + mean


def _normal_of(key: torch.Tensor, mean: Any, std: Any = 1.0) -> torch.Tensor:
    tensors = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return _normal(key, shape, torch.result_type(tensors[0], tensors[-1])) * std + mean


def _normal_of_floats(
    key: torch.Tensor, mean: float, std: float, size: Sequence[int], *, dtype: Any = None, **_: Any
) -> torch.Tensor:
    return _normal(key, size, _dtype(dtype)) * std + mean


def _randint_form(low_first: bool, like: bool) -> Callable:
    def form(key: torch.Tensor, *args: Any, dtype: Any = None, **_: Any) -> Any:
        shape, bounds = (args[0].shape, args[1:]) if like else (args[-1], args[:-1])
        low, high = bounds if low_first else (0, bounds[0])
        return _randint(key, low, high, shape, dtype if dtype is not None or not like else args[0].dtype)

    return form


def _bernoulli(key: torch.Tensor, x: torch.Tensor, p: Any = None, **_: Any) -> torch.Tensor:
    return _mask(key, x, x if p is None else p).to(x.dtype)


#: torch tags these as random, but they are not (they only may use dropout, which is off or ours).
_DETERMINISTIC = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}

_FORMS: dict[Callable, Callable] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli_.float: _fill(lambda key, x, p=0.5: _mask(key, x, p).to(x.dtype)),
    aten.bernoulli_.Tensor: _fill(lambda key, x, p: _mask(key, x, p).to(x.dtype)),
    aten.rand.default: _factory(_uniform),
    aten.randn.default: _factory(_normal),
    aten.rand_like.default: _like(_uniform),
    aten.randn_like.default: _like(_normal),
    aten.uniform_.default: _fill(lambda key, x, a=0.0, b=1.0: _uniform(key, x.shape, x.dtype) * (b - a) + a),
    aten.normal_.default: _fill(_gaussian),
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.float_float: _normal_of_floats,
    aten.normal_functional.default: _gaussian,
    aten.exponential_.default: _fill(_exponential),
    aten.random_.default: _fill(_random_),
    aten.random_.to: _fill(_random_),
    getattr(aten.random_, "from"): _fill(_random_),
    aten.randint.default: _randint_form(low_first=False, like=False),
    aten.randint.low: _randint_form(low_first=True, like=False),
    aten.randint_like.default: _randint_form(low_first=False, like=True),
    aten.randint_like.low_dtype: _randint_form(low_first=True, like=True),
}
