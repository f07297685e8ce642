"""The simulated transport: what each collective gives, and what it counts."""

import pytest
import torch

from monoflow.boxing import Group
from monoflow.mesh import placement
from monoflow.runtime.transport import CommKey, SimTransport

WHERE = placement("cpu", [[4, 2, 0], [5, 3, 1]], ["outer", "inner"])
GROUP = Group(1, (4, 2, 0))


def held(*rows, dtype=torch.float32):
    """One row for each member of the group, in axis order."""
    return {rank: torch.tensor(row, dtype=dtype) for rank, row in zip(GROUP.ranks, rows, strict=True)}


def test_all_gather_stacks_in_axis_order():
    got = SimTransport(WHERE).all_gather(held([1, 2], [3, 4], [5, 6]), GROUP)
    assert set(got) == set(GROUP.ranks)
    for tensor in got.values():
        assert tensor.tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("op, expected", [("sum", [4, 9]), ("max", [3, 5]), ("min", [-1, 1])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_reduce(op, expected, dtype):
    got = SimTransport(WHERE).all_reduce(held([3, 1], [-1, 5], [2, 3], dtype=dtype), op, GROUP)
    for tensor in got.values():
        assert tensor.tolist() == expected and tensor.dtype == dtype


def test_sum_of_truth_values_is_or():
    tensors = held([True, False], [True, False], [False, False], dtype=torch.bool)
    assert SimTransport(WHERE).all_reduce(tensors, "sum", GROUP)[2].tolist() == [True, False]


def test_reduce_scatter_gives_each_its_part():
    rows = [[[1], [2], [3]], [[10], [20], [30]], [[100], [200], [300]]]
    got = SimTransport(WHERE).reduce_scatter(held(*rows), "sum", GROUP)
    assert {rank: tensor.tolist() for rank, tensor in got.items()} == {4: [111], 2: [222], 0: [333]}


def test_all_to_all_of_uneven_and_empty_pieces():
    sizes = {4: [0, 2, 1], 2: [3, 0, 0], 0: [1, 1, 1]}
    pieces = {
        rank: [torch.full((n,), 10.0 * rank + i) for i, n in enumerate(row)] for rank, row in sizes.items()
    }
    shapes = {
        rank: [(sizes[other][index],) for other in GROUP.ranks] for index, rank in enumerate(GROUP.ranks)
    }
    transport = SimTransport(WHERE)
    got = transport.all_to_all(pieces, shapes, GROUP)
    assert [piece.tolist() for piece in got[4]] == [[], [20, 20, 20], [0]]
    assert [piece.tolist() for piece in got[2]] == [[41, 41], [], [1]]
    assert [piece.tolist() for piece in got[0]] == [[42], [], [2]]
    sent = {rank: transport.stats(rank).num_bytes("all_to_all") for rank in GROUP.ranks}
    assert sent == {4: 3 * 4, 2: 3 * 4, 0: 2 * 4}


def test_broadcast_gives_everyone_the_source():
    got = SimTransport(WHERE).broadcast(held([1], [2], [3]), 2, GROUP)
    assert [tensor.item() for tensor in got.values()] == [2, 2, 2]


def test_send_gives_the_target_alone():
    transport = SimTransport(WHERE)
    given = torch.tensor([1.0, 2.0])
    got = transport.send({4: given, 0: torch.empty(0)}, 4, 0, (2,), GROUP)
    assert set(got) == {0} and got[0].tolist() == [1, 2] and got[0].data_ptr() != given.data_ptr()
    assert transport.stats(4).num_bytes("send", "inner") == 8 and transport.stats(0).calls() == 0
    with pytest.raises(
        AssertionError, match=r"rank 0 expects \[2\] torch.bfloat16 and is sent \[2\] torch.fl"
    ):
        transport.send({4: given, 0: torch.empty(0, dtype=torch.bfloat16)}, 4, 0, (2,), GROUP)


def test_results_share_no_memory_with_inputs_or_each_other():
    tensors = held([1.0], [2.0], [4.0])
    transport = SimTransport(WHERE)
    stacked = {rank: tensor.repeat(3, 1) for rank, tensor in tensors.items()}
    pieces = {rank: [tensor] * 3 for rank, tensor in tensors.items()}
    shapes = {rank: [(1,)] * 3 for rank in tensors}
    results = [
        *transport.all_gather(tensors, GROUP).values(),
        *transport.all_reduce(tensors, "sum", GROUP).values(),
        *transport.reduce_scatter(stacked, "max", GROUP).values(),
        *(piece for got in transport.all_to_all(pieces, shapes, GROUP).values() for piece in got),
        *transport.broadcast(tensors, 0, GROUP).values(),
    ]
    addresses = [tensor.data_ptr() for tensor in (*tensors.values(), *stacked.values(), *results)]
    assert len(set(addresses)) == len(addresses)


def test_counts_by_axis_kind_and_dtype():
    transport = SimTransport(WHERE)
    tensors = held([1.0] * 6, [2.0] * 6, [3.0] * 6)
    transport.all_reduce(tensors, "sum", GROUP)
    transport.all_reduce(tensors, "max", GROUP)
    transport.all_gather(held([1] * 6, [2] * 6, [3] * 6, dtype=torch.bfloat16), GROUP)
    outer = Group(0, (4, 5))
    transport.reduce_scatter({rank: torch.zeros(2, 5) for rank in outer.ranks}, "sum", outer)
    stats = transport.stats(4)
    assert stats.counts == {
        CommKey("inner", "all_reduce", "float32"): (2, 2 * (2 * 2 * 24 // 3)),
        CommKey("inner", "all_gather", "bfloat16"): (1, 2 * 12),
        CommKey("outer", "reduce_scatter", "float32"): (1, 20),
    }
    assert stats.calls() == 4 and stats.calls("all_reduce") == 2 and stats.calls(axis="outer") == 1
    assert stats.num_bytes() == 64 + 24 + 20 and stats.num_bytes("all_gather", "inner") == 24
    assert stats.text().splitlines() == [
        "inner all_gather bfloat16: 1 calls, 24 bytes",
        "inner all_reduce float32: 2 calls, 64 bytes",
        "outer reduce_scatter float32: 1 calls, 20 bytes",
    ]
    assert transport.stats(5).calls() == 1 and transport.stats(3).calls() == 0
    transport.all_reduce(tensors, "sum", GROUP)
    assert stats.calls() == 4, "a snapshot does not change"


def test_members_that_are_missing_or_differ_are_refused():
    transport = SimTransport(WHERE)
    with pytest.raises(AssertionError, match=r"given tensors of ranks \[2, 4\]"):
        transport.all_reduce({4: torch.zeros(1), 2: torch.zeros(1)}, "sum", GROUP)
    with pytest.raises(AssertionError, match="given different tensors"):
        transport.all_gather(held([1], [2], [3, 4]), GROUP)
    pieces = {rank: [torch.zeros(1)] * 3 for rank in GROUP.ranks}
    with pytest.raises(AssertionError, match="rank 2 expects pieces of"):
        shapes = {4: [(1,)] * 3, 2: [(2,)] * 3, 0: [(1,)] * 3}
        transport.all_to_all(pieces, shapes, GROUP)
