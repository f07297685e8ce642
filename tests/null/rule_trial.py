"""What the tests of rules share: every listed signature proven by the oracle, on one axis and on two."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monoflow.sbp.layout import Split
from monoflow.sbp.oracle import describe, prove_nd, wrong_signatures
from monoflow.sbp.registry import OpRule
from monoflow.sbp.signature import OpCall, Signature


def proven(
    rule: OpRule,
    op: Callable,
    *args: Any,
    axis_sizes: Sequence[int] = (2, 3, 4),
    nd: bool = True,
    **kwargs: Any,
) -> set[str]:
    """Proves all that the rule lists for the call; the plain signatures for two ranks, as text."""
    for size in axis_sizes:
        wrong = wrong_signatures(op, args, kwargs, rule, size)
        assert not wrong, wrong[0][1]
    call = describe(op, args, kwargs)
    listed = rule.signatures(call, 2, [()] * len(call.inputs))
    assert len(set(listed)) == len(listed), f"{op} lists a signature twice: {list(map(str, listed))}"
    if nd:
        for pair in itertools.product(listed, listed):
            if nests(call, pair):
                prove_nd(op, args, kwargs, pair, (2, 2), rule)
    return {str(one) for one in listed}


def same_as_expanded(rule: OpRule, op: Callable, *args: Any, tolerance: float = 1e-9, **kwargs: Any) -> None:
    """The rule's alternative form gives what the op gives, dtypes included."""
    assert rule.expand is not None, op
    whole = pytree.tree_leaves(op(*args, **kwargs))
    other = pytree.tree_leaves(rule.expand(*args, **kwargs))
    assert len(whole) == len(other)
    for want, have in zip(whole, other, strict=True):
        assert (want is None) == (have is None)
        if want is not None:
            torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def holds(signatures: Iterable[str], *wanted: str) -> None:
    """Asserts that the wanted signatures are listed."""
    missing = set(wanted) - set(signatures)
    assert not missing, f"missing {sorted(missing)} in {sorted(signatures)}"


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Reproducible values without symmetry: normal, shifted by a third."""
    generator = torch.Generator().manual_seed(seed + 17 * len(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + 1 / 3).to(dtype)


def integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible integers in [0, high)."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def nests(call: OpCall, pair: Sequence[Signature]) -> bool:
    """Whether a rule that saw the whole shapes may be applied twice: the same dim twice must be even."""
    tensors = [*zip(call.inputs, *(one.inputs for one in pair), strict=True)]
    tensors += zip(call.outputs, *(one.outputs for one in pair), strict=True)
    for meta, one, two in tensors:
        if isinstance(one, Split) and isinstance(two, Split):
            even = one.unit == two.unit == one.blocks == two.blocks == 1 and meta.shape[one.dim] % 4 == 0
            if one.dim == two.dim and not even:
                return False
    return True
