"""Routes between nd-SBPs: right on every pair of layouts, cheapest, and priced as they are executed."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monoflow.boxing import (
    AxisMove,
    Group,
    LinkCost,
    Route,
    apply_route,
    axis_price,
    fits_mesh,
    move_bytes,
    price,
    route,
    run_collective,
)
from monoflow.errors import LayoutError
from monoflow.mesh import Placement, placement
from monoflow.runtime.transport import SimTransport
from monoflow.sbp.layout import (
    At,
    B,
    Broadcast,
    NdSbp,
    P,
    Partial,
    S,
    Split,
    is_held,
    reduce,
    shard,
    take,
    text,
    unshard,
)
from monoflow.sbp.oracle import every_split
from monoflow.sbp.signature import TensorMeta

MAX, MIN = Partial("max"), Partial("min")


def grid(mesh) -> Placement:
    """A placement of scrambled ranks, so that ranks and positions are not the same."""
    count = torch.Size(mesh).numel()
    ranks = torch.arange(count).flip(0).mul(3).add(1).view(*mesh)
    return placement("cpu", ranks.tolist(), [f"axis{i}" for i in range(len(mesh))])


def values(shape, dtype=torch.int64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


def parts(x, one, size, generator):
    """What the ranks of an axis may hold of x; small whole numbers, so that every dtype is exact."""
    if isinstance(one, Split):
        return [take(x, one, size, index) for index in range(size)]
    if isinstance(one, (Broadcast, At)):
        return [x] * size
    keeper = int(torch.randint(size, (), generator=generator))
    if one.op == "sum" and x.dtype != torch.bool:
        found = [torch.randint(0, 3, x.shape, generator=generator).to(x.dtype) for _ in range(size)]
        found[keeper] = x - reduce([found[keeper] * 0, *found[:keeper], *found[keeper + 1 :]], "sum")
        return found
    if x.dtype == torch.bool:
        found = [x & (torch.rand(x.shape, generator=generator) < 0.5) for _ in range(size)]
    else:
        sign = 1 if one.op == "min" else -1
        found = [
            x + sign * torch.randint(0, 3, x.shape, generator=generator).to(x.dtype) for _ in range(size)
        ]
    found[keeper] = x
    return found


def distribute(x, sbp, mesh, generator):
    if not sbp:
        return {(): x.contiguous()}
    return {
        (index, *rest): value if is_held(sbp[:1], (index,)) else value.new_empty(0)
        for index, part in enumerate(parts(x, sbp[0], mesh[0], generator))
        for rest, value in distribute(part, sbp[1:], mesh[1:], generator).items()
    }


def move(x, source: NdSbp, target: NdSbp, mesh) -> tuple[Route, SimTransport]:
    """Box `x` through the simulation and check what every rank holds then."""
    where = grid(mesh)
    transport = SimTransport(where)
    held = distribute(x, source, mesh, torch.Generator().manual_seed(1))
    way = route(source, target, x.shape, x.dtype, mesh)
    before = {where.rank_at(c): tensor for c, tensor in held.items()}
    copies = {rank: tensor.clone() for rank, tensor in before.items()}
    after = apply_route(way, before, where, transport)
    assert all(torch.equal(before[rank], copies[rank]) for rank in before), "an input was changed"
    got = {where.coordinate(rank): after[rank] for rank in where.ranks}
    message = f"{way.text()}"
    assert torch.equal(unshard(got, target, mesh), x), message
    for coordinate, tensor in got.items():
        expected = shard(x, target, mesh, coordinate)
        assert (tensor.shape, tensor.dtype) == (expected.shape, x.dtype), message
        if not any(isinstance(one, Partial) for one in target):
            assert torch.equal(tensor, expected), message
            assert tensor.is_contiguous(), message
    return way, transport


def layouts(shape, mesh, per_axis):
    return [sbp for sbp in itertools.product(per_axis, repeat=len(mesh)) if fits_mesh(shape, sbp, mesh)]


def stages(size) -> list[At]:
    return [At(stage) for stage in sorted({0, size - 1})]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(7, 5), (12, 6), (2, 3), (1, 1), (0, 4), (24,)])
def test_every_pair_on_one_axis(size, shape):
    choices = [(one,) for one in (B, P, MAX, MIN, *every_split(shape, size), *stages(size))]
    for source, target in itertools.product(choices, repeat=2):
        move(values(shape), source, target, (size,))


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("shape, splits", [((7, 5), (S(0), S(1))), ((12, 2), (S(0), S(0, 3), S(0, 1, 2)))])
def test_every_pair_on_two_axes(mesh, shape, splits):
    choices = layouts(shape, mesh, (B, P, MAX, *splits, At(0), At(1)))
    for source, target in itertools.product(choices, repeat=2):
        move(values(shape), source, target, mesh)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_pair_on_up_to_three_axes(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.int16]))

    def layout() -> NdSbp:
        sbp: tuple = ()
        for axis in range(len(mesh)):
            choices = [B, P, MAX, MIN, *every_split(shape, mesh[axis]), *stages(mesh[axis])]
            choices = [one for one in choices if fits_mesh(shape, (*sbp, one), mesh[: axis + 1])]
            sbp = (*sbp, data.draw(st.sampled_from(choices)))
        return sbp

    move(values(shape).to(dtype), layout(), layout(), mesh)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64, torch.float64])
def test_dtypes(dtype):
    x = values((7, 5)).abs().to(dtype)
    for source, target in itertools.product((B, P, S(0), S(1), At(2)), repeat=2):
        move(x, (source,), (target,), (3,))


def kinds(way: Route) -> list[tuple[int, str]]:
    return [(step.axis, step.kind) for step in way.steps]


KNOWN = [
    # 8 x 4 float32 is 128 bytes.
    ((2,), (S(0),), (B,), [(0, "all_gather")], (64,)),
    ((4,), (S(0),), (B,), [(0, "all_gather")], (96,)),
    ((4,), (P,), (B,), [(0, "all_reduce")], (192,)),
    ((4,), (MAX,), (B,), [(0, "all_reduce")], (192,)),
    ((4,), (P,), (S(1),), [(0, "reduce_scatter")], (96,)),
    ((4,), (S(0),), (S(1),), [(0, "all_to_all")], (24,)),
    ((2,), (S(0),), (S(0, 2),), [(0, "all_to_all")], (32,)),
    ((4,), (B,), (S(0),), [(0, "slice")], (0,)),
    ((4,), (B,), (P,), [(0, "keep")], (0,)),
    ((4,), (S(0),), (P,), [(0, "pad")], (0,)),
    ((4,), (P,), (MAX,), [(0, "all_reduce"), (0, "keep")], (192,)),
    ((4,), (S(0),), (S(0),), [], (0,)),
    ((1,), (P,), (B,), [(0, "all_reduce")], (0,)),
    # One stage holds it: another one is sent it, all are, or they drop it.
    ((4,), (At(0),), (At(3),), [(0, "send")], (128,)),
    ((4,), (At(2),), (B,), [(0, "broadcast")], (128,)),
    ((4,), (B,), (At(1),), [(0, "drop")], (0,)),
    ((4,), (P,), (At(1),), [(0, "all_reduce"), (0, "drop")], (192,)),
    ((4,), (S(0),), (At(1),), [(0, "all_gather"), (0, "drop")], (96,)),
    ((2,), (At(1),), (S(0),), [(0, "broadcast"), (0, "slice")], (128,)),
    # A shard crosses the stages; it is reduced and gathered within one of them.
    ((2, 2), (At(0), S(0)), (At(1), B), [(0, "send"), (1, "all_gather")], (64, 64)),
    ((2, 2), (P, At(1)), (S(0), At(0)), [(0, "reduce_scatter"), (1, "send")], (64, 64)),
    # The other axis cuts what this one moves.
    ((2, 2), (S(0), S(1)), (S(0), B), [(1, "all_gather")], (0, 32)),
    ((2, 2), (P, S(0)), (B, S(0)), [(0, "all_reduce")], (64, 0)),
    # Reduce what is cut before it is gathered.
    ((2, 2), (P, S(0)), (B, B), [(0, "all_reduce"), (1, "all_gather")], (64, 64)),
    ((2, 2), (P, B), (B, S(1)), [(1, "slice"), (0, "all_reduce")], (64, 0)),
    # Both cut dim 0: the inner axis has to leave it before the outer one moves.
    ((2, 2), (S(0), S(0)), (B, S(0)), [(1, "all_gather"), (0, "all_gather"), (1, "slice")], (64, 32)),
    ((2, 2), (B, S(0)), (S(0), S(0)), [(1, "all_gather"), (0, "slice"), (1, "slice")], (0, 64)),
    ((2, 2), (S(0), S(0)), (S(0), B), [(1, "all_gather")], (0, 32)),
    # The sum of maxima: the inner axis is reduced first. Only a shard crosses the outer one.
    (
        (2, 2),
        (P, MAX),
        (B, B),
        [(1, "reduce_scatter"), (0, "all_reduce"), (1, "all_gather")],
        (64, 128),
    ),
]


@pytest.mark.parametrize("mesh, source, target, steps, sent", KNOWN)
def test_known_routes_and_their_bytes(mesh, source, target, steps, sent):
    way = route(source, target, (8, 4), torch.float32, mesh)
    assert kinds(way) == steps
    assert way.bytes == sent
    assert way.text().count("\n") == len(steps)


def within_dim(step) -> bool:
    source, target = step.source[step.axis], step.target[step.axis]
    return isinstance(source, Split) and isinstance(target, Split) and source.dim == target.dim


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (2, 4)])
def test_predicted_bytes_are_the_bytes_sent(mesh):
    shape = (16, 32)
    choices = layouts(shape, mesh, (B, P, S(0), S(1), S(0, 2)))
    for source, target in itertools.product(choices, repeat=2):
        way, transport = move(values(shape), source, target, mesh)
        for rank in transport.placement.ranks:
            stats = transport.stats(rank)
            sent = tuple(stats.num_bytes(axis=name) for name in transport.placement.axes)
            if any(within_dim(step) for step in way.steps):  # some elements stay where they are
                assert all(a <= 2 * b for a, b in zip(sent, way.bytes, strict=True)), way.text()
            else:
                assert sent == way.bytes, way.text()
            assert stats.calls() == sum(step.kind not in ("slice", "keep", "pad") for step in way.steps)


@pytest.mark.parametrize("source, target", [(At(1), B), (At(0), At(1)), (At(0), S(1)), (S(0), At(1))])
def test_stages_send_what_is_predicted(source, target):
    """Only the rank that sends counts what it sends; in a broadcast every one passes it on."""
    for outer in (B, S(0)):
        way, transport = move(values((16, 32)), (outer, source), (outer, target), (2, 2))
        sent = [transport.stats(rank).num_bytes(axis="axis1") for rank in transport.placement.ranks]
        senders = 2 if kinds(way) == [(1, "send")] else 4
        assert sorted(sent) == [0] * (4 - senders) + [way.bytes[1]] * senders


LINKS = [
    (LinkCost(1e-5, 1e-9), LinkCost(1e-5, 1e-9)),
    (LinkCost(1e-4, 1e-8), LinkCost(1e-6, 1e-10)),
    (LinkCost(0.0, 1e-9), LinkCost(0.0, 1e-7)),
]


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("mesh", [(2, 2), (2, 4)])
def test_no_detour_is_cheaper(links, mesh):
    meta = TensorMeta((64, 48), torch.float32)
    choices = layouts(meta.shape, mesh, (B, P, S(0), S(1)))
    costs = {(a, b): price(a, b, meta, mesh, links) for a, b in itertools.product(choices, repeat=2)}
    for source, target in costs:
        way = route(source, target, meta.shape, meta.dtype, mesh, links)
        sent = (sum(s.num_bytes(meta.dtype) for s in way.steps if s.axis == axis) for axis in (0, 1))
        assert way.bytes == tuple(sent)
        per_axis = [{source[axis], target[axis], B} for axis in (0, 1)]
        for middle in itertools.product(*per_axis):
            detour = costs.get((source, middle), 0) + costs.get((middle, target), 0)
            assert costs[source, target] <= detour * (1 + 1e-12) + 1e-15, f"{text(source)} {text(target)}"


def test_a_slow_axis_is_crossed_with_little():
    slow, fast = LinkCost(1e-5, 1e-6), LinkCost(1e-5, 1e-10)
    shape = (1024, 1024)
    way = route((P, P), (S(0), S(1)), shape, torch.float32, (2, 4), (slow, fast))
    assert kinds(way) == [(1, "reduce_scatter"), (0, "reduce_scatter")]
    way = route((P, P), (S(0), S(1)), shape, torch.float32, (2, 4), (fast, slow))
    assert kinds(way) == [(0, "reduce_scatter"), (1, "reduce_scatter")]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_axis_price_is_the_price_of_the_route(data):
    size = data.draw(st.integers(1, 5))
    shape = tuple(data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=2)))
    choices = st.sampled_from([B, P, MAX, *every_split(shape, size)])
    source, target = data.draw(choices), data.draw(choices)
    meta, link = TensorMeta(shape, torch.bfloat16), LinkCost(3e-6, 2e-9)
    expected = price((source,), (target,), meta, (size,), (link,))
    assert axis_price(source, target, meta, size, link) == pytest.approx(expected, abs=1e-18)


def test_costs_by_hand():
    link = LinkCost(alpha=1.0, beta=0.5)
    meta = TensorMeta((8, 4), torch.float32)
    assert axis_price(P, B, meta, 4, link) == 2 * 1.0 + 0.5 * 192
    assert axis_price(S(0), S(1), meta, 4, link) == 1.0 + 0.5 * 24
    assert axis_price(B, S(1), meta, 4, link) == 0
    assert axis_price(P, B, meta, 1, link) == 0
    assert move_bytes("all_gather", 7, 3) == 5
    assert move_bytes("all_reduce", 7, 3) == 10
    assert move_bytes("all_to_all", 7, 3) == 2
    assert move_bytes("slice", 7, 3) == 0


def test_layouts_that_do_not_fit_are_refused():
    with pytest.raises(LayoutError, match=r"S\(0,3\) does not fit float32\[8, 4\] on a mesh of \(2,\)"):
        route((S(0, 3),), (B,), (8, 4), torch.float32, (2,))
    with pytest.raises(LayoutError, match=r"S\(2\) does not fit"):
        route((B,), (S(2),), (8, 4), torch.float32, (2,))
    with pytest.raises(LayoutError, match=r"\(B, B\) has 2 axes, the mesh \(2,\) has 1"):
        route((B,), (B, B), (8, 4), torch.float32, (2,))


def test_fits_mesh_looks_at_what_outer_axes_leave():
    assert fits_mesh((8,), (S(0), S(0, 2)), (2, 2))
    assert not fits_mesh((6,), (S(0), S(0, 3, 1)), (2, 2)), "3 elements in 3 blocks do not split evenly"
    assert not fits_mesh((7,), (S(0), S(0, 1, 2)), (2, 2)), "one rank is left with 3 elements"
    assert fits_mesh((7,), (S(0), S(0)), (2, 2))


def test_empty_and_one_rank_moves_send_nothing():
    where = grid((2,))
    transport = SimTransport(where)
    way = route((P,), (B,), (0, 4), torch.float32, (2,))
    result = apply_route(way, {rank: torch.zeros(0, 4) for rank in where.ranks}, where, transport)
    assert all(tensor.shape == (0, 4) for tensor in result.values())
    assert all(transport.stats(rank).calls() == 0 for rank in where.ranks)
    assert way.cost == 0


def test_a_wrong_local_shape_is_named():
    where = grid((2,))
    axis_move = AxisMove(S(0), B, (5, 2), 2)
    tensors = {where.ranks[0]: torch.zeros(3, 2), where.ranks[1]: torch.zeros(3, 2)}
    with pytest.raises(AssertionError, match=r"holds \[3, 2\], not \(2, 2\)"):
        run_collective(axis_move, tensors, Group(0, where.ranks), SimTransport(where))


def test_partial_sums_in_axis_order():
    """The simulation adds as a chain in rank order, so its rounding can be told in advance."""
    where = grid((3,))
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    way = route((P,), (B,), (1,), torch.bfloat16, (3,))
    result = apply_route(way, dict(zip(where.ranks, parts, strict=True)), where, SimTransport(where))
    assert all(tensor.item() == 256.0 for tensor in result.values())


def test_split_type_is_kept_apart_from_its_dim():
    assert isinstance(S(0), Split)
    assert route((S(0),), (S(0, 2),), (8,), torch.int64, (2,)).steps[0].kind == "all_to_all"
