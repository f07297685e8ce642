"""Why a signature that is exact is left out of a rule: by op, and by a part of the signature's text."""

from __future__ import annotations

import re

_LISTS = "capture takes lists apart: one op a tensor"
_PARAMETER = "linear in parameters or in what forward saved, which are never partial"
_VALUES = "exact for these values only"
_SIZES = "exact for these sizes only: windows or strides that meet no edge"
_NOTHING = "the values mean nothing"
_OVERWRITTEN = "exact only where every element is overwritten"

#: (pattern of ops, pattern of signatures, reason); the first that fits counts.
_REASONS: list[tuple[str, str, str]] = [
    (r"_foreach_|\._fused_(ada|sgd)", "", _LISTS),
    (r"\.(new_)?empty", "", _NOTHING),
    (
        r"_embedding_bag.*backward",
        r"S\(0\)",
        "splits of indices have no forward; what a mode does not read may split",
    ),
    (r"_embedding_bag.*backward", r"P\(sum\) -> P", _PARAMETER),
    (r"batch_norm|group_norm|layer_norm|rms_norm|prelu", r"P\(sum\).*->", _PARAMETER),
    (r"(convolution|grid_sampler_\dd|attention)\w*_backward", r"P\(sum\).*->", _PARAMETER),
    (r"attention", r"S\(3\)", "kernels want values as wide as keys"),
    (r"pool|as_strided|slice|unfold", "", _SIZES),
    (r"shift", "", "integers: a product modulo a power of two, of what is never partial"),
    (r"index_copy|scatter\.src|masked_scatter|index_fill", "", _OVERWRITTEN),
    (r"isin", "", "whether, not how often: P(max) is listed"),
    (r"isnan|nan_to_num|nansum|where|copysign|aten\.(any|all|eye)\b", "", _VALUES),
    (r"nextafter", "", "the next number is the number, to rounding"),
    (r"xlogy|xlog1py", "", "0 times an infinite logarithm is 0 as a whole and NaN in parts"),
    (r"_loss_backward", "", "linear in a difference that forward needs whole"),
    (r"_to_copy", "", "sums of narrowed parts round more than the narrowed sum"),
]


def reason(op: str, signature: str) -> str | None:
    """The reason for leaving one signature of one op out, or None."""
    for ops, signatures, why in _REASONS:
        if re.search(ops, op) and re.search(signatures, signature):
            return why
    return None
