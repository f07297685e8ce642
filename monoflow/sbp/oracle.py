"""The oracle: proves a signature by running the op on shards and comparing with the whole.

A trial is only as good as its values: give it random, asymmetric arguments (no zeros, no symmetric
shapes) and sizes that do not divide, and a wrong rule does not survive by chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .layout import B, Broadcast, NdSbp, P, Sbp, Split, local_shape, text, unshard
from .parts import distribute, every_split, largest
from .registry import Forms, OpRule, own_op
from .signature import LocalCall, OpCall, Signature, TensorMeta, TensorShard

#: How far a value computed on shards may be off, relative to the largest value of the output. Where the
#: output is what is left of larger values (a sum that cancels, a widened narrow float), this would refuse
#: rounding; then as far as the output itself moves when the inputs move by their rounding (`_Trial.noise`),
#: but never further than this of the largest value that took part.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 5e-5,
    torch.complex64: 5e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}

#: How many times its inputs' rounding an output may move: sums on shards round in another order.
_ROUNDINGS = 64

#: What one rank holds of every output, by coordinate.
Held = Mapping[tuple[int, ...], Sequence[torch.Tensor | None]]


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

    @cached_property
    def noise(self) -> tuple[float, ...]:
        """How far each output moves when every input moves by the rounding of its own dtype."""
        generator = torch.Generator().manual_seed(0)
        moved = [0.0] * len(self.whole)
        for _ in range(2):
            try:
                results = _run_own(self, [_rounded(tensor, generator) for tensor in self.tensors])
            except (RuntimeError, ValueError, IndexError):  # an op may refuse what is next to its domain
                continue
            for i, (one, whole) in enumerate(zip(results, self.whole, strict=True)):
                if one is not None and whole is not None and one.shape == whole.shape and _is_float(whole):
                    moved[i] = max(moved[i], largest(one - whole))
        return tuple(moved)

    @cached_property
    def scale(self) -> float:
        """The largest value of any input."""
        return max(map(largest, self.tensors), default=0.0)


def describe(op: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
    """The OpCall of an op with real arguments; runs the op once to learn its outputs."""
    return _trial(op, args, kwargs).call


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

    Index tensors, masks, and what the op reads only the shape of are cut but never partial, and dims of one
    element are not split. The op is run on shards as it is, and in the rule's local form. At most `limit`
    layouts of the inputs are tried (and `limit` layouts of all for a local form), those with fewest split
    inputs first.
    """
    trial = _trial(op, args, kwargs)
    known = set(listed(trial.call, rule, axis_size, None))
    options = [_plain_layouts(t.shape, _adds(trial, i)) for i, t in enumerate(trial.tensors)]
    combinations = sorted(itertools.product(*options), key=lambda sbps: sum(one != B for one in sbps))
    found: dict[Signature, None] = {}
    for inputs in itertools.islice(combinations, limit):
        if any(one != B for one in inputs):
            found |= dict.fromkeys(_exact_as_it_is(trial, inputs, axis_size))
    if rule.local is not None:
        candidates = (
            Signature(inputs, outputs)
            for inputs in combinations
            for outputs in itertools.product(*map(_output_layouts, trial.whole))
        )
        for one in itertools.islice(candidates, limit):
            replicated = all(sbp == B for sbp in (*one.inputs, *one.outputs))
            if not replicated and one not in known and _is_exact(trial, one, axis_size, rule):
                found[one] = None
    return [one for one in found if one not in known]


def listed(call: OpCall, rule: OpRule, axis_size: int, forms: Forms | None) -> list[Signature]:
    """What the rule lists when it is offered `forms`, or every split that fits when None."""
    if forms is None:
        forms = [every_split(meta.shape, axis_size) for meta in call.inputs]
    return rule.signatures(call, axis_size, forms)


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
    results: Held,
    outputs: Sequence[NdSbp],
    mesh: tuple[int, ...],
    fail: Callable[[str], WrongRule],
) -> None:
    """Compare what the ranks hold with the whole result, for every choice of replicas."""
    if _is_uninitialized(trial.op):
        return
    for position, sbp in enumerate(outputs):
        problem = _output_problem(trial, results, position, sbp, mesh)
        if problem is not None:
            raise fail(f"output {position}{problem}")


def _output_problem(
    trial: _Trial, results: Held, position: int, sbp: NdSbp, mesh: tuple[int, ...]
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


def _difference(trial: _Trial, position: int, found: torch.Tensor, scale: float) -> str | None:
    """What is wrong with an output that the ranks' parts make, or None. `scale`: of the largest part."""
    whole = trial.whole[position]
    assert whole is not None
    if (found.shape, found.dtype) != (whole.shape, whole.dtype):
        return f"the ranks hold {_meta(found)}, the whole is {_meta(whole)}"
    close = _is_close(trial, position, found, scale)
    if bool(close.all()):
        return None
    where = tuple((~close).nonzero()[0].tolist())
    count = int((~close).sum())
    return f"{count} of {whole.numel()} elements differ, first {found[where]} for {whole[where]} at {where}"


def _is_close(trial: _Trial, position: int, found: torch.Tensor, scale: float) -> torch.Tensor:
    """Of every element: whether it is off by no more than rounding."""
    whole = trial.whole[position]
    assert whole is not None
    relative = _TOLERANCE.get(whole.dtype, 0.0)
    if not relative:
        return found == whole
    close = torch.isclose(found, whole, rtol=relative, atol=relative * max(scale, 1e-30), equal_nan=True)
    if not bool(close.all()):
        bound = max(_TOLERANCE[t.dtype] for t in (*trial.tensors, whole) if _is_float(t))
        absolute = min(_ROUNDINGS * trial.noise[position], bound * max(trial.scale, scale))
        close |= torch.isclose(found, whole, rtol=relative, atol=absolute, equal_nan=True)
    return close


def _rounded(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The tensor moved by about the rounding of its largest value; what is no float stays."""
    if not _is_float(tensor):
        return tensor
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    noise = torch.randn(tensor.shape, generator=generator, dtype=wide)
    step = torch.finfo(tensor.dtype).eps * largest(tensor)
    return (tensor + step * noise).to(tensor.dtype)


def _is_exact(trial: _Trial, signature: Signature, axis_size: int, rule: OpRule) -> bool:
    """Whether the signature holds under two draws of random parts."""
    try:
        for seed in (0, 1):
            _prove(trial, [signature], (axis_size,), rule, seed)
    except WrongRule:
        return False
    return True


def _adds(trial: _Trial, index: int) -> bool:
    """Whether one input can be a sum of parts: its values are no mask and no index, and the op reads them."""
    given = trial.tensors[index]
    if given.dtype == torch.bool or (not _is_float(given) and any(map(_is_float, trial.tensors))):
        return False
    other = distribute(given, (P,), (2,), torch.Generator().manual_seed(2))[(0,)]
    values = [other if i == index else one for i, one in enumerate(trial.tensors)]
    try:
        results = _run_own(trial, values)
    except Exception:
        return True
    pairs = zip(results, trial.whole, strict=True)
    return not all(a is b or (a is not None and b is not None and _same(a, b)) for a, b in pairs)


def _exact_as_it_is(trial: _Trial, inputs: Sequence[Sbp], axis_size: int) -> list[Signature]:
    """The exact layouts of the outputs when the op itself is run on shards of the inputs."""
    options = [_output_layouts(one) for one in trial.whole]
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        parts = [
            distribute(t, (one,), (axis_size,), generator)
            for t, one in zip(trial.tensors, inputs, strict=True)
        ]
        results: dict[tuple[int, ...], tuple[torch.Tensor | None, ...]] = {}
        for rank in range(axis_size):
            try:
                values = _run_own(trial, [held[(rank,)] for held in parts])
                # A view of a shard as if it were the whole raises only when it is read.
                results[(rank,)] = tuple(None if one is None else one.clone() for one in values)
            except Exception:
                return []
        options = [
            [one for one in layouts if _holds(trial, results, position, one, axis_size)]
            for position, layouts in enumerate(options)
        ]
    return [Signature(tuple(inputs), outputs) for outputs in itertools.product(*options)]


def _run_own(trial: _Trial, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """What the op itself gives for other tensors."""
    arriving = iter(values)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda _: next(arriving), (trial.args, dict(trial.kwargs))
    )
    return _outputs(trial.op(*args, **kwargs))


def _holds(trial: _Trial, results: Held, position: int, one: Sbp, axis_size: int) -> bool:
    """Whether what the ranks hold of an output, in the right shapes, is the whole under a layout."""
    whole = trial.whole[position]
    for (rank,), values in results.items():
        value = values[position] if len(values) == len(trial.whole) else None
        if value is None or whole is None:
            if value is not whole:
                return False
        elif tuple(value.shape) != local_shape(whole.shape, (one,), (axis_size,), (rank,)):
            return False
    return _output_problem(trial, results, position, (one,), (axis_size,)) is None


def _plain_layouts(shape: Sequence[int], partial: bool) -> list[Sbp]:
    """B, plain splits of the dims worth splitting, and P(sum) if asked for."""
    splits: Iterator[Sbp] = (Split(dim) for dim, size in enumerate(shape) if size > 1)
    return [B, *splits, *([P] if partial else [])]


def _output_layouts(whole: torch.Tensor | None) -> list[Sbp]:
    return [B] if whole is None else _plain_layouts(whole.shape, True)


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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
