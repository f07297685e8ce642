"""The candidates of a trial: layouts that hold for one draw of values on two ranks, found by force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from .layout import B, P, Sbp, Split, local_dim
from .oracle import distribute
from .signature import Signature
from .trial_args import Arguments, outputs_of, tensors_of, with_tensors

_MOST_CANDIDATES = 512  # layouts of the inputs that are tried by force
_MOST_SIGNATURES = 64  # candidates that the oracle is asked about
_CLOSE = 1e-3  # of the largest value: how near a candidate must come before the oracle is asked


def candidates(op: Callable, given: Arguments) -> list[Signature]:
    """Signatures of plain splits, B and P(sum) that may be exact; the oracle has to prove them.

    Args:
        op: the op.
        given: arguments on which it runs.
    """
    whole = outputs_of(op(*given[0], **given[1]))
    tensors = tensors_of(given)
    generator = torch.Generator().manual_seed(0)
    parts = [
        {one: distribute(tensor, (one,), (2,), generator) for one in _plain(tensor)} for tensor in tensors
    ]
    found: dict[Signature, None] = {}
    for inputs in _input_layouts(given):
        held = [parts[i][one] for i, one in enumerate(inputs)]
        for outputs in _output_layouts(op, given, whole, held):
            found[Signature(inputs, outputs)] = None
    return list(found)[:_MOST_SIGNATURES]


def _input_layouts(given: Arguments) -> Iterator[tuple[Sbp, ...]]:
    """Ways to lay out the inputs: equal dims split together first, then all others, fewest splits first."""
    tensors = tensors_of(given)
    options = [_plain(tensor) for tensor in tensors]
    extents = sorted({n for tensor in tensors for n in tensor.shape if n > 1})
    alike = [tuple(_first_dim(tensor, extent) for tensor in tensors) for extent in extents]
    others = sorted(
        itertools.islice(itertools.product(*options), 16 * _MOST_CANDIDATES),
        key=lambda sbps: sum(one != B for one in sbps),
    )
    layouts = [sbps for sbps in dict.fromkeys([*alike, *others]) if any(one != B for one in sbps)]
    yield from layouts[:_MOST_CANDIDATES]


def _plain(tensor: torch.Tensor) -> list[Sbp]:
    linear = tensor.is_floating_point() or tensor.is_complex()
    splits = [Split(dim) for dim, extent in enumerate(tensor.shape) if extent > 1]
    return [B, *splits, *([P] if linear else [])]


def _first_dim(tensor: torch.Tensor, extent: int) -> Sbp:
    return next((Split(dim) for dim, n in enumerate(tensor.shape) if n == extent), B)


def _output_layouts(
    op: Callable,
    given: Arguments,
    whole: Sequence[torch.Tensor | None],
    parts: Sequence[Mapping[tuple[int, ...], torch.Tensor]],
) -> Iterator[tuple[Sbp, ...]]:
    """The layouts in which two ranks that take these parts hold the outputs; none if one of them raises."""
    held = []
    for rank in range(2):
        args, kwargs = with_tensors(given, [part[rank,] for part in parts])
        try:
            held.append(outputs_of(op(*args, **kwargs)))
        except Exception:  # whatever a user's op raises on a shard: the layout is not one of its own
            return
        if len(held[-1]) != len(whole):
            return
    for_each = zip(whole, zip(*held, strict=True), strict=True)
    yield from itertools.product(*(_matching(one, ranks) for one, ranks in for_each))


def _matching(whole: torch.Tensor | None, held: Sequence[torch.Tensor | None]) -> list[Sbp]:
    """The layouts in which what two ranks hold is the whole output."""
    if whole is None or any(one is None for one in held):
        return [B] if whole is None and all(one is None for one in held) else []
    shards = [one for one in held if one is not None]
    if any(one.dtype != whole.dtype for one in shards):
        return []
    found: list[Sbp] = []
    for dim, extent in enumerate(whole.shape):
        if extent > 1 and all(_is_shard(one, whole, dim, rank) for rank, one in enumerate(shards)):
            found += [Split(dim)] if _is_close(torch.cat(shards, dim), whole) else []
    if all(shard.shape == whole.shape for shard in shards):
        found += [B] if all(_is_close(shard, whole) for shard in shards) else []
        if whole.numel() and whole.dtype != torch.bool and _is_close(shards[0] + shards[1], whole):
            found.append(P)
    return found


def _is_shard(shard: torch.Tensor, whole: torch.Tensor, dim: int, rank: int) -> bool:
    """Whether the shape is what a rank of two holds of the whole, split along a dim."""
    shape = list(whole.shape)
    shape[dim] = local_dim(shape[dim], Split(dim), 2, rank)
    return list(shard.shape) == shape


def _is_close(found: torch.Tensor, whole: torch.Tensor) -> bool:
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(found, whole)
    largest = whole.abs().max().item() if whole.numel() else 0.0
    tolerance = 0.1 if whole.dtype in (torch.float16, torch.bfloat16) else _CLOSE
    return torch.allclose(found, whole, rtol=tolerance, atol=tolerance * largest)
