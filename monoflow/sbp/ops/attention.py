"""Scaled-dot-product attention as one logical op, forward and backward.

`attention(q, k, v, bias, is_causal, scale) -> (out, lse)` with q (batch, heads, Tq, D), k (batch, heads, Tk,
D), v (batch, heads, Tk, Dv); `bias`, broadcastable to (batch, heads, Tq, Tk), is added if it is floating and
says which pairs attend if it is bool; a causal mask is aligned to the upper left, as torch's. `lse` (batch,
heads, Tq) is the log-sum-exp of the scores in float32 (float64 for float64 inputs); a row in which nothing
attends gives out = 0 and lse = 0. Gradients: Dao et al., "FlashAttention", NeurIPS 2022, appendix B.2.
"""

from __future__ import annotations

import torch

from .library import LIBRARY

Tensor = torch.Tensor

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def additive_mask(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias as something to add to the scores: a bool mask becomes 0 and -inf of `dtype`."""
    if bias is None or bias.dtype != torch.bool:
        return bias
    zeros = torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    return zeros.masked_fill_(~bias, float("-inf"))


def _heads_inner(x: Tensor) -> Tensor:
    """`x` laid out as (batch, T, heads, D) in memory, as flash does: what a model's next reshape wants."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_like_heads_inner(x: Tensor, last: int) -> Tensor:
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, last).transpose(1, 2)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """torch's kernels do not look, and read out of bounds."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    same = k.shape[:2] == v.shape[:2] == q.shape[:2] and k.shape[2] == v.shape[2]
    assert q.dim() == k.dim() == v.dim() == 4 and same and q.shape[3] == k.shape[3], (
        f"attention wants (batch, heads, T, D) tensors of one batch, heads and keys, got {shapes}"
    )
    if bias is not None:
        scores = (*q.shape[:3], k.shape[2])
        pairs = zip(reversed(bias.shape), reversed(scores), strict=False)
        assert bias.dim() <= 4 and all(a in (1, b) for a, b in pairs), (
            f"a bias {list(bias.shape)} does not broadcast to the scores {list(scores)}"
        )


def _has_cpu_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Whether torch's flash kernel for CPU holds this case."""
    return (
        q.device.type == "cpu"
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        and all(x.numel() and x.stride(-1) == 1 for x in (q, k, v))
        and (bias is None or (bias.dim() in (2, 4) and _is_kernel_mask(bias.dtype, q.dtype)))
    )


def _is_kernel_mask(mask: torch.dtype, query: torch.dtype) -> bool:
    return mask in (torch.bool, query) or (mask == torch.float32 and query.itemsize == 2)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """The scaled and masked scores, in the dtype of the log-sum-exp."""
    kind = _lse_dtype(q.dtype)
    scores = torch.matmul(q.to(kind), k.to(kind).transpose(-2, -1)).mul_(scale)
    mask = additive_mask(bias, kind)
    if mask is not None:
        scores.add_(mask)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
        scores.masked_fill_(~causal, float("-inf"))
    return scores


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention_kernels(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _check_shapes(q, k, v, bias)
    if _has_cpu_kernel(q, k, v, bias):
        mask = additive_mask(bias, q.dtype)
        out, lse = _CPU(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        return _heads_inner(out), lse.contiguous()
    scores = _scores(q, k, bias, is_causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill_(lse == float("-inf"), 0.0)
    weights = scores.sub_(lse[..., None]).exp_()
    return _heads_inner(torch.matmul(weights, v.to(weights.dtype)).to(q.dtype)), lse


def attention_backward_kernels(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_shapes(q, k, v, bias)
    assert grad_out.shape == out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3], (
        f"out {list(out.shape)} and lse {list(lse.shape)} are not those of q {list(q.shape)}"
    )
    if _has_cpu_kernel(q, k, v, bias):
        mask = additive_mask(bias, q.dtype)
        # The kernel wants its own layout of lse (heads innermost) and rows of unit stride.
        inner = lse.transpose(1, 2).contiguous().transpose(1, 2)
        grads = _CPU_BACKWARD(
            grad_out.contiguous(), q, k, v, out, inner, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    else:
        grads = _math_backward(grad_out, q, k, v, bias, out, lse, is_causal, scale)
    return _heads_inner(grads[0]), _heads_inner(grads[1]), _heads_inner(grads[2])


def _math_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kind = lse.dtype
    weights = _scores(q, k, bias, is_causal, scale).sub_(lse[..., None]).exp_()
    grad = grad_out.to(kind)
    row = (grad * out).sum(-1, keepdim=True)
    grad_v = torch.matmul(weights.transpose(-2, -1), grad)
    grad_scores = torch.matmul(grad, v.to(kind).transpose(-2, -1)).sub_(row).mul_(weights).mul_(scale)
    grad_q = torch.matmul(grad_scores, k.to(kind))
    grad_k = torch.matmul(grad_scores.transpose(-2, -1), q.to(kind))
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool is_causal, float scale) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.define(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse,"
    " bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
LIBRARY.impl("attention", attention_kernels, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", attention_backward_kernels, "CompositeExplicitAutograd")


@torch.library.register_fake("monoflow::attention", lib=LIBRARY)
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _check_shapes(q, k, v, bias)
    lse = q.new_empty(q.shape[:-1], dtype=_lse_dtype(q.dtype))
    return _empty_like_heads_inner(q, v.shape[-1]), lse


@torch.library.register_fake("monoflow::attention_backward", lib=LIBRARY)
def _attention_backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty_like_heads_inner(q, q.shape[-1]),
        _empty_like_heads_inner(k, k.shape[-1]),
        _empty_like_heads_inner(v, v.shape[-1]),
    )


attention = torch.ops.monoflow.attention.default
attention_backward = torch.ops.monoflow.attention_backward.default


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, bias, ctx.is_causal, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, bias, out, lse)


def _autograd(ctx, grad_out: Tensor | None, grad_lse: Tensor | None):
    assert not ctx.needs_input_grad[3], "attention has no gradient for its bias: use torch's own form"
    if grad_out is None:
        return (None,) * 6
    q, k, v, bias, out, lse = ctx.saved_tensors
    grads = attention_backward(grad_out, q, k, v, bias, out, lse, ctx.is_causal, ctx.scale)
    return *grads, None, None, None


torch.library.register_autograd("monoflow::attention", _autograd, setup_context=_setup_context, lib=LIBRARY)
