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


DTYPES_OF_ALL_WIDTHS = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES_OF_ALL_WIDTHS)
@pytest.mark.parametrize("axis_size", [2, 3, 4])
def test_sums_that_cancel_are_rounding(dtype: torch.dtype, axis_size: int) -> None:
    """What is left of large values is noise in whatever order they are added."""
    x = torch.randn(40, 3).to(dtype)
    x = torch.cat([x, -x])[torch.randperm(80)]
    prove(aten.sum.dim_IntList, (x, [0]), {}, Signature((S(0),), (P,)), axis_size)
    prove(aten.sum.dim_IntList, (x, [0]), {}, Signature((P,), (P,)), axis_size)


def test_parts_of_a_narrow_sum_may_be_widened() -> None:
    """bfloat16 parts round before they are float32: what they add up to is right to bfloat16."""
    x = torch.randn(30).bfloat16()
    prove(aten._to_copy.default, (x,), {"dtype": torch.float32}, Signature((P,), (P,)), 3)


@pytest.mark.parametrize("factor", [1e-12, 1e-20, 1e12])
@pytest.mark.parametrize("dtype", DTYPES_OF_ALL_WIDTHS)
def test_a_result_that_is_small_beside_its_inputs_is_still_looked_at(
    factor: float, dtype: torch.dtype
) -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * factor

    x = torch.randn(5, 3).to(dtype)
    prove(op, (x,), {}, Signature((S(0),), (S(0),)), 2)
    for wrong in (Signature((P,), (P,)), Signature((B,), (P,))):
        with pytest.raises(WrongRule, match="elements differ"):
            prove(op, (x,), {}, wrong, 2)


def test_values_in_several_magnitudes_are_added_in_their_own() -> None:
    whole = torch.randn(20, dtype=torch.float64) * 1e-18
    held = distribute(whole, (P,), (2,), torch.Generator().manual_seed(0))
    assert 1e-19 < held[(0,)].abs().max() < 1e-16
    torch.testing.assert_close(held[(0,)] + held[(1,)], whole, rtol=1e-12, atol=0)


def test_what_is_not_read_is_not_called_partial() -> None:
    """new_zeros looks at no value, so parts of a sum would be exact and mean nothing."""
    none = OpRule(lambda call, n, forms: [])
    missing = missing_signatures(aten.new_zeros.default, (torch.randn(4, 3), [2]), {}, none, 2)
    assert all(P not in one.inputs for one in missing)
    mask = torch.randn(4, 3) > 0
    missing = missing_signatures(aten.where.self, (mask, torch.randn(4, 3), torch.randn(4, 3)), {}, none, 2)
    assert Signature((B, P, P), (P,)) in missing and Signature((S(0), S(0), S(0)), (S(0),)) in missing
    assert all(one.inputs[0] != P for one in missing)


def test_small_integers_have_bounds_within_their_range() -> None:
    whole = torch.tensor([0, 1, 254, 255] * 10, dtype=torch.uint8)
    for op in ("max", "min"):
        held = distribute(whole, (Partial(op),), (3,), torch.Generator().manual_seed(0))
        assert torch.equal(reduce([held[(i,)] for i in range(3)], op), whole)
