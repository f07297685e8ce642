"""Rules that users register for their own operators, with the same proof as all others.

The registry is the one thing that is kept for the whole process: an operator is registered with torch for the
whole process, and its rule belongs to it, not to one step that happens to use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import FlowError, LayoutError
from .layout import Sbp, fits
from .oracle import WrongRule, describe, wrong_signatures
from .reading import parse
from .registry import Forms, LocalRule, OpRule, SignatureRule, letters
from .rules import RULES
from .rules.common import argument
from .signature import OpCall, Signature, TensorMeta
from .torch_rules import overload_of
from .trial import each_setting, trial_of
from .trial_args import Arguments, impurity, outputs_of, quiet, runs

_LETTERS = re.compile(r"[a-z_,\-\s]*->[a-z_,\-\s]*")
_AXIS_SIZES = (2, 3, 4)

#: What `register` takes as the layouts of an op.
Layouts = str | Signature | Sequence[str | Signature] | SignatureRule


class WrongRegistration(WrongRule, FlowError):
    """A registered rule lists a layout under which its op is not exact."""


@dataclass(frozen=True)
class UserRule:
    """A registered rule.

    Attributes:
        samples: the forms of the calls on which it was proven when it was registered. A call of another form
            (other ranks of tensors, other plain arguments) is proven when a step first makes it.
    """

    op: torch._ops.OpOverload
    rule: OpRule
    samples: frozenset[str] = frozenset()

    def is_proven(self, call: OpCall) -> bool:
        """Whether a sample has the form of the call."""
        return _form(call) in self.samples

    def prove(self, call: OpCall, axis_size: int) -> str:
        """Proves the rule on trial arguments like a call's; "" if it holds.

        Returns:
            Why it could not be tried.

        Raises:
            WrongRegistration: it lists a layout that is wrong.
        """
        trial = trial_of(call)
        if isinstance(trial, str):
            return (
                f"it could not be proven for this call, {trial}; give register(...) a sample=(...) whose "
                "tensors have as many dims and whose plain arguments are the same"
            )
        given = list(each_setting(trial))
        extents = {n for meta in call.inputs for n in meta.shape}
        for real in (extents, *({n} for n in sorted(extents))):
            whole = trial.make("odd", 40, real=real)
            given += [(whole, axis_size)] if whole is not None and runs(call, whole) is None else []
        for arguments, size in given:
            with quiet():
                _prove(self.op, self.rule, arguments, size)
        return ""


REGISTERED: dict[Callable, UserRule] = {}


def register(
    op: Any,
    layouts: Layouts,
    *,
    linear: Sequence[Sequence[int]] = (),
    local: LocalRule | None = None,
    sample: tuple | Sequence[tuple] = (),
) -> None:
    """Says under which layouts, along one axis, an operator of your own is exactly right.

        flow.sbp.register(torch.ops.my.product, "mk,kn->mn", linear=[(0,), (1,)], sample=(x, w))
        flow.sbp.register(torch.ops.my.norm, ["S(0), B -> S(0)", "S(1), B -> S(1)"])

    Args:
        op: the operator, as torch.ops names it or as torch.library.custom_op gave it back.
        layouts: one group of letters per tensor input and output, a letter per dim, as in einsum ("_" for a
            dim that cannot be split); or signatures as text, inputs before "->"; or a function (call,
            axis_size, forms) -> signatures.
        linear: with letters: groups of inputs, by position, in which the op is jointly linear.
        local: how the op runs on a shard, if that is not the op itself on the shards (see OpRule).
        sample: arguments to prove the layouts on, or a list of such tuples; a dict at the end of a tuple
            holds keyword arguments. Use sizes that do not divide and values without symmetry. Without a
            sample, arguments are made up when a step first uses the op.

    Raises:
        WrongRegistration: a layout is wrong on the sample; the message says which and what differs.
        LayoutError: the op is unknown, has a rule, or changes its arguments, or the layouts do not fit it.
    """
    overload = _operator(op)
    rule = OpRule(_signatures(overload, layouts, linear), local)
    samples = [sample] if isinstance(sample, tuple) and sample else list(sample)
    forms = set()
    for one in samples:
        arguments: Arguments = (one[:-1], one[-1]) if isinstance(one[-1], dict) else (one, {})
        forms.add(_form(_checked(overload, arguments)))
        for axis_size in _AXIS_SIZES:
            _prove(overload, rule, arguments, axis_size)
    REGISTERED[overload] = UserRule(overload, rule, frozenset(forms))


def unregister(op: Any) -> None:
    """Forgets the registered rule of an operator.

    Raises:
        LayoutError: it has none.
    """
    overload = overload_of(op)
    if overload is None or overload not in REGISTERED:
        raise LayoutError(f"flow.sbp.unregister({op}): no rule is registered for it")
    del REGISTERED[overload]


def _operator(op: Any) -> torch._ops.OpOverload:
    overload = overload_of(op)
    if overload is None:
        names = [f"{op}.{name}" for name in op.overloads()] if hasattr(op, "overloads") else []
        choices = f"one of its overloads, {', '.join(names)}" if names else "torch.ops.<namespace>.<name>"
        raise LayoutError(f"flow.sbp.register({op}): {type(op).__name__} is no operator; name {choices}")
    if overload in RULES:
        raise LayoutError(f"flow.sbp.register({overload}): monoflow has a rule for it; two would contradict")
    if overload in REGISTERED:
        raise LayoutError(
            f"flow.sbp.register({overload}): it is registered already; call flow.sbp.unregister first"
        )
    if overload._schema.is_mutable:
        raise LayoutError(
            f"flow.sbp.register({overload}): it changes its arguments; rules are for operators that return "
            "their results"
        )
    return overload


def _signatures(
    op: torch._ops.OpOverload, layouts: Layouts, linear: Sequence[Sequence[int]]
) -> SignatureRule:
    if isinstance(layouts, str) and _LETTERS.fullmatch(layouts):
        spec = re.sub(r"\s", "", layouts)
        left, right = spec.split("->")
        _check_count(op, layouts, left.split(","), right.split(","))
        unknown = [i for group in linear for i in group if not 0 <= i < len(left.split(","))]
        if unknown:
            raise LayoutError(f"flow.sbp.register({op}): linear names inputs {unknown}, {layouts!r} has none")
        return partial(_by_letters, op, spec, linear)
    if linear:
        raise LayoutError(f"flow.sbp.register({op}): linear= goes with letters; write P(sum) in signatures")
    if callable(layouts):
        return layouts
    several = [layouts] if isinstance(layouts, (str, Signature)) else list(layouts)
    found = [one if isinstance(one, Signature) else _read(op, one) for one in several]
    for one in found:
        _check_count(op, str(one), one.inputs, one.outputs)
    return partial(_as_listed, op, tuple(dict.fromkeys(found)))


def _check_count(op: torch._ops.OpOverload, text: str, inputs: Sequence, outputs: Sequence) -> None:
    """Counts tensors against the schema, where it fixes them (no optional ones, no lists)."""
    for side, given, of in (
        ("inputs", inputs, op._schema.arguments),
        ("outputs", outputs, op._schema.returns),
    ):
        types = [str(one.type) for one in of if "Tensor" in str(one.type)]
        if all(one == "Tensor" for one in types) and len(types) != len(given):
            raise LayoutError(
                f"flow.sbp.register({op}): {text!r} has {len(given)} {side}, the operator has {len(types)} "
                f"tensor {side}"
            )


def _read(op: torch._ops.OpOverload, text: str) -> Signature:
    sides = text.split("->") if isinstance(text, str) else []
    if len(sides) != 2:
        raise LayoutError(
            f'flow.sbp.register({op}): {text!r} is not a signature; write "S(0), B -> S(0)", or letters such '
            'as "mk,kn->mn"'
        )
    return Signature(parse(sides[0]), parse(sides[1]))


def _by_letters(
    op: torch._ops.OpOverload,
    spec: str,
    linear: Sequence[Sequence[int]],
    call: OpCall,
    axis_size: int,
    forms: Forms,
) -> list[Signature]:
    """`letters`, where a letter whose dims differ in extent (one of them broadcasts) is not split.

    Only plain splits: a sample of odd sizes, as it should be, proves no blocks.
    """
    left, right = spec.split("->")
    groups = [*left.split(","), *right.split(",")]
    metas = [*call.inputs, *call.outputs]
    ranks = [None if meta is None else len(meta.shape) for meta in metas]
    fit = len(groups) == len(metas) and all(
        rank is None or group == "-" or len(group) == rank for group, rank in zip(groups, ranks, strict=True)
    )
    if not fit:
        raise LayoutError(
            f"the rule {spec!r} of {op} does not fit a call with tensors of {ranks} dims (inputs, then "
            "outputs); register a function for operators that take several ranks"
        )
    extents: dict[str, set[int]] = {}
    for group, meta in zip(groups, metas, strict=True):
        for letter, extent in zip(group, meta.shape if meta is not None else (), strict=False):
            extents.setdefault(letter, set()).add(extent)
    for letter, sizes in extents.items():
        spec = spec.replace(letter, "_") if len(sizes) > 1 and letter not in "_-" else spec
    return letters(call, axis_size, (), spec, linear=linear)


def _as_listed(
    op: torch._ops.OpOverload, found: Sequence[Signature], call: OpCall, axis_size: int, forms: Forms
) -> list[Signature]:
    """The listed signatures that have a place in the call: a signature is for tensors of one rank."""
    return [one for one in found if _fits(call, one, axis_size)]


def _fits(call: OpCall, signature: Signature, axis_size: int) -> bool:
    if (len(signature.inputs), len(signature.outputs)) != (len(call.inputs), len(call.outputs)):
        return False
    layouts: Sequence[Sbp] = (*signature.inputs, *signature.outputs)
    return all(
        not hasattr(one, "dim")
        or (meta is not None and one.dim < len(meta.shape) and fits(meta.shape[one.dim], one, axis_size))  # pyright: ignore
        for one, meta in zip(layouts, (*call.inputs, *call.outputs), strict=True)
    )


def _form(call: OpCall) -> str:
    """What a proof depends on beside extents: ranks of tensors, and the plain arguments."""
    named = [argument(call, one.name) for one in call.op._schema.arguments]  # pyright: ignore
    return repr(pytree.tree_map_only(TensorMeta, lambda meta: len(meta.shape), named))


def _checked(op: torch._ops.OpOverload, given: Arguments) -> OpCall:
    """The sample's call; it must be able to tell a wrong rule."""
    try:
        reason = impurity(op, given)
    except Exception as error:
        raise LayoutError(
            f"flow.sbp.register({op}): it cannot be run on the sample: {type(error).__name__}: {error}"
        ) from error
    if reason is not None:
        raise LayoutError(f"flow.sbp.register({op}): it cannot have a rule, {reason}")
    for position, one in enumerate(outputs_of(op(*given[0], **given[1]))):
        if one is not None and one.numel() > 1 and bool((one == one.flatten()[0]).all()):
            raise LayoutError(
                f"flow.sbp.register({op}): output {position} is {one.flatten()[0].item()} everywhere on "
                "the sample, so that any layout seems right; give it values that differ, such as torch.randn"
            )
    return describe(op, *given)


def _prove(op: torch._ops.OpOverload, rule: OpRule, given: Arguments, axis_size: int) -> None:
    wrong = wrong_signatures(op, given[0], given[1], rule, axis_size)
    if wrong:
        raise WrongRegistration(f"flow.sbp.register({op}): {wrong[0][1]}")
