"""The form of a rule, and the einsum-style helper that most rules are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .layout import At, B, P, Partial, Sbp, Split, canonical, fits
from .signature import LocalCall, LocalOp, OpCall, Signature

#: Per tensor input of a call: the splits in which its producer can deliver it. A rule considers these
#: (blocked and unit forms travel through it) beside the plain S(dim) of every dim.
Forms = Sequence[Iterable[Split]]

#: signatures(call, axis_size, forms): all layouts along one axis of `axis_size` ranks that are exact.
#: The all-B signature is implied; a rule need not list it.
SignatureRule = Callable[[OpCall, int, Forms], list[Signature]]

#: local(call): what one rank runs instead of the node, given all its shards (every axis together).
LocalRule = Callable[[LocalCall], LocalOp]


@dataclass(frozen=True)
class OpRule:
    """Everything known of one op.

    Attributes:
        signatures: the exact layouts along one axis.
        local: how the op runs on a shard, when that is not the op itself with its own arguments (sizes,
            offsets, masks). It must also be right when nothing is split.
        expand: for an op with alternatives: a function of the op's own arguments that computes the same
            from simpler ops (traced when a plan wants a layout that only the simpler ops have).
        tried: what it lists is found by running the op. Where it lists nothing, the op has no rule.
    """

    signatures: SignatureRule
    local: LocalRule | None = None
    expand: Callable | None = None
    tried: bool = False


def replicated(call: OpCall) -> Signature:
    """The signature that every op has: all B."""
    return Signature((B,) * len(call.inputs), (B,) * len(call.outputs))


def staged(call: OpCall, stage: int) -> Signature:
    """The signature that every op has along an axis of stages: it runs at one of them, whole."""
    outputs = (B if meta is None else At(stage) for meta in call.outputs)
    return Signature((At(stage),) * len(call.inputs), tuple(outputs))


def splits_of(forms: Forms, index: int, dim: int) -> list[Split]:
    """The candidate splits of one dim of input `index`, the plain one first."""
    found = {one for one in forms[index] if one.dim == dim} if index < len(forms) else set()
    return sorted(found | {Split(dim)})


def letters(
    call: OpCall,
    axis_size: int,
    forms: Forms,
    spec: str,
    *,
    linear: Sequence[Sequence[int]] = (),
    reduce_op: str = "sum",
) -> list[Signature]:
    """Signatures of an op whose dims are named by letters, as in einsum.

    Args:
        spec: "mk,kn->mn": one group per tensor input and output of `call`, one letter per dim. "_" names a
            dim that cannot be split (or a size-1 dim that broadcasts). A letter that is in no output is
            contracted: splitting it gives P(reduce_op); "-" as a whole group names an absent output.
        linear: groups of inputs in which the op is jointly linear while the others are B: all of the
            group P(sum) gives every present output P(sum). `[(0,), (1,)]` for mm, `[(0, 1)]` for add.
        reduce_op: the partial that a contracted letter gives.

    A split form (blocks, unit) of a letter, found in `forms` of any input, is offered for all tensors that
    carry the letter. Forms that do not fit a dim are dropped.
    """
    left, right = spec.split("->")
    ins = left.split(",") if call.inputs else []
    outs = right.split(",") if call.outputs else []
    assert len(ins) == len(call.inputs) and len(outs) == len(call.outputs), (spec, call)
    found: dict[Signature, None] = {}
    for letter in dict.fromkeys(c for group in [*ins, *outs] for c in group if c not in "_-"):
        candidates = {(1, 1)} | {
            (one.blocks, one.unit)
            for i, group in enumerate(ins)
            if letter in group and i < len(forms)
            for one in forms[i]
            if one.dim == group.index(letter)
        }
        for blocks, unit in sorted(candidates):
            signature = _split_letter(call, axis_size, ins, outs, letter, blocks, unit, reduce_op)
            if signature is not None:
                found[signature] = None
    for members in linear:
        inputs = tuple(P if i in members else B for i in range(len(ins)))
        outputs = tuple(
            B if group == "-" or meta is None else P for group, meta in zip(outs, call.outputs, strict=True)
        )
        found[Signature(inputs, outputs)] = None
    return list(found)


def _split_letter(
    call: OpCall,
    axis_size: int,
    ins: Sequence[str],
    outs: Sequence[str],
    letter: str,
    blocks: int,
    unit: int,
    reduce_op: str,
) -> Signature | None:
    def lay(group: str, shape: Sequence[int], otherwise: Sbp) -> Sbp | None:
        if letter not in group:
            return otherwise
        dim = group.index(letter)
        one = Split(dim, blocks, unit)
        return canonical(shape[dim], one, axis_size) if fits(shape[dim], one, axis_size) else None

    inputs = [lay(group, meta.shape, B) for group, meta in zip(ins, call.inputs, strict=True)]
    outputs = [
        B if group == "-" or meta is None else lay(group, meta.shape, Partial(reduce_op))
        for group, meta in zip(outs, call.outputs, strict=True)
    ]
    if any(one is None for one in (*inputs, *outputs)):
        return None
    return Signature(tuple(inputs), tuple(outputs))  # pyright: ignore[reportArgumentType]


def own_op(call: LocalCall) -> LocalOp:
    """The local form of an op that runs on a shard as it is."""
    return call.op, call.args, call.kwargs


def aten(*names: str) -> list[torch._ops.OpOverload]:
    """Overloads of torch.ops.aten by name ("add.Tensor"); names this torch does not have are left out."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None:
            found.append(op)
    return found
