"""All rules, one file an op family. A file exports RULES: {overload: OpRule}; this table merges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..registry import OpRule
from . import (
    attention,
    attention_kernels,
    batch_norm,
    convolution,
    embedding,
    embedding_bag,
    factory,
    fft,
    index,
    linalg,
    loss,
    matmul,
    normalization,
    optimizer,
    pieces,
    pointwise,
    pooling,
    random,
    reduction,
    sampling,
    softmax,
    view,
)


def _merge(*tables: Mapping[Callable, OpRule]) -> Mapping[Callable, OpRule]:
    merged: dict[Callable, OpRule] = {}
    for table in tables:
        twice = merged.keys() & table.keys()
        assert not twice, f"two rules for {sorted(map(str, twice))}"
        merged |= table
    return MappingProxyType(merged)


RULES: Mapping[Callable, OpRule] = _merge(
    attention.RULES,
    attention_kernels.RULES,
    batch_norm.RULES,
    convolution.RULES,
    embedding.RULES,
    embedding_bag.RULES,
    factory.RULES,
    fft.RULES,
    index.RULES,
    linalg.RULES,
    loss.RULES,
    matmul.RULES,
    normalization.RULES,
    optimizer.RULES,
    pieces.RULES,
    pointwise.RULES,
    pooling.RULES,
    random.RULES,
    reduction.RULES,
    sampling.RULES,
    softmax.RULES,
    view.RULES,
)
