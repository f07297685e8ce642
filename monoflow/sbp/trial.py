"""Trial by running: the signatures of an op that nobody wrote a rule for.

Candidates are laid out by force, on small arguments; the oracle then proves those that held by chance or by
right, on other values, magnitudes and sizes, on axes of two and three ranks, and at last with every split dim
at the call's own extent over the call's own axis. What is not proven everywhere is not listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .layout import B, Partial, Split
from .oracle import wrong_signatures
from .registry import OpRule
from .signature import OpCall, Signature
from .trial_args import (
    Arguments,
    TrialArguments,
    find_arguments,
    impurity,
    outputs_of,
    quiet,
    runs,
    tensors_of,
    with_tensors,
)
from .trial_candidates import candidates


class _Setting(NamedTuple):
    """One trial: sizes, ranks of the axis, values, and whether in float64."""

    sizes: str
    axis_size: int
    seed: int
    scales: tuple[float, ...] = (1.0,)
    double: bool = False


#: Any size, and only sizes that divide: a signature is proven if all of one group agree.
_GROUPS: Mapping[str, tuple[_Setting, ...]] = {
    "any": (
        _Setting("odd", 2, 1),
        _Setting("odd", 3, 2, (1e3,)),
        _Setting("mixed", 2, 3, (1e-3,)),
        _Setting("mixed", 3, 4),
        _Setting("odd", 2, 5, (1e3, 1e-3)),
    ),
    "even": (
        _Setting("even", 2, 6),
        _Setting("even", 2, 7, (1e3,)),
        _Setting("even", 2, 8, (1e-3, 1e3)),
    ),
}
#: For partial inputs: linear at every magnitude, to the last digits. No clamp and no soft cap is.
_LINEAR = tuple(
    _Setting(sizes, 2, 9 + i, (scale,), double=True)
    for i, (sizes, scale) in enumerate((("odd", 1.0), ("odd", 1e6), ("mixed", 1e-6), ("mixed", 1e3)))
)


@dataclass(frozen=True)
class Found:
    """What a trial found: the proven signatures, and why there are none or why others were dropped."""

    signatures: tuple[Signature, ...]
    reason: str = ""


def search(call: OpCall, axis_size: int) -> Found:
    """The exact signatures of a call along an axis, found by running the op.

    Args:
        call: a call of an operator. Its tensors are replaced by small real ones.
        axis_size: ranks of the axis.

    Returns:
        Signatures of plain splits, B and P(sum), each proven by the oracle. None if the op cannot be tried
        (it mutates its arguments, is random, or does not run here), with the reason.
    """
    return _tried(call, axis_size, None)


def confirm(call: OpCall, axis_size: int, wanted: Iterable[Signature]) -> Found:
    """Those of the wanted signatures that hold, proven as in `search`."""
    return _tried(call, axis_size, list(wanted))


def refusal(op: Callable) -> str | None:
    """Why an op is not tried at all, whatever its arguments; None if it may be."""
    if not isinstance(op, torch._ops.OpOverload):
        return "it is not an operator of torch.library"
    if op._schema.is_mutable:
        return "it mutates its arguments"
    tags = {
        torch.Tag.nondeterministic_seeded: "it draws random numbers",
        torch.Tag.data_dependent_output: "its result is a value, not a tensor",
        torch.Tag.dynamic_output_shape: "its output's size depends on data",
    }
    return next((reason for tag, reason in tags.items() if tag in op.tags), None)


def trial_of(call: OpCall) -> TrialArguments | str:
    """Arguments on which a call can be tried, or the reason why it cannot."""
    reason = refusal(call.op)
    if reason is None and not call.inputs:
        reason = "it has no tensor to split"
    if reason is not None:
        return reason
    found = find_arguments(call)
    if isinstance(found, str):
        return found
    given = _first(found, _Setting("odd", 2, 0))
    if given is None:
        return "it does not run twice on the same arguments"
    return impurity(call.op, given) or found


def each_setting(trial: TrialArguments) -> Iterator[tuple[Arguments, int]]:
    """Arguments of every trial on which the op runs, with the ranks of its axis."""
    for setting in itertools.chain.from_iterable(_GROUPS.values()):
        given = _runnable(trial, setting)
        if given is not None:
            yield given, setting.axis_size


def _tried(call: OpCall, axis_size: int, wanted: list[Signature] | None) -> Found:
    trial = trial_of(call)
    if isinstance(trial, str):
        return Found((), trial)
    constant = _constant_outputs(trial)
    if constant:
        return Found((), f"outputs {constant} do not change with the values that were tried")
    with quiet():
        proven = _proven(trial, _candidates(trial) if wanted is None else wanted)
        kept = _proven_at_size(trial, proven, axis_size)
    if kept:
        return Found(tuple(kept))
    return Found(
        (), "no layout but B is exact" if not proven else "no layout is exact at the call's own size"
    )


def _runnable(trial: TrialArguments, setting: _Setting, real: Iterable[int] = ()) -> Arguments | None:
    given = trial.make(setting.sizes, setting.seed, setting.scales, real, setting.double)
    return given if given is not None and runs(trial.call, given) is None else None


def _first(trial: TrialArguments, setting: _Setting, real: Iterable[int] = ()) -> Arguments | None:
    """Arguments that do not divide, or else that do."""
    choices = (setting, setting._replace(sizes="even"))
    return next((given for one in choices if (given := _runnable(trial, one, real)) is not None), None)


def _candidates(trial: TrialArguments) -> list[Signature]:
    given = _first(trial, _Setting("odd", 2, 0))
    with quiet():
        return [] if given is None else candidates(trial.call.op, given)


def _proven(trial: TrialArguments, wanted: Sequence[Signature]) -> list[Signature]:
    """Those that hold in every trial of one of the groups."""
    found: dict[Signature, None] = {}
    for group in _GROUPS.values():
        left = [one for one in wanted if one not in found]
        num_runs = 0
        for setting in group:
            given = _runnable(trial, setting)
            if given is not None:
                left = _right(trial.call.op, given, left, setting.axis_size)
                num_runs += 1
        if num_runs >= 2:
            found |= dict.fromkeys(left)
    return [
        one
        for one in wanted
        if one in found and (not _is_partial(one) or _is_linear(trial, one)) and _is_independent(trial, one)
    ]


def _is_partial(signature: Signature) -> bool:
    return any(isinstance(one, Partial) for one in signature.inputs)


def _is_linear(trial: TrialArguments, signature: Signature) -> bool:
    """Whether the signature holds in float64 at every magnitude; an op that has no float64 is not trusted."""
    for setting in _LINEAR:
        given = _first(trial, setting)
        if given is None or not _right(trial.call.op, given, [signature], setting.axis_size):
            return False
    return True


def _is_independent(trial: TrialArguments, signature: Signature) -> bool:
    """Whether outputs that stay whole do not depend on the inputs that do not.

    Ranks that hold different parts of an input come to one result by themselves only if they do not use it.
    An output that seldom changes (a flag, a count) would pass without this.
    """
    whole = [i for i, one in enumerate(signature.outputs) if one == B and trial.call.outputs[i] is not None]
    cut = {i for i, one in enumerate(signature.inputs) if one != B}
    if not whole or not cut:
        return True
    sizes = "odd" if _runnable(trial, _Setting("odd", 2, 30)) is not None else "even"
    base = _runnable(trial, _Setting(sizes, 2, 30))
    if base is None:
        return False
    expected = outputs_of(trial.call.op(*base[0], **base[1]))
    for seed, scale in ((31, 1.0), (32, 1e3), (33, 1e-3), (34, 1e6)):
        other = trial.make(sizes, seed, (scale,))
        assert other is not None, "arguments of this size were made before"
        pairs = zip(tensors_of(base), tensors_of(other), strict=True)
        mixed = with_tensors(base, [new if i in cut else old for i, (old, new) in enumerate(pairs)])
        if runs(trial.call, mixed) is None:
            results = outputs_of(trial.call.op(*mixed[0], **mixed[1]))
            if any(not torch.equal(results[i], expected[i]) for i in whole):  # pyright: ignore
                return False
    return True


def _proven_at_size(
    trial: TrialArguments, signatures: Sequence[Signature], axis_size: int
) -> list[Signature]:
    """Those that hold with what they split as long as it is in the call, over as many ranks."""
    groups: dict[frozenset[int], list[Signature]] = {}
    for one in signatures:
        groups.setdefault(_split_extents(trial.call, one), []).append(one)
    kept: list[Signature] = []
    for extents, members in groups.items():
        right = members
        for seed, scales in ((20, (1.0,)), (21, (1e3, 1e-3))):
            given = _first(trial, _Setting("odd", axis_size, seed, scales), extents)
            if given is not None:
                right = _right(trial.call.op, given, right, axis_size)
            elif seed == 20:  # too large, or it does not run: not proven
                right = []
        kept += right
    return [one for one in signatures if one in kept]


def _split_extents(call: OpCall, signature: Signature) -> frozenset[int]:
    """The extents of the input dims that a signature splits."""
    return frozenset(
        meta.shape[one.dim]
        for meta, one in zip(call.inputs, signature.inputs, strict=True)
        if isinstance(one, Split)
    )


def _right(op: Callable, given: Arguments, signatures: list[Signature], axis_size: int) -> list[Signature]:
    """The signatures that the oracle finds right."""
    if not signatures:
        return []
    rule = OpRule(lambda call, size, forms: signatures)
    try:
        wrong = {one for one, _ in wrong_signatures(op, given[0], given[1], rule, axis_size, ())}
    except Exception:  # whatever a user's op raises, this time
        return []
    return [one for one in signatures if one not in wrong]


def _constant_outputs(trial: TrialArguments) -> list[int]:
    """Outputs of which every element was the same in every trial: any layout of them seems right."""
    seen: dict[int, set[Any]] = {}
    for given, _ in each_setting(trial):
        with quiet():
            for position, one in enumerate(outputs_of(trial.call.op(*given[0], **given[1]))):
                if one is not None:
                    real = torch.view_as_real(one) if one.is_complex() else one
                    extremes = (real.min().item(), real.max().item()) if real.numel() else (0, 1)
                    seen.setdefault(position, set()).update(extremes)
    return [position for position, values in seen.items() if len(values) < 2]
