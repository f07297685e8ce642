"""Reads and writes by index: every listed layout is proved, shifted and masked forms included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from monoflow.sbp.layout import B, P, Partial, S
from monoflow.sbp.oracle import describe, missing_signatures, prove_nd, wrong_signatures
from monoflow.sbp.registry import OpRule
from monoflow.sbp.rules.index import RULES, read_shard
from monoflow.sbp.signature import LocalCall, Signature, TensorMeta, TensorShard

aten = torch.ops.aten
torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def distinct(high: int, count: int) -> torch.Tensor:
    """Indices of which none repeats, so that overwriting has one outcome."""
    return torch.randperm(high)[:count]


ROWS = torch.stack([torch.randperm(5)[:2] for _ in range(4)])

CASES: list[tuple[Callable, tuple[Any, ...]]] = [
    (aten.gather.default, (randn(4, 5), 1, ints(5, 4, 1))),
    (aten.gather.default, (randn(5, 4, 3), -2, ints(4, 2, 7, 3))),
    (aten.gather.default, (randn(5), 0, ints(5, 4))),
    (aten.scatter.value, (randn(4, 5), 1, ROWS, 1.5)),
    (aten.scatter.value, (randn(4, 5), 1, ROWS, 0)),
    (aten.scatter.src, (randn(4, 5), 1, ROWS, randn(4, 2))),
    (aten.scatter.src, (randn(4, 5), 1, ROWS, randn(6, 3))),
    (aten.scatter_add.default, (randn(4, 5), 1, ints(5, 4, 7), randn(4, 7))),
    (aten.scatter_add.default, (randn(4, 5), 0, ints(4, 3, 5), randn(3, 5))),
    (aten.scatter_add.default, (randn(4, 5), 0, ints(4, 2, 2), randn(4, 5))),
    (aten.scatter_reduce.two, (randn(4, 5), 1, ints(5, 4, 7), randn(4, 7), "amax")),
    (aten.scatter_reduce.two, (randn(4, 5), 1, ints(5, 4, 7), randn(4, 7), "mean")),
    (aten.index_select.default, (randn(4, 5), 1, ints(5, 7))),
    (aten.index_select.default, (randn(4, 5), 0, ints(4))),
    (aten.index_add.default, (randn(5, 3), 0, ints(5, 8), randn(8, 3))),
    (aten.index_copy.default, (randn(5, 3), 0, distinct(5, 3), randn(3, 3))),
    (aten.index_fill.int_Scalar, (randn(3, 5), 1, distinct(5, 2) - 5, 2.5)),
    (aten.index_fill.int_Scalar, (randn(3, 5), 1, distinct(5, 2), 0.0)),
    (aten.index_fill.int_Tensor, (randn(3, 5), -1, distinct(5, 2), randn())),
    (aten.index.Tensor, (randn(5, 3), [ints(5, 4, 2) - 2])),
    (aten.index.Tensor, (randn(5, 3), [None, ints(3, 4)])),
    (aten.index.Tensor, (randn(5, 3, 4), [ints(5, 2, 1), None, ints(4, 6)])),
    (aten.index.Tensor, (randn(2, 5, 3, 4), [None, ints(5, 2, 1), ints(3, 6)])),
    (aten.index.Tensor, (randn(5, 3), [ints(5), ints(3)])),
    (aten.index_put.default, (randn(5, 3), [ints(5, 8)], randn(8, 3), True)),
    (aten.index_put.default, (randn(5, 3), [ints(5, 8)], randn(3), True)),
    (aten.index_put.default, (randn(5, 3), [ints(5, 8)], randn(8, 1), True)),
    (aten.index_put.default, (randn(5, 3), [distinct(5, 3)], randn(3, 3))),
    (aten.index_put.default, (randn(5, 3, 4), [ints(5, 6, 1), None, ints(4, 2)], randn(6, 2, 3), True)),
    (aten.index_put.default, (randn(4, 5, 3), [None, ints(5, 8)], randn(4, 8, 3), True)),
    (aten.index_put.default, (randn(5, 3), [randn(5) > 0], randn())),
    (aten.index_put.default, (randn(5, 3), [randn(5, 3) > 0], randn(1))),
    (aten.masked_scatter.default, (randn(5, 3), randn(5, 3) > 0, randn(20))),
    (aten.take.default, (randn(5, 3), ints(15, 4, 2))),
    (aten.bucketize.Tensor, (randn(5, 3), torch.tensor([-1.0, 0.0, 0.5]))),
    (aten.searchsorted.Tensor, (torch.tensor([-1.0, 0.0, 0.5]), randn(5, 3))),
    (aten.searchsorted.Tensor, (randn(4, 3).sort()[0], randn(4, 5))),
    (aten.searchsorted.Scalar, (torch.tensor([-1.0, 0.0, 0.5]), 0.2)),
    (aten.index_reduce.default, (randn(5, 3), 0, ints(5, 8), randn(8, 3), "amax")),
    (aten.index_reduce.default, (randn(5, 3), 0, ints(5, 8), randn(8, 3), "mean")),
    (aten.index_reduce.default, (randn(5, 3), 1, ints(3, 8), randn(5, 8), "prod")),
    (aten.put.default, (randn(5, 3), ints(15, 4, 2), randn(4, 2), True)),
    (aten.put.default, (randn(5, 3), distinct(15, 4), randn(2, 2))),
    (aten.isin.Tensor_Tensor, (ints(9, 5, 3), ints(9, 4))),
    (aten.isin.Tensor_Scalar, (ints(9, 5, 3), 4)),
]
IDS = [f"{op.__name__}-{i}" for i, (op, _) in enumerate(CASES)]


@pytest.mark.parametrize(("op", "args"), CASES, ids=IDS)
@pytest.mark.parametrize("axis_size", [1, 2, 3, 4, 6])
def test_listed_signatures_are_exact(op: Callable, args: tuple[Any, ...], axis_size: int) -> None:
    assert wrong_signatures(op, args, {}, RULES[op], axis_size) == []


def test_other_ways_to_look_up() -> None:
    boundaries, order = torch.tensor([0.5, -1.0, 0.0]).sort()
    for op, args, kwargs in [
        (aten.isin.Tensor_Tensor, (ints(9, 5, 3), ints(9, 4, 2)), {"invert": True}),
        (aten.bucketize.Tensor, (randn(5), boundaries), {"right": True, "out_int32": True}),
        (aten.searchsorted.Tensor, (boundaries[order], randn(5)), {"sorter": order}),
        (aten.index_add.default, (randn(5, 3), 1, ints(3, 8), randn(5, 8)), {"alpha": -2}),
        (aten.scatter_reduce.two, (randn(5), 0, ints(5, 8), randn(8), "amax"), {"include_self": False}),
    ]:
        assert wrong_signatures(op, args, kwargs, RULES[op], 3) == []


@pytest.mark.parametrize(("op", "args"), [case for case in CASES if "isin" not in str(case[0])])
def test_no_signature_is_missing(op: Callable, args: tuple[Any, ...]) -> None:
    """Without local forms, and leaving aside parts of what overwrites (which copy wins is not said)."""
    missing = missing_signatures(op, args, {}, OpRule(RULES[op].signatures), 2, limit=600)
    overwrites = op in (aten.scatter.src, aten.index_copy.default, aten.index_put.default, aten.put.default)
    assert [one for one in missing if not (overwrites and P in one.inputs)] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = (randn(4, 5) * 3).to(dtype)
    for op, args in [
        (aten.gather.default, (x, 1, ints(5, 4, 2))),
        (aten.index.Tensor, (x, [ints(4, 6)])),
        (aten.index_select.default, (x, 1, ints(5, 3))),
        (aten.scatter.src, (x, 1, ROWS, (randn(4, 2) * 3).to(dtype))),
    ]:
        assert wrong_signatures(op, args, {}, RULES[op], 3) == []


def listed(op: Callable, args: tuple[Any, ...], axis_size: int = 2) -> set[Signature]:
    call = describe(op, args, {})
    return set(RULES[op].signatures(call, axis_size, [[] for _ in call.inputs]))


def test_labels_look_up_split_logits() -> None:
    """The loss of a vocabulary split over ranks: each gives the label's logit or zero."""
    found = listed(aten.gather.default, (randn(6, 8), 1, ints(8, 6, 1)))
    assert {Signature((S(1), B), (P,)), Signature((S(0), S(0)), (S(0),)), Signature((P, B), (P,))} <= found
    found = listed(aten.scatter.value, (torch.zeros(6, 8), 1, ints(8, 6, 1), -1.0))
    assert {Signature((S(1), B), (S(1),)), Signature((S(0), S(0)), (S(0),))} <= found


def test_an_empty_index_may_have_other_dims() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for op, args in [
        (aten.gather.default, (randn(4, 5), 0, none)),
        (aten.scatter_add.default, (randn(4, 5), 0, none, randn(4, 5))),
        (aten.scatter.value, (randn(4, 5), 0, none, 1.0)),
    ]:
        assert wrong_signatures(op, args, {}, RULES[op], 2) == []


@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_scatters_that_say_how_they_reduce(reduce: str) -> None:
    for op, last in ((aten.scatter.reduce, randn(4, 7)), (aten.scatter.value_reduce, 1.5)):
        args, kwargs = (randn(4, 5), 1, ints(5, 4, 7), last), {"reduce": reduce}
        for axis_size in (2, 3, 6):
            assert wrong_signatures(op, args, kwargs, RULES[op], axis_size) == []
        assert missing_signatures(op, args, kwargs, OpRule(RULES[op].signatures), 2, limit=600) == []


def test_a_table_and_its_gradient() -> None:
    assert Signature((S(0), B), (P,)) in listed(aten.index.Tensor, (randn(6, 3), [ints(6, 4)]))
    assert Signature((B, S(0)), (S(0),)) in listed(aten.index.Tensor, (randn(6, 3), [ints(6, 4)]))
    found = listed(aten.index_put.default, (torch.zeros(6, 3), [ints(6, 4)], randn(4, 3), True))
    assert Signature((S(0), B, B), (S(0),)) in found
    assert Signature((P, S(0), S(0)), (P,)) in found
    assert Signature((S(1), B, S(1)), (S(1),)) in found


def test_maxima_can_be_scattered_in_parts() -> None:
    args = (randn(5), 0, ints(5, 8), randn(8), "amax")
    top = Partial("max")
    assert Signature((top, S(0), S(0)), (top,)) in listed(aten.scatter_reduce.two, args)
    assert not any(P in one.inputs for one in listed(aten.scatter_reduce.two, args))


def test_masks_are_refused_where_they_make_the_size() -> None:
    call = describe(aten.index.Tensor, (randn(5, 3), [randn(5) > 0]), {})
    assert RULES[aten.index.Tensor].signatures(call, 2, [[], []]) == []
    assert aten.masked_select.default not in RULES and aten.nonzero.default not in RULES


def test_two_axes() -> None:
    table = Signature((S(0), B), (P,))
    by_index = Signature((B, S(0)), (S(0),))
    x, at = randn(7, 3), ints(7, 5)
    for op, args in [(aten.index.Tensor, (x, [at])), (aten.index_select.default, (x, 0, at))]:
        prove_nd(op, args, {}, [table, by_index], (2, 3), RULES[op])
        prove_nd(op, args, {}, [table, table], (3, 2), RULES[op])
    both = (randn(5, 6), [ints(5, 4), ints(6, 4)])
    rows, columns = Signature((S(0), B, B), (P,)), Signature((S(1), B, B), (P,))
    prove_nd(aten.index.Tensor, both, {}, [rows, columns], (2, 3), RULES[aten.index.Tensor])
    put = (*both, randn(4), True)
    rows, columns = Signature((S(0), B, B, B), (S(0),)), Signature((S(1), B, B, B), (S(1),))
    prove_nd(aten.index_put.default, put, {}, [rows, columns], (2, 3), RULES[aten.index_put.default])
    add = (randn(5, 6), 1, ints(6, 5, 4), randn(5, 4))
    columns, parts = Signature((S(1), B, B), (S(1),)), Signature((P, S(1), S(1)), (P,))
    prove_nd(aten.scatter_add.default, add, {}, [columns, parts], (2, 3), RULES[aten.scatter_add.default])
    prove_nd(aten.scatter_add.default, add, {}, [parts, columns], (4, 2), RULES[aten.scatter_add.default])


LOCAL_CASES = [
    (aten.gather.default, lambda x, bad: (x, 0, torch.full((1, 3), bad)), (P,)),
    (aten.index_select.default, lambda x, bad: (x, 0, torch.tensor([bad])), (P,)),
    (aten.scatter.value, lambda x, bad: (x, 0, torch.full((1, 3), bad), 1.0), (S(0),)),
    (aten.scatter_add.default, lambda x, bad: (x, 0, torch.full((1, 3), bad), torch.ones(1, 3)), (S(0),)),
    (aten.index.Tensor, lambda x, bad: (x, [torch.tensor([bad])]), (P,)),
    (aten.index_put.default, lambda x, bad: (x, [torch.tensor([bad])], torch.ones(1, 3), True), (S(0),)),
]


@pytest.mark.parametrize(("op", "build", "output"), LOCAL_CASES, ids=[c[0].__name__ for c in LOCAL_CASES])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_an_index_outside_the_whole_dim_is_an_error_on_every_rank(op, build, output, rank: int) -> None:
    """Four ranks hold 2, 2, 2 and 0 rows of 6: row 5 is fine everywhere, row 6 nowhere."""
    for index, refused in [(5, False), (6, True)]:
        whole = describe(op, build(randn(6, 3), 0), {})
        rows = 2 if rank < 3 else 0
        args = build(randn(rows, 3), index)
        shards = [TensorShard(m, (S(0) if i == 0 else B,), (4,), (rank,)) for i, m in enumerate(whole.inputs)]
        result = [TensorShard(m, output, (4,), (rank,)) for m in whole.outputs if m is not None]
        local = RULES[op].local
        assert local is not None
        run, local_args, kwargs = local(LocalCall(op, args, {}, shards, result))
        if refused:
            with pytest.raises(IndexError, match="6"):
                run(*local_args, **kwargs)
        else:
            assert tuple(run(*local_args, **kwargs).shape) == result[0].shape


def test_blocked_tables_are_read_by_runs() -> None:
    """A rank that holds rows 2, 3, 6 and 7 of 8 knows where they are."""
    meta = TensorMeta((8, 1), torch.float32)
    runs = tuple(edge for run in TensorShard(meta, (S(0, 2),), (2,), (1,)).runs(0) for edge in run)
    held = torch.tensor([[2.0], [3.0], [6.0], [7.0]])
    got = read_shard(aten.gather.default, (0, 8, runs), held, torch.arange(8).unsqueeze(1), {})
    assert got.flatten().tolist() == [0, 0, 2, 3, 0, 0, 6, 7]
