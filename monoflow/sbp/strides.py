"""How an op runs on shards that lie otherwise in memory than the tensors it was captured on.

A step is captured on tensors that suit its kernels; a rank's shard, moved in one layout and viewed in
another, may be strided. Most kernels do not mind. Views that need no copy on the whole may need one on a
shard, and some kernels read what is strided as if it were not, without a word, or refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .registry import aten
from .signature import LocalOp

#: Reshape copies only when it must.
RESHAPES: Mapping[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}

_FUSED = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
#: Kernels that take their inputs for contiguous.
CONTIGUOUS = frozenset(
    aten(
        "native_group_norm", "native_group_norm_backward",
        "_weight_norm_interface", "_weight_norm_interface_backward",
        "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
        "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
        "_pdist_forward", "_pdist_backward", "_linalg_det", "_linalg_slogdet",
        "view_as_complex", "view_as_complex_copy", "view.dtype", "view_copy.dtype",
        "as_strided", "as_strided_copy", "as_strided_scatter",
        "_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_dense_backward",
        "_embedding_bag_per_sample_weights_backward", "nll_loss2d_forward", "nll_loss2d_backward",
        "isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
        *_FUSED, *(f"{name}.tensor_lr" for name in _FUSED),
    )
)  # fmt: skip


def on_shards(op: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalOp:
    """The call that is right for shards of any strides."""
    if op in CONTIGUOUS:
        return on_contiguous, (op, *args), kwargs
    return RESHAPES.get(op, op), args, kwargs


def on_contiguous(op: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs an op on contiguous tensors."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
    return op(*args, **kwargs)
