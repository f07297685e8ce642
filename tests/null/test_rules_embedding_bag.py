"""Rules of embedding bags: rows, vocabulary and bags split, the outputs about indices whole."""

import pytest
import torch

from monoflow.sbp.layout import B, P, S
from monoflow.sbp.oracle import prove_nd
from monoflow.sbp.rules.embedding_bag import RULES
from monoflow.sbp.signature import Signature
from tests.null.rule_trial import integers, proven, values

aten = torch.ops.aten
BAG = aten._embedding_bag.default
FORWARD_ONLY = aten._embedding_bag_forward_only.default
BACKWARDS = aten._embedding_bag_dense_backward.default, aten._embedding_bag_backward.default
OFFSETS = torch.tensor([0, 2, 2, 5])  # the second of four bags is empty


def _arguments(mode, weighted=False, padding=-1, include_last=False, dtype=torch.float64):
    offsets = torch.cat([OFFSETS, torch.tensor([9])]) if include_last else OFFSETS
    scale = values(9, seed=1, dtype=dtype) if weighted else None
    index = torch.tensor([3, 1, 6, 3, 0, 2, 2, 5, 1])
    return values(7, 4, dtype=dtype), index, offsets, False, mode, False, scale, include_last, padding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("include_last", [True, False])
@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize(("mode", "weighted"), [(0, False), (0, True), (1, False)])
def test_bags(mode, weighted, padding, include_last, dtype):
    args = _arguments(mode, weighted, padding, include_last, dtype)
    for op in (BAG, FORWARD_ONLY):
        found = proven(RULES[op], op, *args)
        tail = ", B" if weighted else ""
        expected = {
            f"S(1), B, B{tail} -> S(1), B, B, B",
            f"S(0), B, B{tail} -> P(sum), B, B, B",
            f"B, B, B{tail} -> S(0), B, B, B",
            f"P(sum), B, B{tail} -> P(sum), B, B, B",
        }
        assert found == expected | ({"B, B, B, P(sum) -> P(sum), B, B, B"} if weighted else set())


def test_rows_are_divided_by_all_of_a_bag_not_by_what_a_shard_holds():
    weight, index, offsets = torch.eye(4, dtype=torch.float64), torch.tensor([0, 3]), torch.tensor([0])
    prove_nd(
        BAG, (weight, index, offsets, False, 1), {}, [Signature((S(0), B, B), (P, B, B, B))], (4,), RULES[BAG]
    )
    assert BAG(weight, index, offsets, False, 1)[0].tolist() == [[0.5, 0, 0, 0.5]]


def test_maxima_stay_whole():
    assert proven(RULES[BAG], BAG, *_arguments(2)) == set()


@pytest.mark.parametrize("by_frequency", [True, False])
@pytest.mark.parametrize(("mode", "weighted", "padding"), [(0, False, -1), (0, True, 2), (1, False, 2)])
def test_backward(mode, weighted, padding, by_frequency):
    _, index, offsets, _, _, _, scale, _, _ = args = _arguments(mode, weighted, padding)
    _, offset_to_bag, bag_size, maxima = BAG(*args)
    grad = values(4, 4, seed=2)
    tail = ", B" if weighted else ""
    for op in BACKWARDS:
        first = (offsets,) if "dense" not in str(op) else ()
        last = (7, by_frequency, mode, *([False] if first else []), scale, padding)
        found = proven(RULES[op], op, grad, index, *first, offset_to_bag, bag_size, maxima, *last)
        others = ", ".join("B" * (4 + len(first))) + tail
        assert found == {
            f"S(0), {others} -> P(sum)",
            f"S(1), {others} -> S(1)",
            f"P(sum), {others} -> P(sum)",
        } | ({f"B, {others} -> S(0)"} if not by_frequency else set())


def test_maxima_go_back_whole():
    args = _arguments(2)
    _, offset_to_bag, bag_size, maxima = BAG(*args)
    op = BACKWARDS[0]
    back = (values(4, 4), args[1], offset_to_bag, bag_size, maxima, 7, False, 2, None)
    assert proven(RULES[op], op, *back) == set()


def test_the_gradient_of_the_factors():
    op = aten._embedding_bag_per_sample_weights_backward.default
    args = _arguments(0, True)
    found = proven(RULES[op], op, values(4, 4), args[0], args[1], OFFSETS, BAG(*args)[1], 0)
    assert found == {
        "S(1), S(1), B, B, B -> P(sum)",
        "P(sum), B, B, B, B -> P(sum)",
        "B, P(sum), B, B, B -> P(sum)",
    }


def test_an_index_outside_the_whole_table_is_an_error_on_every_rank():
    args = list(_arguments(0))
    args[1] = integers(7, 9)
    args[1][3] = 7
    with pytest.raises((IndexError, RuntimeError)):
        BAG(*args)


def test_indices_of_32_bits():
    args = list(_arguments(1))
    args[1], args[2] = args[1].int(), args[2].int()  # pyright: ignore
    assert len(proven(RULES[BAG], BAG, *args)) == 4


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rank_without_columns_gives_none(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for op in (BAG, FORWARD_ONLY):
            assert "S(1), B, B -> S(1), B, B, B" in proven(
                RULES[op], op, *_arguments(0), axis_sizes=[5], nd=False
            )
    finally:
        torch.set_num_threads(before)
