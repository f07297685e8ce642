"""Decompositions and solvers of many matrices: the dims before the last two, and columns to solve for.

Each matrix is treated by itself, so its own dims cannot be split. The right-hand side of a system can be,
column by column, and the solution is linear in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..layout import B, Partial
from ..registry import Forms, OpRule, aten
from ..signature import OpCall, Signature, TensorMeta
from .common import argument, broadcast_letters, has_argument, linear_signature, named, tensor_names

_BATCH = "abcdefgh"


class _Form(NamedTuple):
    """Dims of an op's tensors: "." for the batch, "_" for one of a matrix, "x" for solved columns."""

    inputs: Mapping[str, str]
    outputs: Sequence[str]
    linear: str = ""


def _signatures(form: _Form, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    names = tensor_names(call)
    given = [form.inputs[name] for name in names]
    batch = torch.broadcast_shapes(*map(_batch, (meta.shape for meta in call.inputs), given))
    ins = {n: _letters(m, s, batch) for n, m, s in zip(names, call.inputs, given, strict=True)}
    outs = [_letters(m, s, batch) for m, s in zip(call.outputs, form.outputs, strict=True)]
    found = [_without_sums(one) for one in named(call, axis_size, forms, ins, outs)]
    if form.linear:
        one = linear_signature(call, [names.index(form.linear)])
        found.append(Signature(one.inputs, (one.outputs[0], *[B] * (len(outs) - 1))))
    return found


def _batch(shape: Sequence[int], spec: str) -> tuple[int, ...]:
    return tuple(shape[: len(shape) - spec.count("_") - spec.count("x")])


def _letters(meta: TensorMeta | None, spec: str, batch: Sequence[int]) -> str:
    """The letters of one tensor; "-" for an output that an option leaves empty."""
    own = spec.removeprefix(".")
    if meta is None or len(meta.shape) < len(own) or (own and meta.shape == (0,)):
        return "-"
    return broadcast_letters(_batch(meta.shape, spec), _BATCH[: len(batch)], batch) + own


def _without_sums(one: Signature) -> Signature:
    """What does not depend on the split columns is the same on every rank, not a part of a sum."""
    return Signature(one.inputs, tuple(B if isinstance(sbp, Partial) else sbp for sbp in one.outputs))


def _solved(call: OpCall, name: str) -> tuple[str, str]:
    """The form of the right-hand side, and of the solution, of AX = B or XA = B."""
    side = "left" if has_argument(call, "left") else None
    form = "._x" if side is None or argument(call, side) else ".x_"
    return form, form


def _fixed(*outputs: str, **inputs: str) -> OpRule:
    form = _Form(inputs, outputs)
    return OpRule(lambda call, axis_size, forms: _signatures(form, call, axis_size, forms))


def _solving(right: str, *more: str, **inputs: str) -> OpRule:
    """A solver: `right` names the right-hand side, in which the first output is linear."""

    def signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
        given, solution = _solved(call, right)
        if _is_vector(call, right):
            given = solution = "._"
        return _signatures(_Form({**inputs, right: given}, [solution, *more], right), call, axis_size, forms)

    return OpRule(signatures)


def _is_vector(call: OpCall, right: str) -> bool:
    """Whether linalg.solve takes its right-hand side as a batch of vectors."""
    if "_linalg_solve_ex" not in str(call.op):
        return False
    matrix, side = (call.inputs[tensor_names(call).index(name)].shape for name in ("A", right))
    return len(side) == 1 or (len(side) == len(matrix) - 1 and side == matrix[:-1])


def _crossed(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """A cross product along one dim of three, the others broadcasting; linear in either factor."""
    whole = call.outputs[0].shape  # pyright: ignore[reportOptionalMemberAccess]
    dim = argument(call, "dim") % len(whole)
    group = "".join("_" if d == dim else "abcdefgh"[d] for d in range(len(whole)))
    sides = zip(("self", "other"), call.inputs, strict=True)
    groups = {name: broadcast_letters(meta.shape, group, whole) for name, meta in sides}
    return named(call, axis_size, forms, groups, [group], linear=[("self",), ("other",)])


_M, _V = ".__", "._"
_FAMILY: dict[str, OpRule] = {
    "cholesky": _fixed(_M, self=_M),
    "cholesky_inverse": _fixed(_M, self=_M),
    "cholesky_solve": _solving("self", input2=_M),
    "geqrf": _fixed(_M, _V, self=_M),
    "linalg_cholesky_ex": _fixed(_M, ".", self=_M),
    "linalg_eig": _fixed(_V, _M, self=_M),
    "_linalg_eigvals": _fixed(_V, self=_M),
    "_linalg_eigh": _fixed(_V, _M, A=_M),
    "_linalg_det": _fixed(".", _M, _V, A=_M),
    "_linalg_slogdet": _fixed(".", ".", _M, _V, A=_M),
    "_linalg_svd": _fixed(_M, _V, _M, A=_M),
    "_linalg_solve_ex": _solving("B", _M, _V, ".", A=_M),
    "linalg_householder_product": _fixed(_M, input=_M, tau=_V),
    "linalg_inv_ex": _fixed(_M, ".", A=_M),
    "linalg_ldl_factor_ex": _fixed(_M, _V, ".", self=_M),
    "linalg_ldl_solve": _solving("B", LD=_M, pivots=_V),
    "linalg_lu": _fixed(_M, _M, _M, A=_M),
    "linalg_lu_factor_ex": _fixed(_M, _V, ".", A=_M),
    "linalg_lu_solve": _solving("B", LU=_M, pivots=_V),
    "linalg_matrix_exp": _fixed(_M, self=_M),
    "linalg_pinv.atol_rtol_tensor": _fixed(_M, self=_M, atol=".", rtol="."),
    "linalg_qr": _fixed(_M, _M, A=_M),
    "linalg_solve_triangular": _solving("B", self=_M),
    "lu_unpack": _fixed(_M, _M, _M, LU_data=_M, LU_pivots=_V),
    "ormqr": _solving("input3", self=_M, input2=_V),
    "triangular_solve": _solving("self", _M, A=_M),
}
RULES: dict[Callable, OpRule] = {op: rule for name, rule in _FAMILY.items() for op in aten(name)}
RULES |= {op: OpRule(_crossed) for op in aten("linalg_cross")}
