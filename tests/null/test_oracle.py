"""The oracle accepts what is exact, refuses what is not, and says why."""

from __future__ import annotations

import pytest
import torch

from monoflow.sbp.layout import B, P, Partial, S, Split, reduce, unshard
from monoflow.sbp.oracle import (
    WrongRule,
    describe,
    distribute,
    every_split,
    missing_signatures,
    prove,
    prove_nd,
    wrong_signatures,
)
from monoflow.sbp.registry import OpRule, letters
from monoflow.sbp.signature import LocalCall, Signature, TensorMeta

aten = torch.ops.aten
MM = OpRule(lambda call, n, forms: letters(call, n, forms, "mk,kn->mn", linear=[(0,), (1,)]))
DTYPES = [torch.float32, torch.bfloat16]


def mm_args(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis_size", [1, 2, 3, 4, 8])
def test_matmul_is_proved_and_complete(axis_size: int, dtype: torch.dtype) -> None:
    args = mm_args(dtype)
    assert wrong_signatures(aten.mm.default, args, {}, MM, axis_size) == []
    if axis_size > 1:
        assert missing_signatures(aten.mm.default, args, {}, MM, axis_size) == []


def test_missing_names_what_a_poor_rule_leaves_out() -> None:
    poor = OpRule(lambda call, n, forms: letters(call, n, forms, "m_,_n->mn", linear=[(0,)]))
    missing = missing_signatures(aten.mm.default, mm_args(), {}, poor, 2)
    assert set(missing) == {Signature((S(1), S(0)), (P,)), Signature((B, P), (P,))}


@pytest.mark.parametrize(
    ("op", "args", "signature", "fact"),
    [
        (aten.relu.default, (torch.randn(5),), Signature((P,), (P,)), "elements differ"),
        (aten.mm.default, mm_args(), Signature((P, P), (P,)), "elements differ"),
        (aten.mm.default, mm_args(), Signature((S(1), S(0)), (Partial("max"),)), "elements differ"),
        (aten.mm.default, mm_args(), Signature((S(0), B), (S(1),)), "its layout S\\(1\\) wants"),
        (aten.mm.default, mm_args(), Signature((S(1), B), (P,)), "raises RuntimeError"),
        (aten.sum.default, (torch.randn(4),), Signature((S(0),), (B,)), "elements differ"),
        (aten.mm.default, mm_args(), Signature((B,), (B,)), "1 inputs and 1 outputs"),
        (aten.relu.default, (torch.randn(5),), Signature((S(1),), (S(1),)), "a tensor of 1 dims"),
        (aten.mean.default, (torch.randn(5),), Signature((S(0),), (P,)), "elements differ"),
    ],
)
def test_wrong_signatures_are_refused(op, args, signature: Signature, fact: str) -> None:
    with pytest.raises(WrongRule, match=fact):
        prove(op, args, {}, signature, 2)


def test_every_replica_is_looked_at() -> None:
    """A rank-dependent local form cannot hide behind rank 0."""

    def local(call: LocalCall):
        return torch.add, (call.args[0], call.outputs[0].coordinate[0]), {}  # pyright: ignore

    rule = OpRule(lambda call, n, forms: [Signature((B,), (B,))], local)
    found = wrong_signatures(aten.alias.default, (torch.randn(3),), {}, rule, 2)
    assert [signature for signature, _ in found] == [Signature((B,), (B,))]
    assert "replica (1,)" in found[0][1]


@pytest.mark.parametrize("op", ["max", "min"])
def test_extreme_partials(op: str) -> None:
    rule_op = aten.amax.default if op == "max" else aten.amin.default
    x = torch.randn(5, 4)
    prove(rule_op, (x, [0]), {}, Signature((S(0),), (Partial(op),)), 3)
    prove(rule_op, (x, [0]), {}, Signature((Partial(op),), (Partial(op),)), 3)
    with pytest.raises(WrongRule):
        prove(rule_op, (x, [0]), {}, Signature((P,), (P,)), 3)


def test_two_axes() -> None:
    args = mm_args()
    by_row, by_depth = Signature((S(0), B), (S(0),)), Signature((S(1), S(0)), (P,))
    prove_nd(aten.mm.default, args, {}, [by_row, by_depth], (2, 3), MM)
    prove_nd(aten.mm.default, args, {}, [by_depth, by_depth], (2, 2), MM)
    with pytest.raises(WrongRule, match=r"on \(2, 3\)"):
        wrong = [Signature((S(0),), (S(0),)), Signature((P,), (P,))]
        prove_nd(aten.relu.default, (args[0],), {}, wrong, (2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_parts_make_the_whole(op: str, dtype: torch.dtype) -> None:
    whole = (torch.randn(40) * 3).to(dtype) if dtype != torch.bool else torch.randn(40) > 0
    held = distribute(whole, (Partial(op),), (3,), torch.Generator().manual_seed(0))
    torch.testing.assert_close(reduce([held[(i,)] for i in range(3)], op), whole)
    assert not all(torch.equal(part, whole) for part in held.values())


def test_distribute_is_undone_by_unshard() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    sbp = (S(1, 2), S(0))
    held = distribute(whole, sbp, (2, 4), torch.Generator())
    assert held[(0, 0)].tolist() == [[0, 2], [4, 6]] and held[(1, 3)].shape == (0, 2)
    assert torch.equal(unshard(held, sbp, (2, 4)), whole)


def test_every_split_fits_and_is_named_once() -> None:
    assert set(every_split((4,), 2)) == {S(0), S(0, 2), S(0, 1, 4)}
    assert every_split((4,), 1) == [S(0), S(0, 2), S(0, 4)]
    assert set(every_split((6,), 4)) == {Split(0, 1, u) for u in (1, 3, 6)}  # unit 2 gives unit 1's shares


def test_absent_outputs_and_metas() -> None:
    x, w, g = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 1, 1), torch.randn(2, 5, 4, 4)
    args = (g, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False])
    call = describe(aten.convolution_backward.default, args, {})
    assert call.outputs == (TensorMeta((2, 3, 4, 4), torch.float32), None, None)
    prove(aten.convolution_backward.default, args, {}, Signature((S(0), S(0), B), (S(0), B, B)), 2)
    with pytest.raises(WrongRule, match="absent output"):
        prove(aten.convolution_backward.default, args, {}, Signature((S(0), S(0), B), (S(0), P, B)), 2)


def test_changing_an_input_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"changed its inputs \[0\]"):
        describe(aten.add_.Scalar, (torch.ones(2), 1), {})
