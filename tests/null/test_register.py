"""flow.sbp.register: rules for users' operators are proven; what does not fit is refused with the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import monoflow as flow
from monoflow.sbp.layout import S
from monoflow.sbp.oracle import WrongRule, describe
from monoflow.sbp.registry import Forms
from monoflow.sbp.signature import LocalCall, LocalOp, OpCall, Signature, TensorMeta
from monoflow.sbp.sources import RuleBook, Source
from monoflow.sbp.user_rules import REGISTERED

from .rule_trial import values


def operator(function: Callable) -> torch._ops.OpOverload:
    """The function as an operator of torch.library."""
    torch.library.custom_op(f"register_tests::{function.__name__}", function, mutates_args=())
    return getattr(torch.ops.register_tests, function.__name__).default


@operator
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@operator
def row_mean(x: Tensor) -> Tensor:
    return x.mean(0)


@operator
def positions(x: Tensor, start: int = 0) -> Tensor:
    return x * (torch.arange(x.shape[0]) + start)[:, None]


@operator
def never(x: Tensor) -> Tensor:
    raise RuntimeError("needs another device")


@operator
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def listed(op: Callable, *args: object, axis_size: int = 2) -> list[str]:
    book = RuleBook()
    found = book[op].signatures(describe(op, args, {}), axis_size, [()] * 9)
    assert book.sources == {op: Source.USER}
    return [str(one) for one in found]


def test_letters_are_proven_on_a_sample() -> None:
    flow.sbp.register(
        torch.ops.register_tests.product,
        "mk, kn -> mn",
        linear=[(0,), (1,)],
        sample=(values(7, 6), values(6, 5)),
    )
    assert len(REGISTERED[product].samples) == 1
    assert listed(product, values(9, 3), values(3, 4)) == [
        "S(0), B -> S(0)",
        "S(1), S(0) -> P(sum)",
        "B, S(1) -> S(1)",
        "P(sum), B -> P(sum)",
        "B, P(sum) -> P(sum)",
    ]


def test_letters_that_broadcast_are_not_split() -> None:
    @operator
    def sums(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    flow.sbp.register(sums, "mn,mn->mn", linear=[(0, 1)], sample=(values(7, 6), values(7, 6, seed=1)))
    assert listed(sums, values(7, 6), values(1, 6)) == ["S(1), S(1) -> S(1)", "P(sum), P(sum) -> P(sum)"]


def test_signatures_as_text_and_functions() -> None:
    flow.sbp.register(row_mean, "S(1) -> S(0)", sample=[(values(7, 6),), (values(3, 5),)])
    assert listed(row_mean, values(4, 8)) == ["S(1) -> S(0)"]
    flow.sbp.unregister(row_mean)
    flow.sbp.register(row_mean, [Signature((S(1),), (S(0),)), "P -> P(sum)"])
    assert not REGISTERED[row_mean].samples
    assert listed(row_mean, values(4, 8)) == ["S(1) -> S(0)", "P(sum) -> P(sum)"]
    flow.sbp.unregister(row_mean)

    def rule(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
        return [Signature((S(1),), (S(0),))] if call.inputs[0].shape[1] % axis_size == 0 else []

    flow.sbp.register(row_mean, rule, sample=(values(4, 12),))
    assert listed(row_mean, values(4, 8)) == ["S(1) -> S(0)"] and listed(row_mean, values(4, 7)) == []


def test_a_local_form_shifts_what_depends_on_the_place() -> None:
    def local(call: LocalCall) -> LocalOp:
        return call.op, (call.args[0], call.args[1] + call.inputs[0].start(0)), call.kwargs

    sample = (values(7, 5), 2)
    with pytest.raises(WrongRule, match=r"register_tests.positions.*\[S\(0\) -> S\(0\)\] is wrong"):
        flow.sbp.register(positions, "mn->mn", sample=sample)
    assert positions not in REGISTERED
    flow.sbp.register(positions, "mn->mn", local=local, sample=sample)
    assert listed(positions, values(9, 4), 1) == ["S(0) -> S(0)", "S(1) -> S(1)"]
    assert RuleBook()[positions].local is local


def test_a_wrong_rule_names_the_op_the_layout_and_what_differs() -> None:
    with pytest.raises(WrongRule) as caught:
        flow.sbp.register(row_mean, "mn->n", sample=(values(7, 6),))
    assert isinstance(caught.value, flow.FlowError)
    for fact in ("register_tests.row_mean", "[S(0) -> P(sum)] is wrong", "elements differ", "float64[7, 6]"):
        assert fact in str(caught.value)
    assert row_mean not in REGISTERED


def test_without_a_sample_the_first_use_proves_it() -> None:
    flow.sbp.register(product, "mk,kn->mn")
    assert len(listed(product, values(9, 3), values(3, 4))) == 3
    flow.sbp.register(row_mean, "mn->n")
    with pytest.raises(WrongRule, match=r"row_mean.*S\(0\) -> P\(sum\)\] is wrong"):
        listed(row_mean, values(32, 48))


def test_a_sample_proves_only_calls_of_its_form() -> None:
    @operator
    def softmax(x: Tensor, dim: int = 1) -> Tensor:
        return x.softmax(dim)

    flow.sbp.register(softmax, "S(0) -> S(0)", sample=(values(7, 6), 1))
    assert listed(softmax, values(8, 4)) == ["S(0) -> S(0)"]  # the default is the sample's
    assert listed(softmax, values(8, 4, 3)) == ["S(0) -> S(0)"]  # proven by trial
    with pytest.raises(WrongRule, match=r"softmax.*S\(0\) -> S\(0\)\] is wrong"):
        listed(softmax, values(8, 4), 0)
    with pytest.raises(WrongRule):
        listed(softmax, values(8, 4), -2)


def test_a_rule_that_cannot_be_proven_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    flow.sbp.register(never, "mn->mn")
    logging.getLogger("monoflow").propagate = True
    meta = TensorMeta((4, 6), torch.float32)
    book = RuleBook()
    assert book[never].tried
    with caplog.at_level(logging.WARNING):
        assert book[never].signatures(OpCall(never, (meta,), {}, (meta,)), 2, [()]) == []
        assert book[never].signatures(OpCall(never, (meta,), {}, (meta,)), 2, [()]) == []
    (warning,) = [one.getMessage() for one in caplog.records]
    for fact in ("register_tests.never", "needs another device", "sample="):
        assert fact in warning
    assert "needs another device" in book.refused[never]


@pytest.mark.parametrize(
    ("op", "layouts", "options", "message"),
    [
        (torch.add, "mn->mn", {}, r"no operator; name torch\.ops"),
        (torch.ops.aten.add, "mn,mn->mn", {}, r"one of its overloads, .*aten\.add\.Tensor"),
        (torch.ops.aten.mm.default, "mk,kn->mn", {}, r"monoflow has a rule for it"),
        (torch.ops.aten.addmm_.default, "mn,mk,kn->mn", {}, r"changes its arguments"),
        (product, "mk->mk", {}, r"'mk->mk' has 1 inputs, the operator has 2 tensor inputs"),
        (product, "mk,kn->mn,m", {}, r"has 2 outputs, the operator has 1 tensor outputs"),
        (product, ["S(0) -> S(0)"], {}, r"has 1 inputs, the operator has 2"),
        (product, "S(0), B", {}, r"'S\(0\), B' is not a signature; write"),
        (product, "S(x), B -> B", {}, r"'S\(x\), B ?' is not a layout"),
        (product, "mk,kn->mn", {"linear": [(2,)]}, r"linear names inputs \[2\]"),
        (product, ["P, B -> P"], {"linear": [(0,)]}, r"linear= goes with letters"),
        (noisy, "mn->mn", {"sample": (torch.ones(3, 4),)}, r"cannot have a rule, it draws random numbers"),
        (
            never,
            "mn->mn",
            {"sample": (torch.ones(3, 4),)},
            r"run on the sample: RuntimeError: needs",
        ),
        (row_mean, "mn->n", {"sample": (torch.zeros(3, 4),)}, r"output 0 is 0.0 everywhere on the sample"),
    ],
)
def test_what_does_not_fit_is_refused(op: object, layouts: object, options: dict, message: str) -> None:
    with pytest.raises(flow.LayoutError, match=message):
        flow.sbp.register(op, layouts, **options)  # pyright: ignore[reportArgumentType]
    assert op not in REGISTERED


def test_twice_is_refused_until_it_is_unregistered() -> None:
    flow.sbp.register(product, "mk,kn->mn")
    with pytest.raises(flow.LayoutError, match=r"product.*registered already; call flow.sbp.unregister"):
        flow.sbp.register(torch.ops.register_tests.product, "mk,kn->mn")
    flow.sbp.unregister(torch.ops.register_tests.product)
    with pytest.raises(flow.LayoutError, match=r"no rule is registered"):
        flow.sbp.unregister(product)
    flow.sbp.register(product, "mk,kn->mn")


def test_letters_of_another_rank_than_the_call_are_named() -> None:
    flow.sbp.register(row_mean, "_n->n")
    with pytest.raises(flow.LayoutError, match=r"'_n->n' of register_tests.row_mean.*\[3, 2\] dims"):
        RuleBook()[row_mean].signatures(describe(row_mean, (values(3, 4, 5),), {}), 2, [()])


def test_our_own_table_comes_first_and_the_book_lists_what_is_registered() -> None:
    flow.sbp.register(product, ["S(0), B -> S(0)"])
    book = RuleBook()
    assert product in book and product in set(book) and len(book) == len(set(book))
    assert book[torch.ops.aten.mm.default].local is RuleBook()[torch.ops.aten.mm.default].local
    assert torch.add not in book
