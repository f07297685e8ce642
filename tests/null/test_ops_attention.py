"""The logical attention op against torch's own, its rules against the oracle, and the capture mode."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from monoflow.capture.modes import logical_attention
from monoflow.sbp.layout import B, P, S
from monoflow.sbp.ops.attention import attention, attention_backward
from monoflow.sbp.oracle import missing_signatures, prove, prove_nd, wrong_signatures
from monoflow.sbp.rules.attention import RULES
from monoflow.sbp.signature import Signature

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}
SIZES = {
    "self": ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
    "cross": ((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    "fewer keys": ((2, 3, 9, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
    "other value size": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)),
    "no batch": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "two batch dims": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    "plain matrices": ((5, 8), (7, 8), (7, 8)),
    "empty": ((0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 8)),
    "no keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
}


def tensors(sizes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_() for s in sizes]


def compare(sizes, dtype, *args, **kwargs):
    """Outputs and gradients under the mode against torch's reference form."""
    inputs = tensors(sizes, dtype)
    q, k, v = inputs
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, *args, **kwargs)
    with logical_attention():
        got = F.scaled_dot_product_attention(q, k, v, *args, **kwargs)
    assert got.shape == expected.shape and got.dtype == dtype
    weight = torch.randn(expected.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    pairs = [(got, expected)]
    pairs += zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def masks(query, key, dtype):
    generator = torch.Generator().manual_seed(2)
    scores = (*query[:-1], key[-2])
    for length in range(2, len(scores) + 1):
        for kept in itertools.product((True, False), repeat=length):
            pairs = zip(kept, scores[-length:], strict=True)
            shape = [size if keep else 1 for keep, size in pairs]
            yield torch.randn(shape, dtype=dtype, generator=generator)
            yield torch.rand(shape, generator=generator) > 0.4


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_torch(dtype, name, is_causal):
    compare(SIZES[name], dtype, is_causal=is_causal)
    compare(SIZES[name], dtype, None, 0.0, is_causal, scale=0.3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["cross", "other value size", "no batch", "two batch dims"])
def test_equals_torch_under_masks_of_every_shape(dtype, name):
    sizes = SIZES[name]
    for mask in masks(sizes[0], sizes[1], dtype):
        compare(sizes, dtype, mask)


@pytest.mark.parametrize("name", ["cross", "other value size"])
def test_rows_that_attend_to_nothing_give_zero(name):
    sizes = SIZES[name]
    mask = torch.ones(sizes[0][-2], sizes[1][-2], dtype=torch.bool)
    mask[2] = False
    compare(sizes, torch.float32, mask)
    q, k, v = (x.detach() for x in tensors(sizes, torch.float32))
    out, lse = attention(q, k, v, mask, False, 1.0)
    assert (out[:, :, 2] == 0).all() and (lse[:, :, 2] == 0).all()
    assert (lse[:, :, 1] != 0).all()


def test_masks_with_strides_of_their_own():
    sizes = SIZES["cross"]
    expanded = (torch.rand(2, 1, 1, 9) > 0.3).expand(2, 1, 5, 9)
    transposed = torch.randn(2, 3, 9, 5).transpose(2, 3)
    for mask in (expanded, transposed, torch.randn(1, 3, 1, 1).expand(2, 3, 5, 9)):
        compare(sizes, torch.float32, mask)


def test_float32_mask_on_bfloat16():
    q, k, v = (x.detach() for x in tensors(SIZES["cross"], torch.bfloat16))
    mask = torch.randn(2, 1, 5, 9)
    out, _ = attention(q, k, v, mask, False, 0.5)
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, scale=0.5)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def test_inputs_with_strides_of_their_own():
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    permuted = x.transpose(1, 2)
    column = torch.randn(2, 3, 8, 5).transpose(2, 3)
    for q in (permuted, column):
        out, _ = attention(q, permuted, permuted, None, True, 0.5)
        expected = F.scaled_dot_product_attention(q, permuted, permuted, is_causal=True, scale=0.5)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("value_size", [8, 6])
def test_lse_is_the_log_sum_exp_of_the_scores(dtype, value_size):
    q, k, v = (x.detach() for x in tensors(((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, value_size)), dtype))
    _, lse = attention(q, k, v, None, False, 0.5)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = (q.double() @ k.double().transpose(2, 3) * 0.5).logsumexp(-1)
    torch.testing.assert_close(lse.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_grouped_queries():
    sizes = ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    compare(sizes, torch.float32, enable_gqa=True)
    compare(sizes, torch.float32, torch.randn(2, 1, 5, 7), enable_gqa=True)
    compare(sizes, torch.bfloat16, is_causal=True, enable_gqa=True)


def names_of(function, *args):
    traced = make_fx(function, tracing_mode="fake")(*args)
    return [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("value_size", [8, 4])
def test_one_node_forward_and_one_backward(value_size):
    def step(q, k, v):
        with logical_attention():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out.sum(), (q, k, v))

    inputs = tensors(((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, value_size)), torch.float32)
    traced = make_fx(step, tracing_mode="fake")(*inputs)
    functional = make_fx(torch.func.functionalize(traced, remove="mutations"))(*(x.detach() for x in inputs))
    targets = [n.target for n in functional.graph.nodes]
    assert targets.count(attention) == 1 and targets.count(attention_backward) == 1
    assert not any("flash" in str(t) or "softmax" in str(t) for t in targets)
    for got, expected in zip(functional(*inputs), step(*inputs), strict=True):
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected)


def test_falls_through_to_primitive_ops():
    q, k, v = (x.detach() for x in tensors(SIZES["self"], torch.float32))
    learned = torch.zeros(5, 5, requires_grad=True)

    def with_dropout(q, k, v):
        with logical_attention():
            return F.scaled_dot_product_attention(q, k, v, None, 0.5)

    def with_learned_mask(q, k, v, mask):
        with logical_attention():
            return F.scaled_dot_product_attention(q, k, v, mask)

    dropped = names_of(with_dropout, q, k, v)
    masked = names_of(with_learned_mask, q, k, v, learned)
    for names in (dropped, masked):
        assert "monoflow.attention.default" not in names
        assert any("softmax" in name for name in names) and any("bmm" in name for name in names)
        assert not any("scaled_dot_product" in name for name in names)
    assert any("bernoulli" in name or "dropout" in name for name in dropped)
    with logical_attention():
        F.scaled_dot_product_attention(q, k, v, learned).sum().backward()
    assert learned.grad is not None and learned.grad.isfinite().all()


def test_a_bool_mask_with_dropout_masks():
    q, k, v = (x.detach() for x in tensors(SIZES["self"], torch.float32))
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[:, 3] = True
    with logical_attention():
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.5)
    kept = out.abs().sum(-1, keepdim=True) > 0
    torch.testing.assert_close(out, torch.where(kept, 2 * v[:, :, 3:4], 0.0))


def test_mask_and_causal_together_are_refused_as_in_torch():
    q, k, v = (x.detach() for x in tensors(SIZES["self"], torch.float32))
    with logical_attention(), pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
        F.scaled_dot_product_attention(q, k, v, torch.zeros(5, 5), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_by_finite_differences(is_causal):
    sizes = ((1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 3))

    def out(q, k, v):
        return attention(q, k, v, None, is_causal, 0.7)[0]

    assert torch.autograd.gradcheck(out, tensors(sizes, torch.float64))


def test_lse_takes_no_gradient():
    q, k, v = tensors(SIZES["self"], torch.float32)
    out, lse = attention(q, k, v, None, False, 1.0)
    assert out.requires_grad and not lse.requires_grad


def test_fake_strides_are_the_real_ones():
    for sizes in (SIZES["self"], SIZES["other value size"]):
        real = [x.detach() for x in tensors(sizes, torch.float32)]
        out, lse = attention(*real, None, False, 1.0)
        grads = attention_backward(torch.ones_like(out), *real, None, out, lse, False, 1.0)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in real]
            fake_out, fake_lse = attention(*fake, None, False, 1.0)
            fakes = attention_backward(torch.ones_like(fake_out), *fake, None, fake_out, fake_lse, False, 1.0)
            for a, b in zip((out, lse, *grads), (fake_out, fake_lse, *fakes), strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


MASKS = [None, (1, 1, 5, 7), (3, 1, 1, 7), (3, 2, 5, 7), (5, 7), (2, 1, 7)]


def both_calls(mask_shape, is_causal, dtype=torch.float64, sizes=((3, 2, 5, 4), (3, 2, 7, 4), (3, 2, 7, 4))):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(s, dtype=dtype, generator=generator) for s in sizes)
    mask = None if mask_shape is None else torch.randn(mask_shape, dtype=dtype, generator=generator)
    out, lse = attention(q, k, v, mask, is_causal, 0.4)
    grad = torch.randn(out.shape, dtype=dtype, generator=generator)
    return {
        attention: (q, k, v, mask, is_causal, 0.4),
        attention_backward: (grad, q, k, v, mask, out, lse, is_causal, 0.4),
    }


@pytest.mark.parametrize("mask_shape", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("axis_size", [1, 2, 4])
def test_rules_are_right(mask_shape, is_causal, axis_size):
    for op, args in both_calls(mask_shape, is_causal).items():
        signatures = RULES[op].signatures
        assert signatures is not None
        assert wrong_signatures(op, args, {}, RULES[op], axis_size) == []


@pytest.mark.parametrize("op", RULES)
def test_rules_are_right_in_bfloat16_and_where_dims_are_one_or_none(op):
    args = both_calls((3, 1, 1, 7), False, torch.bfloat16)[op]
    assert wrong_signatures(op, args, {}, RULES[op], 2) == []
    for sizes in (((1, 1, 5, 4),) * 3, ((0, 2, 5, 4),) * 3):
        args = both_calls(None, True, sizes=sizes)[op]
        assert wrong_signatures(op, args, {}, RULES[op], 2) == []


def test_rules_know_the_ways_to_split():
    q, kv = S(2), B
    forward = both_calls((3, 1, 5, 7), False)
    missing = missing_signatures(attention, forward[attention], {}, RULES[attention], 2)
    # Left out on purpose: splits of a value's features, of which the log-sum-exp has no part.
    assert all(one.inputs[2] == S(3) or one.inputs[2] == P for one in missing), missing
    backward = Signature((q, q, kv, kv, S(2), q, S(2)), (S(2), P, P))
    prove(attention_backward, forward[attention_backward], {}, backward, 2)
    from_causal = both_calls(None, True)[attention]
    with pytest.raises(AssertionError, match="is wrong"):
        prove(attention, from_causal, {}, Signature((S(2), B, B), (S(2), S(2))), 2)


def test_batch_and_heads_on_two_axes():
    for op, args in both_calls((3, 1, 1, 7), True).items():
        count = sum(isinstance(x, torch.Tensor) for x in args)
        inputs = [x for x in args if isinstance(x, torch.Tensor)]
        assert count == len(inputs)
        batch = Signature((S(0),) * count, (S(0),) * (2 if op is attention else 3))
        heads = Signature(tuple(B if x.shape[1] == 1 else S(1) for x in inputs), (S(1),) * len(batch.outputs))
        prove_nd(op, args, {}, [batch, heads], (2, 2), RULES[op])


@pytest.mark.parametrize("value_size", [8, 4])
def test_torch_finds_nothing_wrong_with_the_op(value_size):
    q, k, v = tensors(((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, value_size)), torch.float32)
    mask = torch.rand(2, 1, 1, 7) > 0.3
    torch.library.opcheck(attention, (q, k, v, mask, False, 0.5))
    out, lse = (x.detach() for x in attention(q, k, v, mask, False, 0.5))
    args = (torch.ones_like(out), *(x.detach() for x in (q, k, v)), mask, out, lse, False, 0.5)
    torch.library.opcheck(attention_backward, args)


def test_a_bias_that_wants_a_gradient_is_refused():
    q, k, v = tensors(SIZES["self"], torch.float32)
    out, _ = attention(q, k, v, torch.zeros(5, 5, requires_grad=True), False, 1.0)
    with pytest.raises(AssertionError, match="no gradient for its bias"):
        out.sum().backward()


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = (x.detach() for x in tensors(SIZES["cross"], torch.float32))
    with pytest.raises(AssertionError, match=r"k \[2, 2, 9, 8\]"):
        attention(q, k[:, :2], v, None, False, 1.0)
    with pytest.raises(
        AssertionError, match=r"bias \[4, 9\] does not broadcast to the scores \[2, 3, 5, 9\]"
    ):
        attention(q, k, v, torch.zeros(4, 9), False, 1.0)
    out, lse = attention(q, k, v, None, False, 1.0)
    with pytest.raises(AssertionError, match=r"lse \[2, 3, 4\]"):
        attention_backward(out, q, k, v, None, out, lse[:, :, :4], False, 1.0)


def test_default_scale():
    q, k, v = (x.detach() for x in tensors(SIZES["self"], torch.float32))
    with logical_attention():
        got = F.scaled_dot_product_attention(query=q, key=k, value=v)
    assert torch.equal(got, attention(q, k, v, None, False, 1 / math.sqrt(8))[0])
