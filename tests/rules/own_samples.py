"""Calls of ops that torch's samples do not make: attention, fused optimizers, and ops of other devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from monoflow.sbp.ops.attention import attention, attention_backward
from monoflow.sbp.ops.random import bits, normal, uniform
from tests.null.rule_trial import integers, values
from tests.rules.record import Sample

aten = torch.ops.aten


def own_samples() -> dict[Callable, list[Sample]]:
    """All of them, by op."""
    found: dict[Callable, list[Sample]] = {}
    for op, args, kwargs in itertools.chain(
        _logical_attention(),
        _kernels(),
        _optimizers(),
        _norms(),
        _resampling(),
        _indexing(),
        _elementwise(),
        _products(),
        _moves(),
        _draws(),
    ):
        found.setdefault(op, []).append(Sample(op, args, kwargs))
    return found


Call = tuple[Callable, tuple[Any, ...], dict[str, Any]]


def _qkv(heads: int = 4, shared: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return values(3, heads, 5, 8), values(3, shared, 6, 8, seed=1), values(3, shared, 6, 8, seed=2)


def _logical_attention() -> Iterator[Call]:
    for bias, is_causal in itertools.product(
        (None, values(3, 1, 5, 6, seed=3), values(4, 1, 6, seed=3)), (False, True)
    ):
        out, lse = attention(*_qkv(), bias, is_causal, 0.3)
        yield attention, (*_qkv(), bias, is_causal, 0.3), {}
        yield attention_backward, (values(3, 4, 5, 8, seed=5), *_qkv(), bias, out, lse, is_causal, 0.3), {}


def _kernels() -> Iterator[Call]:
    """torch's own kernels; those that a CPU has not need `kernels_as_maths`."""
    grad, none, count = values(3, 4, 5, 8, seed=5), torch.zeros((), dtype=torch.int64), (5, 6, 0.0)
    cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
    cpu_back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    flash, efficient = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention
    cudnn, other = (
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_fused_attention_overrideable,
    )
    for shared, causal in itertools.product((4, 2, 1), (False, True)):
        qkv = _qkv(4, shared)
        out, lse = cpu(*qkv, 0.0, causal)
        yield cpu, (*qkv, 0.0, causal), {}
        yield cpu_back, (grad, *qkv, out, lse, 0.0, causal), {}
        yield flash.default, (*qkv, 0.0, causal), {}
        tail = (none, none, *count, causal, none, none)
        yield aten._scaled_dot_product_flash_attention_backward.default, (grad, *qkv, out, lse, *tail), {}
        yield (
            aten._scaled_dot_product_attention_math.default,
            (*qkv, None, 0.0, causal),
            {"enable_gqa": shared != 4},
        )
    for mask in (values(3, 4, 5, 6, seed=3), values(3, 1, 5, 6, seed=3), values(5, 6, seed=3)):
        qkv = _qkv()
        yield cpu, qkv, {"attn_mask": mask if mask.ndim in (2, 4) else None}
        for op, more in ((efficient, (True,)), (cudnn, (True,)), (other, ())):
            yield op.default, (*qkv, mask, *more), {}
        wide = mask.expand(3, 4, 5, 6).contiguous() if mask.ndim == 2 else mask
        out, lse = efficient.default(*qkv, wide, True)[:2]
        back = aten._scaled_dot_product_efficient_attention_backward.default
        yield back, (grad, *qkv, wide, out, lse, none, none, 0.0, [True] * 4), {}
        out, lse = cudnn.default(*qkv, wide, True)[:2]
        tail = (none, none, wide, none, none, *count, False)
        yield aten._scaled_dot_product_cudnn_attention_backward.default, (grad, *qkv, out, lse, *tail), {}
        out, lse = other.default(*qkv, wide)[:2]
        tail = (none, none, *count, False, none, none)
        back = aten._scaled_dot_product_fused_attention_overrideable_backward.default
        yield back, (grad, *qkv, wide, [True] * 4, out, lse, *tail), {}


def _optimizers() -> Iterator[Call]:
    def lists(count: int) -> list[list[torch.Tensor]]:
        # fused kernels compute in the parameters' dtype, so double precision shows what is inexact
        return [[values(7, 3, seed=i).abs(), values(2, 5, seed=i + 9).abs()] for i in range(count)]

    steps = [torch.tensor(3.0), torch.tensor(5.0)]
    adam = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    sgd = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": True, "maximize": False}
    for name, amsgrad in itertools.product(("_fused_adam", "_fused_adamw"), (False, True)):
        given = (*lists(5 if amsgrad else 4), *([] if amsgrad else [[]]), steps)
        for overload, lr in (("default", 0.1), ("tensor_lr", torch.tensor(0.1))):
            yield getattr(getattr(aten, name), overload), given, {**adam, "lr": lr, "amsgrad": amsgrad}
    for overload, lr in (("default", 0.1), ("tensor_lr", torch.tensor(0.1))):
        yield getattr(aten._fused_sgd, overload), tuple(lists(3)), {**sgd, "lr": lr, "is_first_step": False}
        more = {"lr": lr, "lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
        yield getattr(aten._fused_adagrad, overload), (*lists(3), steps), more


def _norms() -> Iterator[Call]:
    x, weight = values(5, 3, 4), values(4, seed=1)
    _, rstd = aten._fused_rms_norm.default(x, [4], weight, 1e-5)
    yield aten._fused_rms_norm.default, (x, [4], weight, 1e-5), {}
    yield aten._fused_rms_norm.default, (x, [3, 4], None, None), {}
    back = aten._fused_rms_norm_backward.default
    yield back, (values(5, 3, 4, seed=3), x, [4], rstd, weight, [True, True]), {}
    for dim in (0, 2):
        g = values(*(5 if d == dim == 0 else 4 if d == dim else 1 for d in range(3)), seed=4)
        w, norms = aten._weight_norm_interface.default(x, g, dim)
        yield aten._weight_norm_interface.default, (x, g, dim), {}
        yield aten._weight_norm_interface_backward.default, (w, x, g, norms, dim), {}
    mean, var = values(3, seed=5), values(3, seed=6).abs() + 0.5
    affine = (values(3, seed=7), values(3, seed=8))
    yield aten._native_batch_norm_legit_no_training.default, (x, *affine, mean, var, 0.1, 1e-5), {}
    for training in (True, False):
        yield (
            aten._native_batch_norm_legit_functional.default,
            (x, *affine, mean, var, training, 0.1, 1e-5),
            {},
        )
    yield aten._native_batch_norm_legit.no_stats, (x, *affine, True, 0.1, 1e-5), {}
    for order in (1, 2, float("inf")):
        yield aten.dist.default, (x, values(3, 1, seed=9), order), {}
    for order in (1, 2, 3, float("inf")):
        yield aten.norm.Scalar, (x, order), {}
        yield aten.norm.ScalarOpt_dtype, (x, order), {"dtype": torch.float64}
        yield aten.norm.ScalarOpt_dim_dtype, (x, order, [1], True), {"dtype": torch.float64}


def _products() -> Iterator[Call]:
    x, y, matrix = values(5, 4), values(4, 7, seed=1), values(3, 4, 4)
    yield aten.mm.dtype, (x, y, torch.float64), {}
    yield aten.addmm.dtype, (values(7), x, y, torch.float64), {}
    x, y = values(3, 5, 4), values(3, 4, 7, seed=1)
    yield aten.bmm.dtype, (x, y, torch.float64), {}
    yield aten.baddbmm.dtype, (values(7), x, y, torch.float64), {}
    yield aten._linalg_eigvals.default, (matrix,), {}
    yield aten._conj_copy.default, (torch.complex(x, x.flip(0)),), {}


def _resampling() -> Iterator[Call]:
    image = values(3, 2, 6, 8)
    yield aten.affine_grid_generator.default, (values(5, 2, 3), [5, 2, 4, 3], False), {}
    op, back = aten._upsample_bicubic2d_aa, aten._upsample_bicubic2d_aa_backward.default
    yield op.default, (image, [4, 5], False), {}
    yield op.vec, (image, [4, 5], True, None), {}
    yield back, (values(3, 2, 4, 5), [4, 5], [3, 2, 6, 8], False), {}
    yield aten._upsample_bilinear2d_aa.vec, (image, [4, 5], False, None), {}
    for count, size in ((1, [5]), (2, [4, 5]), (3, [4, 5, 3])):
        op = getattr(aten, f"_upsample_nearest_exact{count}d").vec
        yield op, (values(3, 2, *(6, 8, 4)[:count]), size, None), {}
    yield aten.adaptive_max_pool1d.default, (values(3, 2, 8), [3]), {}
    yield aten.avg_pool1d.default, (values(3, 2, 8), [2]), {}
    yield aten.adaptive_avg_pool1d.default, (values(3, 2, 8), [3]), {}


def _indexing() -> Iterator[Call]:
    x, at = values(5, 3), integers(5, 4, 2)
    yield aten._unsafe_index.Tensor, (x, [at]), {}
    yield aten._unsafe_index.Tensor, (x, [None, integers(3, 4)]), {}
    yield aten._unsafe_index_put.default, (x, [at], values(4, 2, 3, seed=1), True), {}
    yield aten.isin.Tensor_Scalar, (integers(9, 5, 3), 4), {}
    yield aten._embedding_bag_forward_only.default, (x, integers(5, 7), torch.tensor([0, 2, 2])), {}
    yield aten.fill.Tensor, (x, values()), {}
    for reduce in ("add", "multiply"):
        yield aten.scatter.reduce, (x, 0, integers(5, 7, 3), values(7, 3, seed=1)), {"reduce": reduce}
        yield aten.scatter.value_reduce, (x, 0, integers(5, 7, 3), 1.5), {"reduce": reduce}
    offsets = torch.tensor([0, 2, 2])
    for mode in (0, 1):
        _, bag, size, maxima = aten._embedding_bag.default(x, integers(5, 7), offsets, False, mode)
        back = (values(3, 3, seed=2), integers(5, 7), bag, size, maxima, 5, False, mode, None)
        yield aten._embedding_bag_dense_backward.default, back, {}


def _elementwise() -> Iterator[Call]:
    """What `by_schema` does not guess: options, and numbers that are tensors."""
    x, y, one = values(5, 4), values(3, 6), values(seed=3)
    yield aten.clip.default, (x, -0.5, 1.0), {}
    yield aten.clip.Tensor, (x, x - 0.5, x + values(5, 4, seed=1)), {}
    yield aten.div.Scalar_mode, (x, 0.3), {"rounding_mode": "floor"}
    yield aten.div.Scalar_mode, (x, 0.3), {"rounding_mode": None}
    for name in ("add", "mul", "div"):
        yield getattr(aten, f"_foreach_{name}").Tensor, ([x, y], one), {}
    for name in ("addcmul", "addcdiv"):
        more = ([x + 1, y + 1], [x + 2, y + 2], torch.tensor([1.5, 2.5], dtype=torch.float64))
        yield getattr(aten, f"_foreach_{name}").Tensor, ([x, y], *more), {}
    yield aten.native_channel_shuffle.default, (values(3, 6, 4), 3), {}


def _moves() -> Iterator[Call]:
    x = values(6, 4)
    for name in ("_reshape_copy", "_reshape_alias_copy", "_reshape_alias"):
        op = getattr(getattr(aten, name, None), "default", None)
        if op is not None:
            yield op, (x, [12, 2]) if name == "_reshape_copy" else (x, [12, 2], [2, 1]), {}
    yield aten.slice_copy.Tensor, (x, 0, 2, 4), {}
    yield aten.split_copy.Tensor, (x, 2), {}
    yield aten.unsafe_split_with_sizes.default, (x, [2, 4]), {}
    yield aten.select_copy.int, (x, 0, 1), {}
    for name in ("concat", "concatenate"):
        yield getattr(aten, name).default, ([x, values(3, 4)],), {}
    for name in ("swapaxes", "swapdims"):
        yield getattr(aten, name).default, (values(2, 3, 4), 0, 2), {}
    for name in ("movedim", "moveaxis"):
        yield getattr(aten, name).int, (values(2, 3, 4), 0, 2), {}
        yield getattr(aten, name).intlist, (values(2, 3, 4), [0, 1], [2, 0]), {}
    yield aten.adjoint.default, (values(2, 3, 4),), {}
    yield aten.squeeze_copy.dims, (values(5, 1, 4, 1), [1, 3]), {}
    for op in (aten.view.dtype, aten.view_copy.dtype):
        yield op, (x, torch.int64), {}
        yield op, (x, torch.float32), {}
    yield aten.view_as_real_copy.default, (torch.complex(x, x.flip(0)),), {}
    yield aten.view_as_complex_copy.default, (values(5, 3, 2),), {}


def _draws() -> Iterator[Call]:
    key = torch.tensor(1234567)
    for op in (uniform, normal):
        yield op, (key, 3, [5, 4]), {"dtype": torch.float64}
    yield bits, (key, 3, [5, 4]), {}
