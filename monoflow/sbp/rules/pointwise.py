"""Pointwise ops with broadcasting: every dim splits; what differs is in which inputs an op is linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_lowercase

import torch

from ..layout import Split, canonical, fits
from ..registry import Forms, OpRule, aten, letters
from ..signature import OpCall, Signature
from .common import argument, broadcast_letters, linear_signature, tensor_names

#: Of one call: the groups of argument names in which the op is jointly linear.
Linearity = Callable[[OpCall], Sequence[Sequence[str]]]


def pointwise_signatures(linearity: Linearity, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """Splits of every dim of the (broadcast) result, and P(sum) where the op is linear."""
    whole = max((out.shape for out in call.outputs if out is not None), key=len)
    group = "".join(
        "_" if extent == 1 else letter for extent, letter in zip(whole, ascii_lowercase, strict=False)
    )
    ins = [broadcast_letters(meta.shape, group, whole) for meta in call.inputs]
    outs = ["-" if out is None else broadcast_letters(out.shape, group, whole) for out in call.outputs]
    found = letters(call, axis_size, forms, f"{','.join(ins)}->{','.join(outs)}")
    names = tensor_names(call)
    for linear in linearity(call):
        chosen = [i for i, name in enumerate(names) if name in linear]
        if chosen and _sums_survive(call, chosen):
            found.append(linear_signature(call, chosen))
    return found


def _sums_survive(call: OpCall, chosen: Sequence[int]) -> bool:
    """Whether the parts of a sum can go through the op: not as truth values, and not to a narrower dtype."""
    outs = [out.dtype for out in call.outputs if out is not None]
    return all(_holds(out, call.inputs[i].dtype) for out in outs for i in chosen)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    if torch.bool in (wide, narrow):
        return False
    if narrow.is_floating_point or narrow.is_complex:
        return torch.promote_types(wide, narrow) == wide
    return wide.is_floating_point or wide.is_complex or wide.itemsize >= narrow.itemsize


def _never(call: OpCall) -> Sequence[Sequence[str]]:
    return ()


def _always(groups: Sequence[Sequence[str]], call: OpCall) -> Sequence[Sequence[str]]:
    return groups


def _sum_of_tensors(call: OpCall) -> Sequence[Sequence[str]]:
    """add and sub are linear in their tensors together; a Python number would be added once per rank."""
    return [("self", "other")] if len(call.inputs) == 2 else ()


def _true_division(call: OpCall) -> Sequence[Sequence[str]]:
    return [("self",)] if argument(call, "rounding_mode") is None else ()


def _fill_of_zero(call: OpCall) -> Sequence[Sequence[str]]:
    return [("self",)] if argument(call, "value") == 0 else ()


def _halves(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    """glu and its backward: the dim that holds two halves splits within each half."""
    rank = len(call.inputs[-1].shape)
    dim = argument(call, "dim") % rank
    group = "".join("_" if d == dim else ascii_lowercase[d] for d in range(rank))
    found = letters(call, axis_size, forms, ",".join([group] * len(call.inputs)) + "->" + group)
    backward = len(call.inputs) == 2
    size = call.inputs[-1].shape[dim]
    half, both = Split(dim), Split(dim, 2)
    if fits(size, both, axis_size) and fits(size // 2, half, axis_size):
        half = canonical(size // 2, half, axis_size)
        found.append(Signature((half, both), (both,)) if backward else Signature((both,), (half,)))
    return [*found, linear_signature(call, (0,))] if backward else found


_IDENTITIES = ["clone", "alias", "detach", "lift_fresh", "lift_fresh_copy", "_to_copy", "positive", "neg"]
_LINEARITY: dict[Linearity, list[str]] = {
    partial(_always, [("self",)]): [
        *_IDENTITIES, "mul.Scalar", "div.Scalar", "deg2rad", "rad2deg", "conj_physical", "_conj_physical",
    ],
    partial(_always, [("src",)]): ["copy"],
    partial(_always, [("abs",)]): ["polar"],
    partial(_always, [("self",)]): ["ldexp.Tensor"],
    partial(_always, [("self",), ("other",)]): ["mul.Tensor"],
    partial(_always, [("self",)]): ["div.Tensor", "true_divide.Tensor"],
    _true_division: ["div.Tensor_mode", "div.Scalar_mode"],
    _sum_of_tensors: ["add.Tensor", "sub.Tensor", "rsub.Tensor"],
    partial(_always, [("self", "other")]): ["where.self"],
    partial(_always, [("self", "end")]): ["lerp.Scalar", "lerp.Tensor"],
    partial(_always, [("self", "tensor1"), ("self", "tensor2")]): ["addcmul"],
    partial(_always, [("self", "tensor1")]): ["addcdiv"],
    partial(_always, [("self", "value")]): ["masked_fill.Tensor"],
    _fill_of_zero: ["masked_fill.Scalar"],
    partial(_always, [("real", "imag")]): ["complex"],
    partial(_always, [("grad_output",)]): [
        "gelu_backward", "tanh_backward", "sigmoid_backward", "silu_backward", "threshold_backward",
        "hardtanh_backward", "softplus_backward", "elu_backward", "leaky_relu_backward",
        "hardswish_backward", "hardsigmoid_backward", "mish_backward", "logit_backward",
        "softshrink_backward", "log_sigmoid_backward", "native_dropout_backward",
        "_prelu_kernel_backward", "rrelu_with_noise_backward",
    ],
    partial(_always, [("grad_out",)]): ["hardshrink_backward"],
    _never: [
        "hardswish", "log_sigmoid_forward", "floor_divide", "floor_divide.Scalar", "_prelu_kernel",
        "softplus", "isreal", "heaviside", "clamp_min", "clamp_max", "bitwise_not",
    ],
}  # fmt: skip


#: Everything else that is pointwise: by name, all functional overloads that torch marks so. (torch's mark
#: alone is not enough to go by: it is on `equal` and `rrelu`, and missing on many backward ops.)
_OTHERS = """
    __lshift__ __rshift__ __xor__ abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp
    clamp_max clamp_min clip copysign cos cosh digamma div elu eq erf erfc erfinv exp exp2 expm1 float_power
    floor fmax fmin fmod frac frexp gcd ge gelu gt hardshrink hardsigmoid hardtanh heaviside hypot i0 igamma
    igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lgamma log log10 log1p log2
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill max maximum min
    minimum mish mul mvlgamma nan_to_num ne nextafter polygamma pow reciprocal relu relu6 remainder round
    rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_airy_ai
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr
    special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1
    special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta sqrt
    square sub tan tanh threshold trunc where xlogy
"""


def _tagged(name: str) -> list[torch._ops.OpOverload]:
    """The functional overloads of an ATen op that torch marks as pointwise; none if it has no such op."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return []
    overloads = [getattr(packet, one) for one in packet.overloads()]
    return [op for op in overloads if torch.Tag.pointwise in op.tags and not op._schema.is_mutable]


def _rule(linearity: Linearity) -> OpRule:
    return OpRule(partial(pointwise_signatures, linearity))


RULES: dict[Callable, OpRule] = {op: _rule(_never) for name in _OTHERS.split() for op in _tagged(name)}
RULES |= {op: _rule(linearity) for linearity, names in _LINEARITY.items() for op in aten(*names)}
RULES |= {op: OpRule(_halves) for op in aten("glu", "glu_backward")}
