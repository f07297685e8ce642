"""What the ranks of a trial hold: every split of a shape, and random parts that make up a partial."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from .layout import At, Broadcast, NdSbp, Partial, Sbp, Split, canonical, fits, is_held, take


def every_split(shape: Sequence[int], axis_size: int) -> list[Split]:
    """All splits, blocked and unit ones included, that a tensor of `shape` can have along an axis."""
    found: dict[Split, None] = {}
    for dim, size in enumerate(shape):
        divisors = [k for k in range(1, max(size, 1) + 1) if size % k == 0]
        for blocks, unit in itertools.product(divisors, divisors):
            one = Split(dim, blocks, unit)
            if fits(size, one, axis_size):
                found[canonical(size, one, axis_size)] = None
    return list(found)


def distribute(
    tensor: torch.Tensor,
    sbp: NdSbp,
    mesh: Sequence[int],
    generator: torch.Generator,
    strided: bool = False,
) -> dict[tuple[int, ...], torch.Tensor]:
    """What every coordinate holds of a whole tensor; parts of a partial are random.

    Args:
        strided: whether shards lie in memory with their last two dims exchanged, as views of moved tensors.
    """
    if not sbp:
        held = tensor.contiguous()
        return {(): held.mT.contiguous().mT if strided and held.ndim > 1 else held}
    found = {}
    for index, part in enumerate(_parts(tensor, sbp[0], mesh[0], generator)):
        for rest, value in distribute(part, sbp[1:], mesh[1:], generator, strided).items():
            found[(index, *rest)] = value if is_held(sbp[:1], (index,)) else value.new_empty(0)
    return found


def _parts(tensor: torch.Tensor, one: Sbp, axis_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """What each rank of an axis holds of a tensor."""
    if isinstance(one, Split):
        return [take(tensor, one, axis_size, index) for index in range(axis_size)]
    if isinstance(one, (Broadcast, At)):
        return [tensor] * axis_size
    if one.op == "sum":
        return _addends(tensor, axis_size, generator)
    return _bounds(tensor, one, axis_size, generator)


def _addends(tensor: torch.Tensor, axis_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random tensors of both signs and unequal sizes, of the tensor's own scale, that add up to it."""
    if tensor.dtype == torch.bool:  # adding booleans is a logical or
        return _bounds(tensor, Partial("max"), axis_size, generator)
    parts, rest = [], tensor
    scale = largest(tensor) or 1.0
    for index in range(axis_size - 1):
        if tensor.is_floating_point() or tensor.is_complex():
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            noise = torch.randn(tensor.shape, generator=generator, dtype=wide)
            part = (((1 + 0.7 * index) * noise + 0.3) * scale).to(tensor.dtype)
        else:
            part = torch.randint(-4, 6, tensor.shape, generator=generator).to(tensor.dtype)
        parts.append(part)
        rest = rest - part
    parts.insert(axis_size // 2, rest)
    return parts


def _bounds(
    tensor: torch.Tensor, one: Partial, axis_size: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Random tensors whose elementwise maximum or minimum is `tensor`."""
    owner = torch.randint(0, axis_size, tensor.shape, generator=generator)
    sign = -1 if one.op == "max" else 1
    parts = []
    for index in range(axis_size):
        if tensor.dtype == torch.bool:
            noise = torch.randint(0, 2, tensor.shape, generator=generator).bool()
            other = tensor & noise if one.op == "max" else tensor | noise
        elif tensor.is_floating_point():
            other = tensor + sign * torch.rand(tensor.shape, generator=generator).mul(2).to(tensor.dtype)
        else:
            step = torch.randint(0, 4, tensor.shape, generator=generator).to(tensor.dtype)
            other = tensor + sign * step
            # Small integer dtypes wrap around at their ends: no bound is there.
            other = torch.where((other > tensor) == (sign > 0), other, tensor)
        parts.append(torch.where(owner == index, tensor, other))
    return parts


def largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 for a tensor without one."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return 0.0
    size = tensor.abs() if tensor.is_complex() else tensor.double().abs()
    return size.double().nan_to_num(0.0, 0.0, 0.0).max().item()
