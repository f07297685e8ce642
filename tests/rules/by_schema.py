"""Arguments made from an op's schema: enough for elementwise ops, lists of tensors included."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.null.rule_trial import values
from tests.rules.record import Sample

_SHAPES = ((5, 4), (3, 6, 2), (7,))
_LIST_SHAPES = ((5, 4), (3, 6))


def samples_by_schema(op: Callable) -> list[Sample]:
    """Calls of `op` with tensors of one shape each, floating or integer; those that it takes."""
    found = []
    for shape, dtype in itertools.product(_SHAPES, (torch.float64, torch.int64)):
        sample = _sample(op, shape, dtype)
        if sample is not None and _runs(sample):
            found.append(sample)
    return found


def _sample(op: Callable, shape: tuple[int, ...], dtype: torch.dtype) -> Sample | None:
    assert isinstance(op, torch._ops.OpOverload)
    numbers = iter(range(1, 100))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.has_default_value() and not argument.kwarg_only:
            continue
        kind = str(argument.type)
        given = list(_arguments(kind, shape, dtype, numbers))
        if not given:
            if argument.has_default_value():
                continue
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = given[0]
        else:
            args.append(given[0])
    return Sample(op, tuple(args), kwargs)


def _arguments(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, numbers: Iterator[int]
) -> Iterator[Any]:
    """One argument of a type of the schema, or nothing if it is no type of an elementwise op's."""
    seed = next(numbers)
    if kind in ("Tensor", "Optional[Tensor]"):
        yield _tensor(shape, dtype, seed)
    elif kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        yield [_tensor(one, dtype, seed) for one in _LIST_SHAPES]
    elif kind == "List[number]":
        yield [1.5 + i if dtype.is_floating_point else 2 + i for i in range(len(_LIST_SHAPES))]
    elif kind == "number":
        yield 1.5 if dtype.is_floating_point else 2
    elif kind == "float":
        yield 0.5


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Positive values: no domain is left, and no sign is the same by chance."""
    one = values(*shape, seed=seed).abs() + 0.1
    return one if dtype.is_floating_point else (one * 4).to(dtype) + 1


def _runs(sample: Sample) -> bool:
    try:
        sample.op(*sample.args, **sample.kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True
