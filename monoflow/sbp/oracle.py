"""The oracle: proves a signature by running the op on shards and comparing with the whole.

A trial is only as good as its values: give it random, asymmetric arguments (no zeros, no symmetric
shapes) and sizes that do not divide, and a wrong rule does not survive by chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .comparison import Held, Trial, is_float, meta_of, output_problem, outputs_of, run_own, same, trial_of
from .layout import B, NdSbp, P, Sbp, Split, local_shape, text
from .parts import distribute, every_split
from .registry import Forms, OpRule, own_op, replicated
from .signature import LocalCall, OpCall, Signature, TensorMeta, TensorShard
from .strides import on_shards


class WrongRule(AssertionError):
    """A rule lists a layout under which its op is not exact."""


def describe(op: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
    """The OpCall of an op with real arguments; runs the op once to learn its outputs."""
    return trial_of(op, args, kwargs).call


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
    _prove(trial_of(op, args, kwargs), signatures, tuple(mesh), rule, seed)


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
    trial = trial_of(op, args, kwargs)
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

    Left out are partial indices, masks and zeros, splits of dims of one element, and signatures that differ
    from others only in an input of which the op reads the shape alone. The op is run on shards as it is, and
    in the rule's local form. At most `limit` layouts of the inputs are tried (and `limit` layouts of all for
    a local form), those with fewest split inputs first.
    """
    trial = trial_of(op, args, kwargs)
    read = [_is_read(trial, index) for index in range(len(trial.tensors))]
    options = [
        _plain_layouts(one.shape, is_read and _adds(trial, one))
        for one, is_read in zip(trial.tensors, read, strict=True)
    ]
    combinations = sorted(itertools.product(*options), key=lambda sbps: sum(one != B for one in sbps))
    found: dict[Signature, None] = {}
    for inputs in itertools.islice(combinations, limit):
        if any(one != B for one in inputs):
            found |= dict.fromkeys(_exact_as_it_is(trial, inputs, axis_size))
    known = listed(trial.call, rule, axis_size, None)
    if rule.local is not None:
        candidates = (
            Signature(inputs, outputs)
            for inputs in combinations
            for outputs in itertools.product(*map(_output_layouts, trial.whole))
        )
        for one in itertools.islice(candidates, limit):
            if one not in known and _is_exact(trial, one, axis_size, rule):
                found[one] = None
    seen = {_of_read(one, read) for one in [replicated(trial.call), *known]}
    missing = []
    for one in found:
        if _of_read(one, read) not in seen:
            seen.add(_of_read(one, read))
            missing.append(one)
    return missing


def _of_read(signature: Signature, read: Sequence[bool]) -> Signature:
    """The signature with the inputs whose values are not read as B."""
    inputs = zip(signature.inputs, read, strict=True)
    return Signature(tuple(one if is_read else B for one, is_read in inputs), signature.outputs)


def listed(call: OpCall, rule: OpRule, axis_size: int, forms: Forms | None) -> list[Signature]:
    """What the rule lists when it is offered `forms`, or every split that fits when None."""
    if forms is None:
        forms = [every_split(meta.shape, axis_size) for meta in call.inputs]
    return rule.signatures(call, axis_size, forms)


def _prove(
    trial: Trial, signatures: Sequence[Signature], mesh: tuple[int, ...], rule: OpRule | None, seed: int
) -> None:
    def fail(problem: str) -> WrongRule:
        layouts = " x ".join(f"[{one}]" for one in signatures)
        described = ", ".join(map(str, (*trial.call.args, *trial.call.kwargs.items())))
        return WrongRule(f"{trial.op}({described}) on {mesh}: {layouts} is wrong: {problem}")

    inputs, outputs = _layouts(trial, signatures, fail)
    for strided in (False, True) if any(one.ndim > 1 for one in trial.tensors) else (False,):
        generator = torch.Generator().manual_seed(seed)
        parts = [
            distribute(tensor, sbp, mesh, generator, strided)
            for tensor, sbp in zip(trial.tensors, inputs, strict=True)
        ]
        results: dict[tuple[int, ...], tuple[torch.Tensor | None, ...]] = {}
        for coordinate in itertools.product(*map(range, mesh)):
            local_inputs = [held[coordinate] for held in parts]
            try:
                results[coordinate] = _run_local(trial, rule, local_inputs, inputs, outputs, mesh, coordinate)
            except Exception as error:
                how = " on strided shards" * strided
                raise fail(f"rank {coordinate} raises {type(error).__name__}{how}: {error}") from error
        _check_outputs(trial, results, outputs, mesh, fail)


def _layouts(
    trial: Trial, signatures: Sequence[Signature], fail: Callable[[str], WrongRule]
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
    trial: Trial,
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
    op, args, kwargs = on_shards(*local(call))
    results = outputs_of(op(*args, **kwargs))
    for position, (result, shard) in enumerate(zip(results, call.outputs, strict=True)):
        if (result is None) != (shard is None):
            raise ValueError(f"output {position} is absent on one side only")
        if result is not None and shard is not None:
            expected = (shard.shape, shard.meta.dtype)
            if (tuple(result.shape), result.dtype) != expected:
                raise ValueError(
                    f"output {position} is {meta_of(result)}, its layout {text(shard.sbp)} "
                    f"wants {TensorMeta(*expected)}"
                )
    return results


def _check_outputs(
    trial: Trial,
    results: Held,
    outputs: Sequence[NdSbp],
    mesh: tuple[int, ...],
    fail: Callable[[str], WrongRule],
) -> None:
    """Compare what the ranks hold with the whole result, for every choice of replicas."""
    if _is_uninitialized(trial.op):
        return
    for position, sbp in enumerate(outputs):
        problem = output_problem(trial, results, position, sbp, mesh)
        if problem is not None:
            raise fail(f"output {position}{problem}")


def _is_exact(trial: Trial, signature: Signature, axis_size: int, rule: OpRule) -> bool:
    """Whether the signature holds under two draws of random parts."""
    try:
        for seed in (0, 1):
            _prove(trial, [signature], (axis_size,), rule, seed)
    except WrongRule:
        return False
    return True


def _adds(trial: Trial, given: torch.Tensor) -> bool:
    """Whether an input can be a sum of parts: it is no mask, and no index beside floats."""
    return is_float(given) or (given.dtype != torch.bool and not any(map(is_float, trial.tensors)))


def _is_read(trial: Trial, index: int) -> bool:
    """Whether the op looks at the values of one input, not at its shape alone."""
    given = trial.tensors[index]
    if is_float(given):
        other = distribute(given, (P,), (2,), torch.Generator().manual_seed(2))[(0,)]
    else:  # the same indices in another order are still indices
        other = given.flatten().flip(0).reshape(given.shape)
    values = [other if i == index else one for i, one in enumerate(trial.tensors)]
    try:
        results = run_own(trial, values)
    except Exception:
        return True
    pairs = zip(results, trial.whole, strict=True)
    unchanged = all(a is b or (a is not None and b is not None and same(a, b)) for a, b in pairs)
    return not unchanged or same(other, given)


def _exact_as_it_is(trial: Trial, inputs: Sequence[Sbp], axis_size: int) -> list[Signature]:
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
                values = run_own(trial, [held[(rank,)] for held in parts])
                # A view of a shard as if it were the whole raises only when it is read.
                results[(rank,)] = tuple(None if one is None else one.clone() for one in values)
            except Exception:
                return []
        options = [
            [one for one in layouts if _holds(trial, results, position, one, axis_size)]
            for position, layouts in enumerate(options)
        ]
    return [Signature(tuple(inputs), outputs) for outputs in itertools.product(*options)]


def _holds(trial: Trial, results: Held, position: int, one: Sbp, axis_size: int) -> bool:
    """Whether what the ranks hold of an output, in the right shapes, is the whole under a layout."""
    whole = trial.whole[position]
    for (rank,), values in results.items():
        value = values[position] if len(values) == len(trial.whole) else None
        if value is None or whole is None:
            if value is not whole:
                return False
        elif tuple(value.shape) != local_shape(whole.shape, (one,), (axis_size,), (rank,)):
            return False
    return output_problem(trial, results, position, (one,), (axis_size,)) is None


def _plain_layouts(shape: Sequence[int], partial: bool) -> list[Sbp]:
    """B, plain splits of the dims worth splitting, and P(sum) if asked for."""
    splits: Iterator[Sbp] = (Split(dim) for dim, size in enumerate(shape) if size > 1)
    return [B, *splits, *([P] if partial else [])]


def _output_layouts(whole: torch.Tensor | None) -> list[Sbp]:
    """Of an output; zeros are the sum of anything that is zero, so they are not called partial."""
    if whole is None:
        return [B]
    return _plain_layouts(whole.shape, bool(whole.any()))


def _is_uninitialized(op: Callable) -> bool:
    """Whether the values of the op's result mean nothing (`empty` and its like)."""
    return "empty" in getattr(op, "__name__", "") and isinstance(op, torch._ops.OpOverload)
