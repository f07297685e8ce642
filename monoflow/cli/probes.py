"""What `monoflow calibrate` runs: for each class of ops a typical one, in several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..lower.local import update_in_place
from ..plan.cost import curve_key
from ..plan.op_class import OpClass, amount_of, class_of
from ..sbp.ops import random as _random  # noqa: F401  (it defines the ops)
from ..sbp.signature import TensorMeta

aten = torch.ops.aten
Tensor = torch.Tensor
Make = Callable[[int, torch.dtype, torch.device], tuple[Any, ...]]

ROW = 256  # elements of a row in look-ups
_KB = 1 << 10


@dataclass(frozen=True)
class Probe:
    """One op in several sizes.

    Attributes:
        make: from (size, dtype, device) the op's arguments.
        sizes: for a CPU rank, ascending.
        large: further sizes for an accelerator.
        dtypes: what to measure it in.
        of: the class that it stands for, where that is not its op's.
    """

    op: Callable
    make: Make
    sizes: Sequence[int]
    large: Sequence[int] = ()
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    keywords: dict[str, Any] = field(default_factory=dict)
    of: OpClass | None = None

    def points(self, device: torch.device) -> Iterator[Point]:
        """Its calls, smallest first."""
        for dtype in self.dtypes:
            for size in (*self.sizes, *(self.large if device.type != "cpu" else ())):
                yield Point(self, size, dtype, device)


@dataclass(frozen=True)
class Point:
    """One call to time; every `arguments()` gives fresh tensors."""

    probe: Probe
    size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def kind(self) -> OpClass:
        return self.probe.of or class_of(self.probe.op)

    @property
    def key(self) -> str:
        """The curve that it is a point of."""
        return curve_key(self.kind, self.dtype)

    def arguments(self) -> tuple[Any, ...]:
        return self.probe.make(self.size, self.dtype, self.device)

    def run(self, arguments: tuple[Any, ...]) -> Any:
        if self.kind is OpClass.OPTIMIZER:  # as programs call it
            update_in_place(self.probe.op, *arguments, **self.probe.keywords)
            return None
        return self.probe.op(*arguments, **self.probe.keywords)

    def amount(self, arguments: tuple[Any, ...], result: Any) -> float:
        """How much work the call is; an update in place counts as the functional one that graphs hold."""
        outputs = _metas(result) or _metas(arguments[:4])
        return max(1.0, amount_of(self.probe.op, self.kind, _metas(arguments), outputs, arguments))


def _metas(tree: Any) -> list[TensorMeta]:
    leaves = pytree.tree_leaves(tree)
    return [TensorMeta(tuple(x.shape), x.dtype) for x in leaves if isinstance(x, Tensor)]


def _square(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return _filled(dtype, device, n, n), _filled(dtype, device, n, n)


def _pair(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return _filled(dtype, device, n), _filled(dtype, device, n)


def _rows(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    width = min(n, 256)
    return _filled(dtype, device, max(1, n // width), width)


def _filled(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, 0.5, dtype=dtype, device=device)


def _mask(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return (_filled(torch.bool, device, n),)


def _images(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Eight images of n channels on a side of 16, and 3 x 3 weights of as many."""
    return _filled(dtype, device, 8, n, 16, 16), _filled(dtype, device, n, n, 3, 3)


_CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _convolution_backward(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    image, weight = _images(n, dtype, device)
    return image, image.clone(), weight, None, *_CONVOLUTION, [True, True, False]


def _strided_backward(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    image, weight = _images(n, dtype, device)
    half = _filled(dtype, device, 8, n, 8, 8)
    return half, image, weight, None, [2, 2], *_CONVOLUTION[1:], [True, True, False]


def _few_rows(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return _filled(dtype, device, 4, n), _filled(dtype, device, n, n)


def _channels(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Channels of 64 pixels, and a number for each."""
    count = max(1, n // 256)
    return _filled(dtype, device, 4, count, 8, 8), _filled(dtype, device, 1, count, 1, 1)


def _heads(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Queries, keys and values of 8 heads and n tokens."""
    return *(_filled(dtype, device, 2, 4, n, 64) for _ in range(3)), None, True, 0.125


def _heads_backward(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    query, key, value, *rest = _heads(n, dtype, device)
    out, lse = torch.ops.monoflow.attention.default(query, key, value, *rest)
    return torch.ones_like(out), query, key, value, None, out, lse, True, 0.125


def _look_up(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    table = _filled(dtype, device, 4 * n, ROW)
    return table, torch.randint(0, 4 * n, (n,), device=device)


def _look_up_backward(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return _filled(dtype, device, n, ROW), torch.randint(0, n, (n,), device=device), n, -1, False


def _update(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    states = [[_filled(dtype, device, n)] for _ in range(4)]
    return *states, [], [torch.ones((), device=device)]


_ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
_ADAMW |= {"amsgrad": False, "maximize": False}
_ELEMENTS = (64, 4 * _KB, 32 * _KB, 256 * _KB, _KB * _KB, 4 * _KB * _KB)
_FEW_ELEMENTS = (64, 4 * _KB, 64 * _KB, _KB * _KB)
_MANY_ELEMENTS = (64 * _KB * _KB,)

PROBES: tuple[Probe, ...] = (
    Probe(aten.view.default, lambda n, t, d: (_filled(t, d, n), [n]), (64,)),
    Probe(aten.mm.default, _square, (16, 64, 128, 256, 512), (2048, 4096, 8192)),
    Probe(aten.mm.default, _square, (64, 512), (2048, 4096, 8192), (torch.bfloat16,)),
    Probe(aten.mm.default, _square, (64, 512), (2048,), (torch.float64,)),
    Probe(aten.convolution.default, lambda *s: (*_images(*s), None, *_CONVOLUTION), (8, 16, 32, 64), (256,)),
    Probe(aten.convolution_backward.default, _convolution_backward, (8, 16, 32, 64), (256,)),
    Probe(
        aten.convolution_backward.default,
        _strided_backward,
        (8, 16, 32, 64),
        (256,),
        of=OpClass.STRIDED_BACKWARD,
    ),
    Probe(aten.mm.default, _few_rows, (64, 256, 1024, 2048), (8192,), of=OpClass.FACTORS),
    Probe(torch.ops.monoflow.attention.default, _heads, (16, 64, 256), (1024, 4096)),
    Probe(torch.ops.monoflow.attention_backward.default, _heads_backward, (16, 64, 256), (1024, 4096)),
    Probe(aten.add.Tensor, _pair, (*_ELEMENTS, 8 * _KB * _KB), _MANY_ELEMENTS),
    Probe(aten.mul.Tensor, _channels, (512, *_ELEMENTS[1:]), _MANY_ELEMENTS, of=OpClass.SPREAD),
    Probe(aten._to_copy.default, _mask, _ELEMENTS, _MANY_ELEMENTS, keywords={"dtype": torch.float32}),
    Probe(aten.gelu.default, lambda *s: (_rows(*s),), _ELEMENTS, _MANY_ELEMENTS),
    Probe(aten.sum.dim_IntList, lambda *s: (_rows(*s), [0]), _ELEMENTS, _MANY_ELEMENTS),
    Probe(aten._log_softmax.default, lambda *s: (_rows(*s), 1, False), _FEW_ELEMENTS, _MANY_ELEMENTS),
    Probe(
        aten.native_layer_norm.default,
        lambda n, t, d: (_rows(n, t, d), [min(n, 256)], None, None, 1e-5),
        _FEW_ELEMENTS,
        _MANY_ELEMENTS,
    ),
    Probe(
        aten.max_pool2d_with_indices.default,
        lambda n, t, d: (_filled(t, d, 1, max(1, n // 256), 16, 16), [2, 2]),
        _FEW_ELEMENTS,
        _MANY_ELEMENTS,
    ),
    Probe(aten.embedding.default, _look_up, (16, 256, 4 * _KB), (256 * _KB,)),
    Probe(aten.embedding_dense_backward.default, _look_up_backward, (16, 256, 4 * _KB), (256 * _KB,)),
    Probe(
        torch.ops.monoflow.uniform.default,
        lambda n, t, d: (torch.ones((), dtype=torch.int64, device=d), 1, [n]),
        _FEW_ELEMENTS,
        _MANY_ELEMENTS,
        keywords={"dtype": torch.float32},
    ),
    Probe(aten._fused_adamw_.default, _update, _ELEMENTS, _MANY_ELEMENTS, keywords=_ADAMW),
    Probe(
        aten.sort.default, lambda n, t, d: (torch.rand(n, device=d),), (64, 4 * _KB, 64 * _KB), _MANY_ELEMENTS
    ),
)
