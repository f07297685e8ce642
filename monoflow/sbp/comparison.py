"""One op with real arguments and its whole result, and how far what shards give is from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .layout import Broadcast, NdSbp, unshard
from .parts import largest
from .signature import OpCall, TensorMeta

#: How far a value computed on shards may be off, relative to the largest value of the output. Where the
#: output is what is left of larger values (a sum that cancels, a widened narrow float), this would refuse
#: rounding; then as far as the output itself moves when the inputs move by their rounding (`Trial.noise`),
#: but never further than this of the largest value that took part.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 5e-5,
    torch.complex64: 5e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

#: How many times its inputs' rounding an output may move: sums on shards round in another order, and random
#: parts are several times as large as the whole. Fewer where the rounding is large itself.
_ROUNDINGS = 16
_NARROW_ROUNDINGS = 6

#: What one rank holds of every output, by coordinate.
Held = Mapping[tuple[int, ...], Sequence[torch.Tensor | None]]


@dataclass(frozen=True)
class Trial:
    """One op with real arguments and its whole result."""

    op: Callable
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: OpCall
    tensors: tuple[torch.Tensor, ...]
    whole: tuple[torch.Tensor | None, ...]

    @cached_property
    def noise(self) -> tuple[float, ...]:
        """How far each output moves when every input moves by the rounding of its own dtype."""
        generator = torch.Generator().manual_seed(0)
        moved = [0.0] * len(self.whole)
        for _ in range(2):
            try:
                results = run_own(self, [_rounded(tensor, generator) for tensor in self.tensors])
            except (RuntimeError, ValueError, IndexError):  # an op may refuse what is next to its domain
                continue
            for i, (one, whole) in enumerate(zip(results, self.whole, strict=True)):
                if one is not None and whole is not None and one.shape == whole.shape and is_float(whole):
                    moved[i] = max(moved[i], largest(one - whole))
        return tuple(moved)

    @cached_property
    def scale(self) -> float:
        """The largest value of any input."""
        return max(map(largest, self.tensors), default=0.0)


def trial_of(op: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trial:
    """Runs the op once on whole tensors, which it must not change."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    before = [tensor.clone() for tensor in tensors]
    whole = outputs_of(op(*args, **kwargs))
    changed = [i for i, (a, b) in enumerate(zip(tensors, before, strict=True)) if not same(a, b)]
    assert not changed, f"{op} changed its inputs {changed}; the oracle takes functional ops only"
    metas = pytree.tree_map_only(torch.Tensor, meta_of, (tuple(args), dict(kwargs)))
    outputs = tuple(None if one is None else meta_of(one) for one in whole)
    return Trial(op, tuple(args), dict(kwargs), OpCall(op, metas[0], metas[1], outputs), tensors, whole)


def run_own(trial: Trial, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """What the op itself gives for other tensors."""
    arriving = iter(values)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda _: next(arriving), (trial.args, dict(trial.kwargs))
    )
    return outputs_of(trial.op(*args, **kwargs))


def output_problem(
    trial: Trial, results: Held, position: int, sbp: NdSbp, mesh: tuple[int, ...]
) -> str | None:
    """Why what the ranks hold of one output under a layout is not the whole, or None."""
    whole = trial.whole[position]
    if whole is None:
        return None
    held = {c: one for c, values in results.items() if (one := values[position]) is not None}
    scale = max(map(largest, (whole, *held.values())))
    for replica in itertools.product(
        *(range(n) if isinstance(one, Broadcast) else (0,) for one, n in zip(sbp, mesh, strict=True))
    ):
        chosen = {c: held[_replica_of(c, replica, sbp)] for c in held}
        try:
            joined = unshard(chosen, sbp, mesh)
        except (RuntimeError, ValueError) as error:
            return f" does not join: {error}"
        problem = _difference(trial, position, joined, scale)
        if problem is not None:
            return f"{f' (replica {replica})' if any(replica) else ''}: {problem}"
    return None


def _replica_of(coordinate: tuple[int, ...], replica: tuple[int, ...], sbp: NdSbp) -> tuple[int, ...]:
    """The coordinate, moved to the chosen replica along every broadcast axis."""
    return tuple(
        r if isinstance(one, Broadcast) else c for c, r, one in zip(coordinate, replica, sbp, strict=True)
    )


def _difference(trial: Trial, position: int, found: torch.Tensor, scale: float) -> str | None:
    """What is wrong with an output that the ranks' parts make, or None. `scale`: of the largest part."""
    whole = trial.whole[position]
    assert whole is not None
    if (found.shape, found.dtype) != (whole.shape, whole.dtype):
        return f"the ranks hold {meta_of(found)}, the whole is {meta_of(whole)}"
    close = _is_close(trial, position, found, scale)
    if bool(close.all()):
        return None
    where = tuple((~close).nonzero()[0].tolist())
    count = int((~close).sum())
    return f"{count} of {whole.numel()} elements differ, first {found[where]} for {whole[where]} at {where}"


def _is_close(trial: Trial, position: int, found: torch.Tensor, scale: float) -> torch.Tensor:
    """Of every element: whether it is off by no more than rounding."""
    whole = trial.whole[position]
    assert whole is not None
    relative = _TOLERANCE.get(whole.dtype, 0.0)
    if not relative:
        return found == whole
    close = torch.isclose(found, whole, rtol=relative, atol=relative * max(scale, 1e-30), equal_nan=True)
    if not bool(close.all()):
        bound = max(_TOLERANCE[t.dtype] for t in (*trial.tensors, whole) if is_float(t))
        count = _ROUNDINGS if bound <= _TOLERANCE[torch.float32] else _NARROW_ROUNDINGS
        absolute = min(count * trial.noise[position], bound * max(trial.scale, scale))
        close |= torch.isclose(found, whole, rtol=relative, atol=absolute, equal_nan=True)
    return close


def _rounded(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The tensor moved by about the rounding of its largest value; what is no float stays."""
    if not is_float(tensor):
        return tensor
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    noise = torch.randn(tensor.shape, generator=generator, dtype=wide)
    step = torch.finfo(tensor.dtype).eps / 2 * largest(tensor)
    return (tensor + step * noise).to(tensor.dtype)


def is_float(tensor: torch.Tensor) -> bool:
    """Whether the values round: floating or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def outputs_of(result: Any) -> tuple[torch.Tensor | None, ...]:
    """The tensors (and Nones) of a result, flattened."""
    leaves = pytree.tree_leaves(result)
    return tuple(leaf for leaf in leaves if leaf is None or isinstance(leaf, torch.Tensor))


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Shape and dtype."""
    return TensorMeta(tuple(tensor.shape), tensor.dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same, NaNs included."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
