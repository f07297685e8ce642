"""Global tensors on real ranks: the elements are where the layout says, and come back in order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from monoflow.errors import LayoutError, PlacementError
from monoflow.mesh import placement
from monoflow.sbp import layout
from monoflow.sbp.layout import B, NdSbp, P, Partial, S, Split
from monoflow.sbp.vocabulary import broadcast, parse, partial_sum, split
from monoflow.tensor import (
    default_placement,
    device_mesh,
    from_local,
    from_placements,
    to_global,
    to_local,
    to_placements,
)
from tests.conftest import RunRanks

LINE: list[NdSbp] = [(S(0),), (S(1),), (S(0, 3),), (S(1, 2),), (B,), (P,), (Partial("max"),)]
GRID: list[NdSbp] = [
    (S(0), B),
    (B, S(1)),
    (S(0), S(0)),
    (S(0), S(1)),
    (S(0), S(0, 3)),
    (S(0, 3), B),
    (S(0, 3), S(1, 2)),
    (P, S(0)),
    (S(1), P),
]


def whole(rows: int = 12, columns: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * columns).reshape(rows, columns).to(dtype)


def check_elements(grid: list, sbps: list[NdSbp]) -> None:
    where = placement("cpu", grid)
    here = where.coordinate(dist.get_rank())
    for sbp in sbps:
        for dtype in (torch.float32, torch.bfloat16):
            x = to_global(whole(dtype=dtype), where, sbp)
            expected = layout.shard(whole(dtype=dtype), sbp, where.shape, here)
            assert torch.equal(to_local(x), expected), f"{layout.text(sbp)} at {here}"
            assert torch.equal(x.full_tensor(), whole(dtype=dtype)), layout.text(sbp)
            assert from_placements(x.placements) == sbp


def check_uneven() -> None:
    where = default_placement("cpu")
    for rows in (7, 1):
        x = to_global(whole(rows), where, "S(0)")
        assert to_local(x).shape[0] == layout.local_dim(rows, S(0), 2, dist.get_rank())
        assert torch.equal(x.full_tensor(), whole(rows))


def check_moves(grid: list, sbps: list[NdSbp]) -> None:
    where = placement("cpu", grid)
    for source in sbps:
        for target in sbps:
            if any(isinstance(one, Partial) for one in target):
                continue
            moved = to_global(to_global(whole(), where, source), where, target)
            expected = layout.shard(whole(), target, where.shape, where.coordinate(dist.get_rank()))
            assert torch.equal(to_local(moved), expected), f"{layout.text(source)} -> {layout.text(target)}"


@pytest.mark.parametrize("check", [check_elements, check_moves])
def test_line_of_two(run_ranks: RunRanks, check) -> None:
    run_ranks(2, check, [0, 1], LINE)


@pytest.mark.parametrize("check", [check_elements, check_moves])
def test_grid_of_four(run_ranks: RunRanks, check) -> None:
    run_ranks(4, check, [[0, 1], [2, 3]], GRID)


def test_uneven_and_empty_parts(run_ranks: RunRanks) -> None:
    run_ranks(2, check_uneven)


def join_uneven(sizes: list[int]) -> None:
    rank = dist.get_rank()
    start = sum(sizes[:rank])
    rows = whole(sum(sizes))[start : start + sizes[rank]]
    batch = from_local({"x": rows, "y": (rows[:, 0].long(), None)}, "S(0)")
    assert torch.equal(batch["x"].full_tensor(), whole(sum(sizes)))
    assert torch.equal(batch["y"][0].full_tensor(), whole(sum(sizes))[:, 0].long())
    assert batch["y"][1] is None
    expected = layout.shard(whole(sum(sizes)), (S(0),), (2,), (rank,))
    assert torch.equal(to_local(batch["x"]), expected)
    columns = whole(4, sum(sizes))[:, start : start + sizes[rank]]
    assert torch.equal(from_local(columns, split(1)).full_tensor(), whole(4, sum(sizes)))


@pytest.mark.parametrize("sizes", [[4, 4], [4, 3], [2, 5], [0, 3], [6, 1]])
def test_from_local_joins_parts_of_any_size(run_ranks: RunRanks, sizes: list[int]) -> None:
    run_ranks(2, join_uneven, sizes)


def join_on_a_grid() -> None:
    where = placement("cpu", [[0, 1], [2, 3]])
    row, _ = where.coordinate(dist.get_rank())
    part = whole(5)[:1] if row == 0 else whole(5)[1:]
    assert torch.equal(from_local(part, (S(0), B), where).full_tensor(), whole(5))
    total = from_local(torch.ones(3), (P, P), where)
    assert total.full_tensor().tolist() == [4, 4, 4]


def test_from_local_on_a_grid(run_ranks: RunRanks) -> None:
    run_ranks(4, join_on_a_grid)


def message_of(parts: list, sbp: str) -> str:
    try:
        from_local(parts[dist.get_rank()], sbp)
    except LayoutError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("parts", "sbp", "facts"),
    [
        ([torch.ones(2, 3), torch.ones(2, 4)], "S(0)", ["float32[2, 3]", "float32[2, 4]", "only dim 0"]),
        ([torch.ones(2), torch.ones(2).long()], "S(0)", ["float32[2]", "int64[2]"]),
        ([torch.ones(2), torch.ones(3)], "P(sum)", ["float32[2]", "float32[3]", "all sizes"]),
        ([[torch.ones(2)], {"a": torch.ones(2)}], "S(0)", ["structure", "list", "dict"]),
        (["words", "words"], "S(0)", ["str", "words"]),
    ],
    ids=["size", "dtype", "partial", "structure", "no tensor"],
)
def test_from_local_names_what_differs(run_ranks: RunRanks, parts: list, sbp: str, facts: list[str]) -> None:
    for message in run_ranks(2, message_of, parts, sbp):
        assert all(fact in message for fact in facts), message


def refuse_outsiders() -> str:
    where = placement("cpu", [0])
    try:
        return str(to_global(torch.ones(2), where, "S(0)").full_tensor().tolist())
    except PlacementError as error:
        return str(error)


def test_a_rank_outside_the_placement_is_told(run_ranks: RunRanks) -> None:
    inside, outside = run_ranks(2, refuse_outsiders)
    assert inside == "[1.0, 1.0]"
    assert outside.startswith("rank 1 is not in placement(cpu")


def leaf_and_meshes() -> None:
    where = placement("cpu", [0, 1])
    assert device_mesh(where) is device_mesh(placement("cpu", [0, 1]))
    x = to_global(torch.ones(4, requires_grad=True), where, broadcast)
    assert x.is_leaf
    (x * 3).sum().backward()
    assert x.grad is not None
    assert to_local(x.grad).tolist() == [3, 3, 3, 3]


def test_a_global_tensor_is_a_leaf_and_meshes_are_shared(run_ranks: RunRanks) -> None:
    run_ranks(2, leaf_and_meshes)


def test_words_and_placements() -> None:
    assert (split(1), split(0, 3), broadcast, partial_sum) == (Split(1), Split(0, 3), B, P)
    assert parse("(S(0, 3), P(max))") == (S(0, 3), Partial("max"))
    for sbp in (*LINE, *GRID):
        assert parse(layout.text(sbp)) == sbp
        assert from_placements(to_placements(sbp)) == sbp
    with pytest.raises(LayoutError, match=r"'S\(x\)' is not a layout; write S\(0\)"):
        parse("S(x)")
    with pytest.raises(LayoutError, match=r"split\(-1\): count the dim from the front"):
        split(-1)
    with pytest.raises(LayoutError, match="moves 4 elements at a time"):
        to_placements((S(0, 1, 4),))
    with pytest.raises(LayoutError, match=r"\(S\(0,3\), S\(0\)\) splits dim 0 by blocks and then again"):
        to_placements((S(0, 3), S(0)))


def test_layout_errors_name_tensor_and_ranks() -> None:
    alone = placement("cpu", [0])
    with pytest.raises(LayoutError, match=r"\(S\(0\), B\) lays a tensor along 2 axes, .* has 1"):
        to_global(torch.ones(2), alone, (S(0), B))
    with pytest.raises(LayoutError, match=r"S\(1\) splits dim 1 of a tensor of shape \(2,\)"):
        to_global(torch.ones(2), alone, "S(1)")
    with pytest.raises(LayoutError, match=r"S\(0,3\) does not divide dim 0 of \(4,\) over 1 ranks"):
        to_global(torch.ones(4), alone, "S(0, 3)")
    with pytest.raises(PlacementError, match=r"needs rank 1, but the job has 1: .*monoflow run -n 2"):
        to_global(torch.ones(2), placement("cpu", [0, 1]), "B")


def test_one_process_needs_no_launcher() -> None:
    x = to_global(whole(), placement("cpu", [0]), "S(0)")
    try:
        assert torch.equal(x.full_tensor(), whole())
        assert from_local(whole()) is not None
    finally:
        dist.destroy_process_group()
