"""The oracle: proves a signature by running the op on shards and comparing with the whole.

A trial is only as good as its values: give it random, asymmetric arguments (no zeros, no symmetric
shapes) and sizes that do not divide, and a wrong rule does not survive by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .layout import B, Broadcast, NdSbp, P, Partial, Sbp, Split, canonical, fits, take, text, unshard
from .registry import Forms, OpRule, own_op
from .signature import LocalCall, OpCall, Signature, TensorMeta, TensorShard

#: How far a value computed on shards may be off, relative to the largest value that took part.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 5e-5,
    torch.complex64: 5e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

Locals = dict[tuple[int, ...], Any]


class WrongRule(AssertionError):
    """A rule lists a layout under which its op is not exact."""


@dataclass(frozen=True)
class _Trial:
    """One op with real arguments and its whole result."""

    op: Callable
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: OpCall
    tensors: tuple[torch.Tensor, ...]
    whole: tuple[torch.Tensor | None, ...]


def describe(op: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
    """The OpCall of an op with real arguments; runs the op once to learn its outputs."""
    return _trial(op, args, kwargs).call


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


def prove(
    op: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: Signature,
    axis_size: int,
    rule: OpRule | None = None,
    *,
    seed: int = 0,
) -> None:
    """Check one signature of an op along one axis.

    Args:
        op: the op, called as `op(*args, **kwargs)`; it must not change its arguments.
        args, kwargs: real whole tensors and plain values.
        signature: the layout to check.
        axis_size: how many ranks the axis has.
        rule: where the local form comes from; without one the op runs on shards as it is.
        seed: picks the random parts of partial inputs.

    Raises:
        WrongRule: some rank fails, or what the ranks hold is not the op's whole result.
    """
    prove_nd(op, args, kwargs, [signature], (axis_size,), rule, seed=seed)


def prove_nd(
    op: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signatures: Sequence[Signature],
    mesh: Sequence[int],
    rule: OpRule | None = None,
    *,
    seed: int = 0,
) -> None:
    """Check a product of signatures, one for each axis of `mesh` (outermost first). See `prove`."""
    _prove(_trial(op, args, kwargs), signatures, tuple(mesh), rule, seed)


def wrong_signatures(
    op: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: OpRule,
    axis_size: int,
    forms: Forms | None = None,
) -> list[tuple[Signature, str]]:
    """The signatures that `rule` lists for this call and that are not exact, each with what is wrong.

    `forms` are the splits offered to the rule per tensor input; all that fit when left out.
    """
    trial = _trial(op, args, kwargs)
    wrong = []
    for signature in listed(trial.call, rule, axis_size, forms):
        try:
            _prove(trial, [signature], (axis_size,), rule, seed=0)
        except WrongRule as error:
            wrong.append((signature, str(error)))
    return wrong


def missing_signatures(
    op: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rule: OpRule,
    axis_size: int,
    *,
    limit: int = 4096,
) -> list[Signature]:
    """Exact signatures made of plain S(dim), B and P(sum) that `rule` does not list.

    Index tensors are cut but never partial, and dims of one element are not split. At most `limit`
    layouts are tried, those with fewest split inputs first.
    """
    trial = _trial(op, args, kwargs)
    known = set(listed(trial.call, rule, axis_size, None))
    floating = any(tensor.is_floating_point() or tensor.is_complex() for tensor in trial.tensors)
    options = [_plain_layouts(t.shape, not floating or not _is_index(t)) for t in trial.tensors]
    combinations = sorted(itertools.product(*options), key=lambda sbps: sum(one != B for one in sbps))
    candidates = (
        Signature(inputs, outputs)
        for inputs in combinations
        for outputs in itertools.product(*map(_output_layouts, trial.whole))
    )
    missing = []
    for signature in itertools.islice(candidates, limit):
        replicated = all(one == B for one in (*signature.inputs, *signature.outputs))
        if not replicated and signature not in known and _is_exact(trial, signature, axis_size, rule):
            missing.append(signature)
    return missing


def listed(call: OpCall, rule: OpRule, axis_size: int, forms: Forms | None) -> list[Signature]:
    """What the rule lists when it is offered `forms`, or every split that fits when None."""
    if forms is None:
        forms = [every_split(meta.shape, axis_size) for meta in call.inputs]
    return rule.signatures(call, axis_size, forms)


def distribute(
    tensor: torch.Tensor, sbp: NdSbp, mesh: Sequence[int], generator: torch.Generator
) -> dict[tuple[int, ...], torch.Tensor]:
    """What every coordinate holds of a whole tensor; parts of a partial are random."""
    if not sbp:
        return {(): tensor.contiguous()}
    found = {}
    for index, part in enumerate(_parts(tensor, sbp[0], mesh[0], generator)):
        for rest, value in distribute(part, sbp[1:], mesh[1:], generator).items():
            found[(index, *rest)] = value
    return found


def _trial(op: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Trial:
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    before = [tensor.clone() for tensor in tensors]
    whole = _outputs(op(*args, **kwargs))
    changed = [i for i, (a, b) in enumerate(zip(tensors, before, strict=True)) if not _same(a, b)]
    assert not changed, f"{op} changed its inputs {changed}; the oracle takes functional ops only"
    metas = pytree.tree_map_only(torch.Tensor, _meta, (tuple(args), dict(kwargs)))
    outputs = tuple(None if one is None else _meta(one) for one in whole)
    return _Trial(op, tuple(args), dict(kwargs), OpCall(op, metas[0], metas[1], outputs), tensors, whole)


def _prove(
    trial: _Trial, signatures: Sequence[Signature], mesh: tuple[int, ...], rule: OpRule | None, seed: int
) -> None:
    def fail(problem: str) -> WrongRule:
        layouts = " x ".join(f"[{one}]" for one in signatures)
        described = ", ".join(map(str, (*trial.call.args, *trial.call.kwargs.items())))
        return WrongRule(f"{trial.op}({described}) on {mesh}: {layouts} is wrong: {problem}")

    inputs, outputs = _layouts(trial, signatures, fail)
    generator = torch.Generator().manual_seed(seed)
    parts = [distribute(t, sbp, mesh, generator) for t, sbp in zip(trial.tensors, inputs, strict=True)]
    results: dict[tuple[int, ...], tuple[torch.Tensor | None, ...]] = {}
    for coordinate in itertools.product(*map(range, mesh)):
        local_inputs = [held[coordinate] for held in parts]
        try:
            results[coordinate] = _run_local(trial, rule, local_inputs, inputs, outputs, mesh, coordinate)
        except Exception as error:
            raise fail(f"rank {coordinate} raises {type(error).__name__}: {error}") from error
    _check_outputs(trial, results, outputs, mesh, fail)


def _layouts(
    trial: _Trial, signatures: Sequence[Signature], fail: Callable[[str], WrongRule]
) -> tuple[list[NdSbp], list[NdSbp]]:
    """The nd-SBP of every input and output, from one signature per axis."""
    for one in signatures:
        counts = (len(one.inputs), len(one.outputs))
        expected = (len(trial.tensors), len(trial.whole))
        if counts != expected:
            raise fail(f"{counts[0]} inputs and {counts[1]} outputs, the op has {expected}")
    inputs = [tuple(one.inputs[i] for one in signatures) for i in range(len(trial.tensors))]
    outputs = [tuple(one.outputs[i] for one in signatures) for i in range(len(trial.whole))]
    for whole, sbp in zip(trial.whole, outputs, strict=True):
        if whole is None and any(one != B for one in sbp):
            raise fail(f"an absent output has layout {text(sbp)}, it must be B")
    for sbp, tensor in [*zip(inputs, trial.tensors, strict=True), *zip(outputs, trial.whole, strict=True)]:
        if tensor is not None and any(isinstance(o, Split) and not 0 <= o.dim < tensor.ndim for o in sbp):
            raise fail(f"{text(sbp)} on a tensor of {tensor.ndim} dims")
    return inputs, outputs


def _run_local(
    trial: _Trial,
    rule: OpRule | None,
    values: Sequence[torch.Tensor],
    inputs: Sequence[NdSbp],
    outputs: Sequence[NdSbp],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[torch.Tensor | None, ...]:
    """What the op's local form gives on one rank."""
    arriving = iter(values)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda _: next(arriving), (trial.args, dict(trial.kwargs))
    )
    call = LocalCall(
        trial.op,
        args,
        kwargs,
        [TensorShard(m, sbp, mesh, coordinate) for m, sbp in zip(trial.call.inputs, inputs, strict=True)],
        [
            None if m is None else TensorShard(m, sbp, mesh, coordinate)
            for m, sbp in zip(trial.call.outputs, outputs, strict=True)
        ],
    )
    local = rule.local if rule is not None and rule.local is not None else own_op
    op, args, kwargs = local(call)
    results = _outputs(op(*args, **kwargs))
    for position, (result, shard) in enumerate(zip(results, call.outputs, strict=True)):
        if (result is None) != (shard is None):
            raise ValueError(f"output {position} is absent on one side only")
        if result is not None and shard is not None:
            expected = (shard.shape, shard.meta.dtype)
            if (tuple(result.shape), result.dtype) != expected:
                raise ValueError(
                    f"output {position} is {_meta(result)}, its layout {text(shard.sbp)} "
                    f"wants {TensorMeta(*expected)}"
                )
    return results


def _check_outputs(
    trial: _Trial,
    results: Mapping[tuple[int, ...], Sequence[torch.Tensor | None]],
    outputs: Sequence[NdSbp],
    mesh: tuple[int, ...],
    fail: Callable[[str], WrongRule],
) -> None:
    """Compare what the ranks hold with the whole result, for every choice of replicas."""
    if _is_uninitialized(trial.op):
        return
    for position, (whole, sbp) in enumerate(zip(trial.whole, outputs, strict=True)):
        if whole is None:
            continue
        held: dict[tuple[int, ...], torch.Tensor] = {
            c: one for c, values in results.items() if (one := values[position]) is not None
        }
        largest = max((_largest(one) for one in (whole, *held.values())), default=0.0)
        for replica in itertools.product(
            *(range(n) if isinstance(one, Broadcast) else (0,) for one, n in zip(sbp, mesh, strict=True))
        ):
            chosen = {c: held[_replica_of(c, replica, sbp)] for c in held}
            try:
                joined = unshard(chosen, sbp, mesh)
            except (RuntimeError, ValueError) as error:
                raise fail(f"output {position} does not join: {error}") from error
            problem = _difference(joined, whole, largest)
            if problem is not None:
                replicas = f" (replica {replica})" if any(replica) else ""
                raise fail(f"output {position}{replicas}: {problem}")


def _replica_of(coordinate: tuple[int, ...], replica: tuple[int, ...], sbp: NdSbp) -> tuple[int, ...]:
    """The coordinate, moved to the chosen replica along every broadcast axis."""
    return tuple(
        r if isinstance(one, Broadcast) else c for c, r, one in zip(coordinate, replica, sbp, strict=True)
    )


def _parts(tensor: torch.Tensor, one: Sbp, axis_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """What each rank of an axis holds of a tensor."""
    if isinstance(one, Split):
        return [take(tensor, one, axis_size, index) for index in range(axis_size)]
    if isinstance(one, Broadcast):
        return [tensor] * axis_size
    if one.op == "sum":
        return _addends(tensor, axis_size, generator)
    return _bounds(tensor, one, axis_size, generator)


def _addends(tensor: torch.Tensor, axis_size: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random tensors of both signs and unequal sizes that add up to `tensor`."""
    if tensor.dtype == torch.bool:  # adding booleans is a logical or
        return _bounds(tensor, Partial("max"), axis_size, generator)
    parts, rest = [], tensor
    for index in range(axis_size - 1):
        if tensor.is_floating_point() or tensor.is_complex():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            part = ((1 + 0.7 * index) * noise + 0.3).to(tensor.dtype)
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
            other = tensor + sign * torch.randint(0, 4, tensor.shape, generator=generator).to(tensor.dtype)
        parts.append(torch.where(owner == index, tensor, other))
    return parts


def _difference(found: torch.Tensor, whole: torch.Tensor, largest: float) -> str | None:
    """What is wrong with `found`, or None."""
    if (found.shape, found.dtype) != (whole.shape, whole.dtype):
        return f"the ranks hold {_meta(found)}, the whole is {_meta(whole)}"
    tolerance = _TOLERANCE.get(whole.dtype, 0.0)
    close = torch.isclose(found, whole, rtol=tolerance, atol=tolerance * max(largest, 1e-30), equal_nan=True)
    if bool(close.all()):
        return None
    where = tuple((~close).nonzero()[0].tolist())
    count = int((~close).sum())
    return f"{count} of {whole.numel()} elements differ, first {found[where]} for {whole[where]} at {where}"


def _is_exact(trial: _Trial, signature: Signature, axis_size: int, rule: OpRule) -> bool:
    """Whether the signature holds under two draws of random parts."""
    try:
        for seed in (0, 1):
            _prove(trial, [signature], (axis_size,), rule, seed)
    except WrongRule:
        return False
    return True


def _plain_layouts(shape: Sequence[int], partial: bool) -> list[Sbp]:
    """B, plain splits of the dims worth splitting, and P(sum) if asked for."""
    splits: Iterator[Sbp] = (Split(dim) for dim, size in enumerate(shape) if size > 1)
    return [B, *splits, *([P] if partial else [])]


def _output_layouts(whole: torch.Tensor | None) -> list[Sbp]:
    return [B] if whole is None else _plain_layouts(whole.shape, True)


def _is_index(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_uninitialized(op: Callable) -> bool:
    """Whether the values of the op's result mean nothing (`empty` and its like)."""
    return "empty" in getattr(op, "__name__", "") and isinstance(op, torch._ops.OpOverload)


def _outputs(result: Any) -> tuple[torch.Tensor | None, ...]:
    """The tensors (and Nones) of a result, flattened."""
    leaves = pytree.tree_leaves(result)
    return tuple(leaf for leaf in leaves if leaf is None or isinstance(leaf, torch.Tensor))


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return 0.0
    value = tensor.abs().double().nan_to_num(0.0, 0.0, 0.0).max().item()
    return value if math.isfinite(value) else 0.0
