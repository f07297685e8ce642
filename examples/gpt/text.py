"""Real text as bytes: given files, or the Python standard library's own source."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def standard_library() -> list[Path]:
    """The sources of the running Python, in an order that does not depend on the file system."""
    root = Path(os.__file__).parent
    return sorted(path for path in root.rglob("*.py") if not SKIP & set(path.relative_to(root).parts))


def read(files: Iterable[Path], max_bytes: int) -> Tensor:
    """The first `max_bytes` of the files' bytes, one after the other, as int64."""
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8).long()


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte that the frequencies of single bytes leave: what a model without context can reach."""
    frequency = torch.bincount(text).double() / len(text)
    return -torch.special.xlogy(frequency, frequency).sum().item()


def windows(text: Tensor, context: int) -> dict[str, Tensor]:
    """The text cut into windows, as a dataset; a model shifts the labels itself."""
    cut = text[: len(text) // context * context].reshape(-1, context)
    return {"input_ids": cut, "labels": cut}
