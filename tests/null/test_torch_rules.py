"""torch's table of rules behind its adapter: what is read, what is wrong in it, and what ours lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from monoflow.sbp import sources, torch_rules
from monoflow.sbp.layout import Partial
from monoflow.sbp.oracle import WrongRule, describe, prove
from monoflow.sbp.rules import RULES
from monoflow.sbp.sources import RuleBook, Source
from monoflow.sbp.torch_rules import TorchMoved, overload_of, torch_signatures, torch_table
from monoflow.sbp.trial import confirm

from .rule_trial import integers, values

aten, prims = torch.ops.aten, torch.ops.prims


def listed(op: Callable, *args: object) -> set[str]:
    return set(map(str, torch_signatures(describe(op, args, {}))))


def test_torch_keeps_its_table_where_we_look_for_it() -> None:
    table = torch_table()
    assert len(table) > 500
    assert callable(table[aten.mm.default].func)


def test_a_torch_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DTensor, "_op_dispatcher", object())
    with pytest.raises(TorchMoved, match=r"op_single_dim_strategy_funcs .*adapt monoflow/sbp/torch_rules.py"):
        torch_table()
    assert listed(aten.mm.default, values(7, 6), values(6, 5)) == set()


def test_strategies_are_read_as_signatures() -> None:
    assert listed(aten.mm.default, values(7, 6), values(6, 5)) == {
        "S(1), S(0) -> P(sum)",
        "S(0), B -> S(0)",
        "B, S(1) -> S(1)",
        "P(sum), B -> P(sum)",
        "B, P(sum) -> P(sum)",
    }  # torch's averages are left out
    assert {"P(max) -> P(max)", "S(0) -> S(0)"} <= listed(aten.relu.default, values(7, 6))
    assert listed(aten.view.default, values(6), [2, 3]) == set()  # not in this table of torch's


def test_an_embedding_of_torch_with_a_mask_of_its_own_is_left_out() -> None:
    found = listed(aten.embedding.default, values(9, 5), integers(9, 6, 7))
    assert found == {"B, S(0) -> S(0)", "B, S(1) -> S(1)", "S(1), B -> S(2)"}


def test_a_wrong_rule_of_torch_is_not_confirmed() -> None:
    # torch shrinks the group norm's size arguments elsewhere; as it stands in the table, the rule is wrong.
    args = (values(6, 4, 5), values(4), values(4, seed=1), 6, 4, 5, 2, 1e-5)
    call = describe(aten.native_group_norm.default, args, {})
    (wrong,) = torch_signatures(call)
    assert str(wrong) == "S(0), B, B -> S(0), S(0), S(0)"
    with pytest.raises(WrongRule):
        prove(aten.native_group_norm.default, args, {}, wrong, 2)
    assert confirm(call, 2, [wrong]).signatures == ()


#: Calls of ops of both tables.
BOTH = {
    "mm": (aten.mm.default, (values(7, 6), values(6, 5))),
    "bmm": (aten.bmm.default, (values(3, 7, 6), values(3, 6, 5))),
    "addmm": (aten.addmm.default, (values(5), values(7, 6), values(6, 5))),
    "add": (aten.add.Tensor, (values(7, 6), values(7, 6, seed=1))),
    "mul": (aten.mul.Tensor, (values(7, 6), values(7, 6, seed=1))),
    "div": (aten.div.Tensor, (values(7, 6), values(7, 6, seed=1))),
    "sub": (aten.sub.Tensor, (values(7, 6), values(7, 6, seed=1))),
    "neg": (aten.neg.default, (values(7, 6),)),
    "relu": (aten.relu.default, (values(7, 6),)),
    "gelu": (aten.gelu.default, (values(7, 6),)),
    "exp": (aten.exp.default, (values(7, 6),)),
    "maximum": (aten.maximum.default, (values(7, 6), values(7, 6, seed=1))),
    "convolution": (
        aten.convolution.default,
        (values(6, 4, 7), values(5, 4, 3), values(5), [1], [0], [1], False, [0], 1),
    ),
    "embedding": (aten.embedding.default, (values(9, 5), integers(9, 6, 7))),
    "where": (aten.where.self, (values(7, 6) > 0, values(7, 6), values(7, 6, seed=1))),
    "layer_norm": (aten.native_layer_norm.default, (values(7, 6, 5), [5], values(5), values(5), 1e-5)),
    "flip": (aten.flip.default, (values(7, 6), [0])),
    "roll": (aten.roll.default, (values(7, 6), [2], [0])),
    "index_select": (aten.index_select.default, (values(7, 6), 0, torch.tensor([3, 1, 5]))),
    "tanh_backward": (aten.tanh_backward.default, (values(7, 6), values(7, 6, seed=1))),
    "pad": (aten.constant_pad_nd.default, (values(7, 6), [0, 0, 1, 1])),
    "to_copy": (aten._to_copy.default, (values(7, 6),)),
    "linalg_inv_ex": (aten.linalg_inv_ex.default, (values(3, 5, 5),)),
}


@pytest.mark.parametrize("name", BOTH)
def test_what_torch_lists_and_ours_lacks_are_maxima_and_minima(name: str) -> None:
    """Ours leaves out partial maxima and minima of monotone ops."""
    op, args = BOTH[name]
    call = describe(op, args, {})
    ours = set(RULES[op].signatures(call, 2, [()] * len(call.inputs)))
    lacking = [one for one in torch_signatures(call) if one not in ours]
    for one in lacking:
        assert any(isinstance(sbp, Partial) and sbp.op != "sum" for sbp in one.inputs), f"{op} lacks {one}"
    for one in torch_signatures(call):
        prove(op, args, {}, one, 2)  # where both have a rule, torch's are right today
        prove(op, args, {}, one, 3)


@pytest.mark.parametrize(
    ("op", "args"),
    [(prims.abs.default, (values(7, 6),)), (prims.div.default, (values(7, 6), values(7, 6, seed=1)))],
)
def test_ops_that_only_torch_has_take_its_rules_once_they_are_proven(op: Callable, args: tuple) -> None:
    assert op not in RULES
    book = RuleBook()
    found = book[op].signatures(describe(op, args, {}), 2, ())
    assert [str(one) for one in found] == [
        " -> ".join([", ".join([f"S({dim})"] * len(args)), f"S({dim})"]) for dim in range(2)
    ]
    assert book.sources == {op: Source.TORCH}


def test_a_rule_of_torch_that_is_wrong_never_leaves_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    call = describe(prims.abs.default, (values(7, 6),), {})
    (first, *_) = torch_signatures(call)
    wrong = type(first)(first.inputs, (Partial(),))
    monkeypatch.setattr(sources, "torch_signatures", lambda call: [wrong])
    book = RuleBook()
    found = book[prims.abs.default].signatures(call, 2, ())
    assert wrong not in found and {str(one) for one in found} == {"S(0) -> S(0)", "S(1) -> S(1)"}
    assert book.sources == {prims.abs.default: Source.TRIAL}


def test_operators_are_found_under_the_names_that_users_have() -> None:
    name, schema = "torch_rules_tests::twice", "(Tensor x) -> Tensor"
    defined = torch.library.custom_op(name, lambda x: x * 2, mutates_args=(), schema=schema)
    overload = torch.ops.torch_rules_tests.twice.default
    for one in (defined, torch.ops.torch_rules_tests.twice, overload):
        assert overload_of(one) is overload
    assert overload_of(aten.add) is None  # several overloads
    assert overload_of(torch.add) is None
    assert torch_rules.torch_signatures(describe(overload, (values(3),), {})) == []
