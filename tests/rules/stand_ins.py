"""Kernels that a CPU has not, in their mathematical form, to prove rules of them here.

A rule speaks of a signature, not of a kernel: out = softmax(q k^T scale + bias) v, with a log-sum-exp in the
layout that the kernel has (the efficient attention pads it to 32 rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from monoflow.sbp.rules.normalization import rms_norm_backward_expand

Tensor = torch.Tensor
_PREFIX = "_scaled_dot_product_"


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; heads of keys are shared by equal groups of heads of queries."""
    shared = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = _scores(q, k, bias, is_causal, scale)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> list[Tensor | None]:
    """Gradients of q, k, v and the bias (Dao et al. 2022, appendix B.2); those of shared heads are sums."""
    shared, heads = q.shape[1] // max(k.shape[1], 1), k.shape[1]
    keys, values = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    weights = _scores(q, keys, bias, is_causal, scale).softmax(-1)
    inner = grad @ values.mT
    scores = weights * (inner - (inner * weights).sum(-1, keepdim=True))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    grad_k = (scores.mT @ q * factor).unflatten(1, (heads, shared)).sum(2)
    grad_v = (weights.mT @ grad).unflatten(1, (heads, shared)).sum(2)
    return [scores @ keys * factor, grad_k, grad_v, None if bias is None else scores.sum_to_size(bias.shape)]


def _counter(q: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=q.device)


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None) -> Any:
    out, lse = _forward(q, k, v, None, is_causal, scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], state, _counter(q), q.new_empty(0)


def _flash_backward(
    grad_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
) -> Any:
    return tuple(_backward(grad_out, q, k, v, None, is_causal, scale)[:3])


def _efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None) -> Any:
    out, lse = _forward(q, k, v, bias, is_causal, scale)
    rows = -(-q.shape[2] // 32) * 32 if compute_log_sumexp else 0
    padded = lse.new_full([*lse.shape[:2], rows], math.inf)
    padded[..., : lse.shape[2]] = lse[..., :rows]
    return out, padded, _counter(q), _counter(q)


def _efficient_backward(
    grad_out,
    q,
    k,
    v,
    bias,
    out,
    lse,
    seed,
    offset,
    dropout_p,
    grad_input_mask,
    is_causal=False,
    *,
    scale=None,
) -> Any:
    found = _backward(grad_out, q, k, v, bias, is_causal, scale)
    return tuple(one if asked else None for one, asked in zip(found, grad_input_mask, strict=True))


def _cudnn(
    q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> Any:
    out, lse = _forward(q, k, v, bias, is_causal, scale)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], _counter(q), _counter(q), None


def _cudnn_backward(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    seed,
    offset,
    bias,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
) -> Any:
    return tuple(_backward(grad_out, q, k, v, bias, is_causal, scale)[:3])


def _overrideable(
    q, k, v, bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> Any:
    out, lse = _forward(q, k, v, bias, is_causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], _counter(q), _counter(q), None


def _overrideable_backward(
    grad_out, q, k, v, bias, grad_input_mask, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal,
    seed, offset, *, scale=None,
) -> Any:  # fmt: skip
    found = _backward(grad_out, q, k, v, bias, is_causal, scale)
    return tuple(one if asked else None for one, asked in zip(found, grad_input_mask, strict=True))


_STAND_INS = {
    "flash_attention": (_flash, _flash_backward),
    "efficient_attention": (_efficient, _efficient_backward),
    "cudnn_attention": (_cudnn, _cudnn_backward),
    "fused_attention_overrideable": (_overrideable, _overrideable_backward),
}


def _wide(name: str) -> Callable:
    """A product whose result has a dtype of its own: of factors in that dtype."""
    op = getattr(torch.ops.aten, name).default
    if "add" in name:
        return lambda c, a, b, dtype, *, beta=1, alpha=1: op(
            c.to(dtype), a.to(dtype), b.to(dtype), beta=beta, alpha=alpha
        )
    return lambda a, b, dtype: op(a.to(dtype), b.to(dtype))


_FORMS: dict[str, Callable] = {
    **{f"{_PREFIX}{name}": forms[0] for name, forms in _STAND_INS.items()},
    **{f"{_PREFIX}{name}_backward": forms[1] for name, forms in _STAND_INS.items()},
    **{f"{name}.dtype": _wide(name) for name in ("mm", "bmm", "addmm", "baddbmm")},
    "_fused_rms_norm_backward": rms_norm_backward_expand,
}

#: The ops that are proven in another form than their own: no kernel runs on a CPU.
PROVEN_AS_MATHS = frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in _FORMS)


@contextmanager
def kernels_as_maths() -> Iterator[None]:
    """While open, the kernels of other devices run on CPU tensors."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, form in _FORMS.items():
            library.impl(name, form, "CPU")
        yield
