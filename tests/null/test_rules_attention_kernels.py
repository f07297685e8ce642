"""Rules of torch's attention kernels: those of other devices run in their mathematical form."""

from typing import Any

import pytest
import torch

from monoflow.sbp.layout import Split
from monoflow.sbp.oracle import describe
from monoflow.sbp.rules.attention_kernels import RULES
from tests.null.rule_trial import proven, values
from tests.rules.stand_ins import kernels_as_maths

aten = torch.ops.aten
CPU, CPU_BACK = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


@pytest.fixture(autouse=True)
def _stand_ins():
    with kernels_as_maths():
        yield


def _qkv(heads=4, shared=4, batch=4, rows=5):
    return (
        values(batch, heads, rows, 8),
        values(batch, shared, 6, 8, seed=1),
        values(batch, shared, 6, 8, seed=2),
    )


@pytest.mark.parametrize("mask", [None, (5, 6), (4, 1, 5, 6), (4, 4, 5, 6)])
def test_on_a_cpu_rows_of_queries_split_too(mask):
    bias = None if mask is None else values(*mask, seed=3)
    kwargs: dict[str, Any] = {} if bias is None else {"attn_mask": bias}
    found = proven(RULES[CPU], CPU, *_qkv(), **kwargs)
    tail = [""] * 4
    if mask is not None:
        first, second = (
            ("S(0)", "S(1)") if mask == (4, 4, 5, 6) else ("S(0)", "B") if len(mask) == 4 else ("B", "B")
        )
        tail = [f", {first}", f", {second}", f", S({len(mask) - 2})", ", B"]
    assert found == {
        f"S(0), S(0), S(0){tail[0]} -> S(0), S(0)",
        f"S(1), S(1), S(1){tail[1]} -> S(1), S(1)",
        f"S(2), B, B{tail[2]} -> S(2), S(2)",
        f"B, B, P(sum){tail[3]} -> P(sum), B",
    }
    out, lse = CPU(*_qkv(), **kwargs)
    back = proven(
        RULES[CPU_BACK], CPU_BACK, values(4, 4, 5, 8, seed=5), *_qkv(), out, lse, 0.0, False, **kwargs
    )
    assert back == {
        f"S(0), S(0), S(0), S(0), S(0), S(0){tail[0]} -> S(0), S(0), S(0)",
        f"S(1), S(1), S(1), S(1), S(1), S(1){tail[1]} -> S(1), S(1), S(1)",
        f"S(2), S(2), B, B, S(2), S(2){tail[2]} -> S(2), P(sum), P(sum)",
        f"P(sum), B, B, B, B, B{tail[3]} -> P(sum), P(sum), P(sum)",
    }


def test_a_causal_mask_ties_rows():
    assert not any("S(2)" in one for one in proven(RULES[CPU], CPU, *_qkv(rows=6), is_causal=True))


@pytest.mark.parametrize(
    ("heads", "shared", "splits"), [(4, 4, (2, 3, 4)), (6, 2, (2,)), (6, 3, (3,)), (4, 1, (2, 3, 4))]
)
def test_heads_split_by_whole_groups(heads, shared, splits):
    """Six heads of queries over two of keys: two ranks have three and one each, three ranks cannot."""
    for size in (2, 3, 4):
        call = describe(CPU, _qkv(heads, shared), {})
        found = RULES[CPU].signatures(call, size, [()] * 3)
        by_heads = [one for one in found if one.inputs[0] == Split(1)]
        assert bool(by_heads) == (size in splits)
        assert all(str(one.inputs[1]) == ("B" if shared == 1 else "S(1)") for one in by_heads)
    proven(RULES[CPU], CPU, *_qkv(heads, shared), nd=False)


def test_one_head_of_keys_for_all_gathers_its_gradient():
    q, k, v = _qkv(4, 1)
    op = aten._scaled_dot_product_flash_attention_backward.default
    state, zero = torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    forward = aten._scaled_dot_product_flash_attention.default
    out, lse = forward(q, k, v)[:2]
    args = (values(4, 4, 5, 8, seed=5), q, k, v, out, lse, zero, zero, 5, 6, 0.0, False, state, zero)
    assert "S(1), S(1), B, B, S(1), S(1), B, B, B, B -> S(1), P(sum), P(sum)" in proven(RULES[op], op, *args)


def _calls(bias):
    """Forward and backward calls of every kernel that a CPU has not."""
    q, k, v = _qkv()
    grad, zero = values(4, 4, 5, 8, seed=5), torch.zeros((), dtype=torch.int64)
    flash, efficient = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention
    cudnn, other = (
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_fused_attention_overrideable,
    )
    result = flash.default(q, k, v)
    yield flash.default, (q, k, v)
    yield (
        aten._scaled_dot_product_flash_attention_backward.default,
        (grad, q, k, v, *result[:2], zero, zero, 5, 6, 0.0, False, zero, zero),
    )
    result = efficient.default(q, k, v, bias, True)
    yield efficient.default, (q, k, v, bias, True)
    if bias is not None:
        yield (
            aten._scaled_dot_product_efficient_attention_backward.default,
            (grad, q, k, v, bias, *result[:2], zero, zero, 0.0, [True] * 4),
        )
    result = cudnn.default(q, k, v, bias, True)
    yield cudnn.default, (q, k, v, bias, True)
    if bias is not None:
        yield (
            aten._scaled_dot_product_cudnn_attention_backward.default,
            (grad, q, k, v, *result[:2], zero, zero, bias, zero, zero, 5, 6, 0.0, False),
        )
    result = other.default(q, k, v, bias)
    yield other.default, (q, k, v, bias)
    if bias is not None:
        yield (
            aten._scaled_dot_product_fused_attention_overrideable_backward.default,
            (grad, q, k, v, bias, [True] * 4, *result[:2], zero, zero, 5, 6, 0.0, False, zero, zero),
        )


@pytest.mark.parametrize("mask", [None, (4, 4, 5, 6), (1, 1, 5, 6)])
def test_other_devices_split_batch_and_heads(mask):
    bias = None if mask is None else values(*mask, seed=3)
    for op, args in _calls(bias):
        found = proven(RULES[op], op, *args)
        heads = {one for one in found if one.startswith(("S(0), S(0), S(0)", "S(1), S(1), S(1)"))}
        assert len(heads) == 2, op
        assert all("S(2)" not in one for one in found)


def test_a_bias_for_all_heads_has_a_gradient_in_parts():
    op = aten._scaled_dot_product_efficient_attention_backward.default
    call = dict(_calls(values(1, 1, 5, 6, seed=3)))[op]
    found = proven(RULES[op], op, *call)
    assert "S(1), S(1), S(1), S(1), B, S(1), S(1), B, B -> S(1), S(1), S(1), P(sum)" in found


def test_dropout_splits_nothing():
    op = aten._scaled_dot_product_flash_attention.default
    call = describe(op, _qkv(), {"dropout_p": 0.5})
    assert RULES[op].signatures(call, 2, [()] * 3) == []


def test_the_mathematical_form():
    op = aten._scaled_dot_product_attention_math.default
    assert proven(RULES[op], op, *_qkv()) == {
        "S(0), S(0), S(0) -> S(0), S(0)", "S(1), S(1), S(1) -> S(1), S(1)", "S(2), B, B -> S(2), S(2)",
        "B, B, P(sum) -> P(sum), B",
    }  # fmt: skip
    assert "S(1), S(1), S(1) -> S(1), S(1)" in proven(
        RULES[op], op, *_qkv(4, 2), enable_gqa=True, axis_sizes=(2,)
    )
