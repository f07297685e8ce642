"""Rules of the logical attention op: batch, heads and, where no causal mask ties rows, the query's length.

Rows of the scores are independent, so a part of the queries with all keys gives its part of the output;
going back it gives its part of the sums over queries that the gradients of keys and values are. The keys'
length cannot be split: the soft-max normalizes over it. The backward op is linear in the output's gradient
while the output itself, which stands beside it, is whole.
"""

from __future__ import annotations

from collections.abc import Callable

from ..layout import B, P
from ..ops.attention import attention, attention_backward
from ..registry import Forms, OpRule, letters
from ..signature import OpCall, Signature, TensorMeta


def _bias_letters(bias: TensorMeta | None, scores: tuple[int, ...], queries: str) -> str:
    """One letter per dim of the bias; a dim that broadcasts is not split."""
    if bias is None:
        return ""
    names = f"bh{queries}_"[4 - len(bias.shape) :]
    sizes = scores[4 - len(bias.shape) :]
    kept = [c if extent == size else "_" for c, extent, size in zip(names, bias.shape, sizes, strict=True)]
    return "".join(kept) + ","


def _forward(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    q, k, _, bias, is_causal, _ = call.args
    queries = "_" if is_causal else "q"
    mask = _bias_letters(bias, (*q.shape[:3], k.shape[2]), queries)
    inputs = f"bh{queries}_,bh__,bh__,{mask}".removesuffix(",")
    found = letters(call, axis_size, forms, f"{inputs}->bh{queries}_,bh{queries}")
    others = (B,) * (len(call.inputs) - 3)
    return [*found, Signature((B, B, P, *others), (P, B))]  # the scores do not know the values


def _backward(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    _, q, k, _, bias, _, _, is_causal, _ = call.args
    queries = "_" if is_causal else "q"
    mask = _bias_letters(bias, (*q.shape[:3], k.shape[2]), queries)
    rows = f"bh{queries}_"
    # letters() reads a letter that is missing in an output as contracted, which it is for dk and dv.
    spec = f"{rows},{rows},bh__,bh__,{mask}{rows},bh{queries}->{rows},bh__,bh__"
    return letters(call, axis_size, forms, spec, linear=[(0,)])


RULES: dict[Callable, OpRule] = {attention: OpRule(_forward), attention_backward: OpRule(_backward)}
