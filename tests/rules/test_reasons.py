"""Reasons are given for what they are about, and for nothing else."""

import pytest

from tests.rules.reasons import reason


@pytest.mark.parametrize(
    ("op", "signature", "fact"),
    [
        ("aten._fused_adamw.default", "S(0), B -> S(0), B", "one op a tensor"),
        ("aten._scaled_dot_product_fused_attention_overrideable.default", "S(3) -> S(3)", "as wide"),
        ("aten._foreach_add.List", "S(0), B -> S(0), B", "one op a tensor"),
        ("aten.convolution_backward.default", "B, P(sum), B -> B, P(sum), B", "never partial"),
        ("aten.as_strided.default", "S(0) -> B", "these sizes"),
        ("monoflow.attention.default", "B, B, S(3) -> S(3), B", "as wide as keys"),
    ],
)
def test_known(op: str, signature: str, fact: str) -> None:
    assert fact in (reason(op, signature) or "")


@pytest.mark.parametrize(
    ("op", "signature"),
    [
        ("aten.mm.default", "S(0), B -> S(0)"),
        ("aten.convolution_backward.default", "S(0), S(0), B -> S(0), P(sum), P(sum)"),
        ("aten._embedding_bag.default", "S(0), B, B -> P(sum), B, B, B"),
        ("monoflow.attention.default", "S(1), S(1), S(1) -> S(1), S(1)"),
    ],
)
def test_no_excuse(op: str, signature: str) -> None:
    assert reason(op, signature) is None
