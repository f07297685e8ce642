"""Collectives between real processes: bit for bit what the simulation of the same ranks gives."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from monoflow.boxing import Group, apply_route, fits_mesh, route
from monoflow.mesh import Placement, placement
from monoflow.runtime.transport import DistTransport, SimTransport
from monoflow.sbp.layout import At, B, NdSbp, P, Partial, S, Split, local_shape
from tests.conftest import RunRanks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.bool,
    torch.complex64,
]
LINE = [B, P, Partial("max"), S(0), S(1), S(0, 3), S(0, 1, 4), At(0), At(1)]
GRID = [B, P, S(0), S(1), At(1)]


def everyone(where: Placement, sbp: NdSbp, shape: tuple[int, ...], dtype: torch.dtype) -> dict:
    """What every rank holds: random, and under a partial or B of its own (nobody checks replicas)."""
    tensors = {}
    for rank in where.ranks:
        at = where.coordinate(rank)
        seed = sum(i * 7**k for k, i in enumerate(at) if sbp[k] != B)
        generator = torch.Generator().manual_seed(seed)
        local = local_shape(shape, sbp, where.shape, at)
        tensors[rank] = torch.randn(local, generator=generator).mul(3).to(dtype)
    return tensors


def compare(where: Placement, source: NdSbp, target: NdSbp, shape: tuple[int, ...], dtype, real, sim) -> None:
    rank = dist.get_rank()
    way = route(source, target, shape, dtype, where.shape)
    tensors = everyone(where, source, shape, dtype)
    mine = tensors[rank].clone()
    got = apply_route(way, {rank: tensors[rank]}, where, real)
    assert set(got) == {rank}
    assert torch.equal(tensors[rank], mine), "an input was changed"
    expected = apply_route(way, tensors, where, sim)[rank]
    assert got[rank].dtype == dtype and got[rank].is_contiguous()
    assert torch.equal(got[rank], expected), f"{way.text()}\n{got[rank]}\n{expected}"


def check_pairs(grid: list, shapes: list, choices: list, dtypes: list) -> str:
    where = placement("cpu", grid)
    real, sim = DistTransport(where, dist.get_rank()), SimTransport(where)
    for shape, dtype in itertools.product(shapes, dtypes):
        nd = [
            sbp
            for sbp in itertools.product(choices, repeat=where.num_axes)
            if fits_mesh(shape, sbp, where.shape)
        ]
        for source, target in itertools.product(nd, repeat=2):
            if dtype.is_complex and any(
                isinstance(one, Partial) and one.op != "sum" for one in (*source, *target)
            ):
                continue
            compare(where, source, target, shape, dtype, real, sim)
    assert real.stats() == sim.stats(dist.get_rank())
    return real.stats().text()


def check_broadcast(dtype: torch.dtype) -> None:
    where = placement("cpu", [1, 0])
    transport = DistTransport(where, dist.get_rank())
    for source in (0, 1):
        mine = torch.full((3, 2), dist.get_rank()).to(dtype)
        got = transport.broadcast({dist.get_rank(): mine}, source, Group(0, where.ranks))
        assert torch.equal(got[dist.get_rank()], torch.full((3, 2), source).to(dtype))


def check_part_of_the_world() -> str:
    """One rank is left out; an axis of one rank never talks."""
    where = placement("cpu", [[2], [0]], ["pair", "alone"])
    rank = dist.get_rank()
    transport = DistTransport(where, rank)
    if rank not in where.ranks:
        return ""
    for source, target in (((P, P), (B, B)), ((S(0), S(1)), (B, B)), ((P, S(0)), (S(1), B))):
        compare(where, source, target, (3, 5), torch.float32, transport, SimTransport(where))
    one = Group(1, where.group(1, rank))
    x = {rank: torch.arange(3.0)}
    assert torch.equal(transport.all_reduce(x, "sum", one)[rank], x[rank])
    assert torch.equal(transport.all_gather(x, one)[rank], x[rank][None])
    assert torch.equal(transport.reduce_scatter({rank: x[rank][None]}, "sum", one)[rank], x[rank])
    assert torch.equal(transport.all_to_all({rank: [x[rank]]}, {rank: [(3,)]}, one)[rank][0], x[rank])
    assert torch.equal(transport.broadcast(x, rank, one)[rank], x[rank])
    return transport.stats().text()


def test_every_pair_of_layouts_in_every_dtype(run_ranks: RunRanks):
    shapes = [(12, 5), (7, 3), (1, 4), (0, 3)]
    texts = run_ranks(2, check_pairs, [1, 0], shapes, LINE, DTYPES)
    for text in texts:
        for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
            for dtype in DTYPES:
                assert f"axis0 {kind} {str(dtype).removeprefix('torch.')}:" in text


def test_scalars(run_ranks: RunRanks):
    run_ranks(2, check_pairs, [0, 1], [()], [B, P], DTYPES)


def test_axis_order_that_is_a_rotation(run_ranks: RunRanks):
    """torch sorts the ranks of a process group: an order unlike its own inverse tells the two apart."""
    run_ranks(3, check_pairs, [1, 2, 0], [(7, 5)], [B, P, S(0), S(1), S(0, 1, 7)], [torch.int64])


def test_every_pair_on_a_grid(run_ranks: RunRanks):
    texts = run_ranks(4, check_pairs, [[3, 1], [2, 0]], [(5, 3)], GRID, [torch.float32])
    for text in texts:
        assert "axis0 all_reduce float32" in text and "axis1 all_reduce float32" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_broadcast(run_ranks: RunRanks, dtype):
    run_ranks(2, check_broadcast, dtype)


def test_part_of_the_world_and_axes_of_one_rank(run_ranks: RunRanks):
    left, out, right = run_ranks(3, check_part_of_the_world)
    assert out == "" and "pair all_reduce" in left and "alone" not in left + right


def test_layouts_of_the_test_are_what_they_seem():
    assert [one for one in LINE if isinstance(one, Split) and not fits_mesh((12, 5), (one,), (2,))] == []


def check_send() -> list[int]:
    where = placement("cpu", [[0, 1], [2, 3]])
    rank = dist.get_rank()
    transport, group = DistTransport(where, rank), Group(0, where.group(0, rank))
    here, there = group.ranks
    for dtype in DTYPES:
        sent = torch.arange(6).view(2, 3).to(dtype)
        mine = sent.t() if rank == here else torch.empty(0, dtype=dtype)  # not contiguous
        got = transport.send({rank: mine}, here, there, (3, 2), group)
        if rank == here:
            assert got == {}
        else:
            assert got[rank].dtype == dtype and torch.equal(got[rank], sent.t())
    nothing = transport.send({rank: torch.empty(0, 4)}, there, here, (0, 4), group)
    assert [tuple(one.shape) for one in nothing.values()] == ([(0, 4)] if rank == here else [])
    return [transport.stats().calls("send"), transport.stats().num_bytes("send")]


def test_send(run_ranks: RunRanks) -> None:
    num_bytes = 6 * sum(dtype.itemsize for dtype in DTYPES)
    sender, receiver = [len(DTYPES), num_bytes], [1, 0]
    assert run_ranks(4, check_send) == [sender, sender, receiver, receiver]
