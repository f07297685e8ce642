"""How two checkpoints differ, a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .arrange import PIECE
from .boxes import cut, num_elements, whole_box
from .read import Source


class Difference(NamedTuple):
    """One thing in which two checkpoints differ.

    Attributes:
        name: of a tensor, or of an entry of what is no tensor.
        a, b: what it is in each; empty where it is not there.
        num_elements: that differ, of tensors of the same shape and dtype.
        largest: the largest absolute deviation of those; NaN if there is a NaN in one of both alone.
    """

    name: str
    a: str
    b: str
    num_elements: int = 0
    largest: float = 0.0


def differences(a: Source, b: Source) -> Iterator[Difference]:
    """Everything in which two checkpoints differ; reads all of both."""
    for name in dict.fromkeys((*a.tensors, *b.tensors)):
        one, two = _describe(a, name), _describe(b, name)
        if one != two:
            yield Difference(name, one, two)
            continue
        count, largest = _compare(a, b, name)
        if count:
            yield Difference(name, one, two, count, largest)
    for key in dict.fromkeys((*a.meta, *b.meta)):
        if key != "versions" and a.meta.get(key) != b.meta.get(key):
            yield Difference(key, _short(a.meta.get(key)), _short(b.meta.get(key)))


def _describe(source: Source, name: str) -> str:
    one = source.tensors.get(name)
    return "" if one is None else f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _compare(a: Source, b: Source, name: str) -> tuple[int, float]:
    """How many elements differ, bit for bit, and by how much at most."""
    meta = a.tensors[name]
    box = whole_box(meta.shape)
    count, largest = 0, 0.0
    for piece in cut(box, PIECE // meta.dtype.itemsize) if num_elements(box) else ():
        x, y = a.read(name, piece), b.read(name, piece)
        raw = [t.contiguous().reshape(-1).view(torch.uint8).view(-1, t.itemsize) for t in (x, y)]
        differs = (raw[0] != raw[1]).any(1)
        if differs.any():
            count += int(differs.sum())
            wide = torch.complex128 if meta.dtype.is_complex else torch.float64
            gap = (x.reshape(-1)[differs].to(wide) - y.reshape(-1)[differs].to(wide)).abs().max().item()
            largest = gap if math.isnan(gap) else max(largest, gap)
    return count, largest
