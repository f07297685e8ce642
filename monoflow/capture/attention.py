"""Keep scaled-dot-product attention one logical op while a step is captured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..sbp.ops.attention import additive_mask, attention

Tensor = torch.Tensor


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` as `monoflow::attention` where that op holds the call.

    A call that it cannot hold (dropout, a mask that needs a gradient, sizes that broadcast) becomes torch's
    own mathematical form, which traces to primitive ops.
    """
    if enable_gqa and query.dim() >= 3:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if not _is_logical(query, key, value, attn_mask, dropout_p, is_causal):
        mask = additive_mask(attn_mask, query.dtype)
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale
        )[0]
    lead = query.shape[:-3]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    mask = None if attn_mask is None else _mask_to_4d(attn_mask, lead)
    out, _ = attention(_to_4d(query), _to_4d(key), _to_4d(value), mask, is_causal, factor)
    return out if query.dim() == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def _is_logical(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool
) -> bool:
    """Whether the logical op computes exactly this call. What torch refuses, torch's own form refuses."""
    tensors = (query, key, value)
    if dropout_p > 0 or any(x.dim() < 3 or x.dim() != query.dim() for x in tensors):
        return False
    if any(x.dtype != query.dtype or not x.is_floating_point() or x.is_nested for x in tensors):
        return False
    if key.shape[:-2] != query.shape[:-2] or value.shape[:-1] != key.shape[:-1]:
        return False
    if query.shape[-1] != key.shape[-1] or query.shape[-1] == 0:
        return False
    if mask is None:
        return True
    scores = (*query.shape[:-1], key.shape[-2])
    return (
        not is_causal
        and not mask.requires_grad
        and mask.dtype in (torch.bool, torch.float32, query.dtype)
        and _broadcasts(mask.shape, scores)
    )


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return 2 <= len(shape) <= len(target) and all(a in (1, b) for a, b in pairs)


def _to_4d(x: Tensor) -> Tensor:
    """(..., heads, T, D) as (batch, heads, T, D)."""
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _mask_to_4d(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """The mask with the four dims of the op, size 1 where it broadcasts."""
    mask = mask.reshape(*(1,) * max(0, 4 - mask.dim()), *mask.shape)
    if mask.dim() == 4 and len(lead) <= 1:
        return mask
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return _to_4d(mask.expand(*lead, *mask.shape[-3:]))
