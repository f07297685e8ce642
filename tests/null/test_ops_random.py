"""The counter-based random ops: distribution, independence of streams, and shards as slices of the whole."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from monoflow.sbp.layout import B, S, Split, fits, shard
from monoflow.sbp.ops.random import _CPU_CHUNK, bits, normal, pack_runs, uniform, unpack_runs
from monoflow.sbp.oracle import every_split, missing_signatures, prove, prove_nd, wrong_signatures
from monoflow.sbp.rules.random import RULES
from monoflow.sbp.signature import Signature, TensorMeta, TensorShard

KEY = torch.tensor(1234567)
N = 400_000
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def draw(kind, shape, key=KEY, op=7, dtype=torch.float64, **part):
    return kind(key, op, shape, **part) if kind is bits else kind(key, op, shape, dtype=dtype, **part)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_moments_and_bins(dtype):
    u = draw(uniform, [N], dtype=dtype)
    assert u.dtype == dtype
    assert float(u.min()) >= 0 and float(u.max()) < 1
    u = u.double()
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * N) + 1e-3 * (dtype.itemsize < 4)
    assert abs(u.var() - 1 / 12) < 1e-3
    counts = torch.histc(u, 64, 0, 1)
    if dtype.itemsize >= 4:
        chi = ((counts - N / 64) ** 2 / (N / 64)).sum()
        assert abs(chi - 63) < 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_uniform_has_no_one_and_is_the_rounded_float32(dtype):
    u = draw(uniform, [N], dtype=torch.float32)
    assert float(u.max()) > 1 - torch.finfo(dtype).eps / 4, "some values would round to one"
    expected = u.to(dtype)
    expected[expected == 1] = 1 - torch.finfo(dtype).eps / 2
    assert torch.equal(draw(uniform, [N], dtype=dtype), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_moments_and_quantiles(dtype):
    x = draw(normal, [N], dtype=dtype)
    assert x.dtype == dtype and x.isfinite().all()
    x = x.double()
    assert abs(x.mean()) < 5 / math.sqrt(N)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / N) + 2e-3 * (dtype.itemsize < 4)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / N)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / N) + 2e-2 * (dtype.itemsize < 4)
    if dtype.itemsize >= 4:
        below = torch.special.ndtr(x)
        chi = ((torch.histc(below, 64, 0, 1) - N / 64) ** 2 / (N / 64)).sum()
        assert abs(chi - 63) < 5 * math.sqrt(2 * 63)


def test_bits_are_nonnegative_and_every_bit_is_fair():
    z = draw(bits, [N])
    assert z.dtype == torch.int64 and int(z.min()) >= 0
    for k in range(63):
        assert abs(float(((z >> k) & 1).double().mean()) - 0.5) < 5 / (2 * math.sqrt(N)), k
    assert z.unique().numel() == N


@pytest.mark.parametrize("kind", [uniform, normal, bits])
def test_neighbouring_streams_and_elements_are_uncorrelated(kind):
    x = draw(kind, [N])
    limit = 5 / math.sqrt(N)
    others = [draw(kind, [N], op=op) for op in (0, 6, 8, -7)]
    others += [draw(kind, [N], key=KEY + delta) for delta in (-1, 1, 2**32)]
    others += [draw(kind, [N], key=KEY + 1, op=6), draw(kind, [N], key=torch.tensor(7), op=1234567)]
    for other in others:
        assert not torch.equal(x, other)
        assert abs(correlation(x, other)) < limit
    for lag in (1, 2, 3, 64, 1024, _CPU_CHUNK):
        assert abs(correlation(x[lag:], x[:-lag])) < limit, lag


def test_uniform_pairs_fill_the_square():
    u = draw(uniform, [N])
    cells = (u[0::2] * 16).floor() * 16 + (u[1::2] * 16).floor()
    counts = torch.bincount(cells.long(), minlength=256).double()
    expected = N / 2 / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("kind", [uniform, normal, bits])
def test_elements_depend_on_the_flat_index_only(kind):
    assert torch.equal(draw(kind, [6, 70]).flatten(), draw(kind, [420]))
    assert torch.equal(draw(kind, [420])[:100], draw(kind, [100]))
    assert draw(kind, []).shape == ()
    assert draw(kind, [3, 0]).shape == (3, 0)
    assert not torch.equal(draw(kind, [420]), draw(kind, [420], op=8))


def test_runs_pack_and_unpack():
    runs = [[(0, 3), (5, 6)], [], [(2, 9)]]
    assert pack_runs(runs) == [2, 0, 3, 5, 6, 0, 1, 2, 9]
    assert unpack_runs(pack_runs(runs)) == runs


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_shard_is_the_slice_of_the_whole(data):
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    sizes, sbp = list(shape), []
    for axis_size in mesh:  # only splits that fit whatever the outer axis left: unblocked, unit 1
        blocked = [s for s in every_split(sizes, axis_size) if s.blocks * s.unit > 1] if not sbp else []
        sbp.append(data.draw(st.sampled_from([B, *map(S, range(len(shape))), *blocked])))
    kind = data.draw(st.sampled_from([uniform, normal, bits]))
    dtype = data.draw(st.sampled_from(FLOATS))
    whole = draw(kind, shape, dtype=dtype)
    for coordinate in itertools.product(*map(range, mesh)):
        held = TensorShard(TensorMeta(tuple(shape), dtype), tuple(sbp), tuple(mesh), coordinate)
        runs = pack_runs([held.runs(dim) for dim in range(len(shape))])
        part = draw(kind, held.shape, dtype=dtype, global_shape=shape, runs=runs)
        assert torch.equal(part, shard(whole, sbp, mesh, coordinate))


@pytest.mark.parametrize("kind", [uniform, normal, bits])
@pytest.mark.parametrize("shape, sbp", [([3, 200_001], S(1)), ([200_001, 3], S(0)), ([5, 90_000], S(1, 3))])
def test_shards_larger_than_a_block(kind, shape, sbp: Split):
    whole = draw(kind, shape, dtype=torch.float32)
    assert fits(shape[sbp.dim], sbp, 2)
    for index in range(2):
        held = TensorShard(TensorMeta(tuple(shape), torch.float32), (sbp,), (2,), (index,))
        runs = pack_runs([held.runs(dim) for dim in range(2)])
        part = draw(kind, held.shape, dtype=torch.float32, global_shape=shape, runs=runs)
        assert torch.equal(part, shard(whole, [sbp], [2], [index]))


def test_runs_that_do_not_give_the_shape_are_refused():
    with pytest.raises(AssertionError, match=r"runs hold a shape of \[2, 4\], the result has \[3, 4\]"):
        draw(uniform, [3, 4], global_shape=[4, 4], runs=pack_runs([[(0, 2)], [(0, 4)]]))
    with pytest.raises(AssertionError, match="0-dim int64"):
        draw(uniform, [3], key=torch.tensor([1]))


@pytest.mark.parametrize("op", RULES)
@pytest.mark.parametrize("axis_size", [1, 2, 3])
@pytest.mark.parametrize("shape", [[5, 4], [1, 3], [0, 2], []])
def test_rules_are_right_and_complete(op, axis_size, shape):
    kwargs = {} if op is bits else {"dtype": torch.float32}
    args = (KEY, 3, shape)
    assert wrong_signatures(op, args, kwargs, RULES[op], axis_size) == []
    if 0 not in shape and axis_size > 1:
        assert missing_signatures(op, args, kwargs, RULES[op], axis_size) == []


@pytest.mark.parametrize("op", RULES)
def test_rules_hold_on_two_axes(op):
    kwargs = {} if op is bits else {"dtype": torch.bfloat16}
    for a, b in itertools.product((S(0), S(1), B), repeat=2):
        signatures = [Signature((B,), (a,)), Signature((B,), (b,))]
        prove_nd(op, (KEY, 3, [7, 5]), kwargs, signatures, (2, 3), RULES[op])


def test_a_shard_without_its_indices_is_caught():
    signature = Signature((B,), (S(0),))
    with pytest.raises(AssertionError, match="is wrong"):
        prove(uniform, (KEY, 3, [4]), {"dtype": torch.float32}, signature, 2)


def test_one_node_when_traced_and_functionalized():
    def step(key):
        x = uniform(key, 1, [2, 3], dtype=torch.float32)
        x.add_(normal(key, 2, [2, 3], dtype=torch.float32))
        return x, bits(key, 3, [4])

    traced = make_fx(step, tracing_mode="fake")(KEY)
    functional = make_fx(torch.func.functionalize(traced, remove="mutations"))(KEY)
    names = [str(node.target) for node in functional.graph.nodes if node.op == "call_function"]
    assert names == [f"{name}" for name in (uniform, normal, torch.ops.aten.add.Tensor, bits)]
    for got, expected in zip(functional(KEY), step(KEY), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("op", RULES)
def test_torch_finds_nothing_wrong_with_the_op(op):
    kwargs = {} if op is bits else {"dtype": torch.float32}
    torch.library.opcheck(op, (KEY, 3, [4, 5]), kwargs)


def test_fake_results_have_shape_and_dtype():
    with FakeTensorMode():
        key = torch.zeros((), dtype=torch.int64)
        x = normal(key, 1, [2, 3], dtype=torch.bfloat16)
        assert (x.shape, x.dtype) == ((2, 3), torch.bfloat16)
        assert bits(key, 1, [5]).dtype == torch.int64
