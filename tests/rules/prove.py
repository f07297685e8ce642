"""Every signature that a rule lists for real calls is proven; what is exact and not listed is found."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monoflow.sbp.oracle import WrongRule, describe, missing_signatures, prove_nd, wrong_signatures
from monoflow.sbp.registry import OpRule
from tests.null.rule_trial import nests
from tests.rules.record import Sample

#: Sizes of the axis for every sample; with 4 ranks the usual dim of 5 leaves one of them empty.
AXIS_SIZES = (2, 3, 4)

#: Of the first sample of an op: how many pairs of signatures are proven on two axes of two ranks.
_PAIRS = 12

_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


@dataclasses.dataclass
class Proof:
    """What was found of one op: counts, each wrong signature with its problem, missing ones by their text.

    Attributes:
        searched: samples in which missing signatures were looked for.
    """

    name: str
    samples: int = 0
    proven: int = 0
    searched: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    missing: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, other: Proof) -> None:
        self.samples += other.samples
        self.proven += other.proven
        self.searched += other.searched
        self.wrong += other.wrong
        self.missing += other.missing

    def surely_missing(self) -> list[str]:
        """Signatures that were exact in most samples, not by the chance of one."""
        return sorted(text for text, count in self.missing.items() if 2 * count > self.searched)


def prove_samples(
    rule: OpRule, samples: Sequence[Sample], num_narrow: int, axis_sizes: Sequence[int] = AXIS_SIZES
) -> Proof:
    """Proves the rule on all the samples, on the first `num_narrow` in float32 too, on the first on two axes.

    Samples that the op itself refuses on the whole (as torch's error inputs are, or a dtype that has no
    kernel), or in which it changes an argument, are left out.
    """
    proof = Proof(str(samples[0].op))
    for index, sample in enumerate(samples):
        usable = asymmetric(sample)
        if usable is None:
            continue
        proof.samples += 1
        _prove(proof, rule, usable, axis_sizes)
        if index == 0:
            _prove_pairs(proof, rule, usable)
        if index < num_narrow and (narrow := narrowed(usable)) is not None:
            _prove(proof, rule, narrow, axis_sizes)
    return proof


def _prove(proof: Proof, rule: OpRule, sample: Sample, axis_sizes: Sequence[int]) -> None:
    call = describe(sample.op, sample.args, sample.kwargs)
    for size in axis_sizes:
        wrong = wrong_signatures(sample.op, sample.args, sample.kwargs, rule, size)
        proof.wrong += [problem for _, problem in wrong]
        plain = [()] * len(call.inputs)
        proof.proven += len(rule.signatures(call, size, plain)) - len(wrong)


def _prove_pairs(proof: Proof, rule: OpRule, sample: Sample) -> None:
    """Plain signatures on one axis of two ranks, inside all of them on another."""
    call = describe(sample.op, sample.args, sample.kwargs)
    plain = rule.signatures(call, 2, [()] * len(call.inputs))
    pairs = [pair for pair in itertools.product(plain, plain) if nests(call, pair)]
    for pair in pairs[:: max(1, len(pairs) // _PAIRS)]:
        try:
            prove_nd(sample.op, sample.args, sample.kwargs, pair, (2, 2), rule)
            proof.proven += 1
        except WrongRule as error:
            proof.wrong.append(str(error))


def search_samples(rule: OpRule, samples: Sequence[Sample], num_samples: int, num_layouts: int) -> Proof:
    """Looks for exact signatures that the rule does not list, in the first samples that tell.

    Args:
        num_layouts: how many layouts of one sample are tried.
    """
    proof = Proof(str(samples[0].op))
    for sample in samples:
        if proof.searched == num_samples:
            break
        usable = asymmetric(sample) if _tells(sample) else None
        if usable is not None:
            arguments = (usable.op, usable.args, usable.kwargs, rule, 2)
            proof.missing.update(map(str, missing_signatures(*arguments, limit=num_layouts)))
            proof.searched += 1
    return proof


def _tells(sample: Sample) -> bool:
    """Whether little can be exact by chance: no empty tensor or dim of one element, results that vary."""
    given = _tensors((sample.args, sample.kwargs))
    results = _outputs(sample)
    if results is None or any(extent < 2 for one in given for extent in one.shape):
        return False
    if given and max(one.numel() for one in given) < 4:
        return False
    results = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in results]
    return all(bool(one.isfinite().all()) for one in results) and any(map(_varies, results))


def _varies(result: torch.Tensor) -> bool:
    """Whether a result has several values, or one that is not a mere yes, no or count."""
    return len(result.unique()) > 1 if result.numel() > 1 else result.is_floating_point()


def asymmetric(sample: Sample) -> Sample | None:
    """The sample with floats that repeat (all zeros, all ones) told apart, so that nothing fits by chance.

    None if the op refuses the sample. Where it refuses only the changed values, or gives other NaNs for
    them, the sample stays.
    """
    before = _outputs(sample)
    if before is None:
        return None
    generator = torch.Generator().manual_seed(0)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda one: _told_apart(one, generator), (sample.args, dict(sample.kwargs))
    )
    changed = dataclasses.replace(sample, args=args, kwargs=kwargs)
    after = _outputs(changed)
    if after is None or len(before) != len(after):
        return sample
    same = all(
        a.shape == b.shape and _num_nans(a) >= _num_nans(b) for a, b in zip(before, after, strict=True)
    )
    return changed if same else sample


def narrowed(sample: Sample) -> Sample | None:
    """The sample with float32 (complex64) for float64; None if there is none, or the op refuses it."""
    tree = (sample.args, dict(sample.kwargs))
    if not any(leaf.dtype in _NARROWER for leaf in _tensors(tree)):
        return None
    tree = pytree.tree_map_only(torch.Tensor, lambda one: one.to(_NARROWER.get(one.dtype, one.dtype)), tree)
    args, kwargs = pytree.tree_map_only(torch.dtype, lambda one: _NARROWER.get(one, one), tree)
    narrow = dataclasses.replace(sample, args=args, kwargs=kwargs)
    return None if _outputs(narrow) is None else narrow


def _told_apart(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.dtype.is_floating_point or tensor.numel() < 2:
        return tensor
    if len(tensor.unique()) > tensor.numel() // 2:
        return tensor
    factor = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    return (tensor + 0.2 * factor * torch.where(tensor == 0, torch.ones(()), tensor.abs())).to(tensor.dtype)


def _outputs(sample: Sample) -> list[torch.Tensor] | None:
    """What the op gives; None if it refuses the sample or changes its arguments."""
    try:
        describe(sample.op, sample.args, sample.kwargs)
        return _tensors(sample.op(*sample.args, **sample.kwargs))
    except _REFUSALS:
        return None


def _num_nans(tensor: torch.Tensor) -> int:
    return int(tensor.isnan().sum()) if tensor.is_floating_point() or tensor.is_complex() else 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
