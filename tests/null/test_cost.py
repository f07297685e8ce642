"""What calls cost: amounts of work by hand, the roofline, and measured curves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monoflow.boxing.curve import Curve
from monoflow.boxing.route import LinkCost
from monoflow.plan.cost import REFERENCE, Device, Machine, curve_key, op_seconds
from monoflow.plan.op_class import OpClass, amount_of, class_of
from monoflow.sbp.signature import TensorMeta

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = F32) -> TensorMeta:
    return TensorMeta(shape, dtype)


def amount(op: Callable, inputs: list[Any], outputs: list[Any], args: tuple[Any, ...] = ()) -> float:
    return amount_of(op, class_of(op), inputs, outputs, args)


def test_products_count_two_flops_a_term() -> None:
    left, right = meta(3, 5), meta(5, 7)
    assert amount(aten.mm.default, [left, right], [meta(3, 7)]) == 2 * 3 * 5 * 7
    assert amount(aten.addmm.default, [meta(7), left, right], [meta(3, 7)]) == 2 * 3 * 5 * 7
    assert amount(aten.bmm.default, [meta(2, 3, 5), meta(2, 5, 7)], [meta(2, 3, 7)]) == 2 * 2 * 3 * 5 * 7
    added = [meta(2, 3, 7), meta(2, 3, 5), meta(2, 5, 7)]
    assert amount(aten.baddbmm.default, added, [meta(2, 3, 7)]) == 2 * 2 * 3 * 5 * 7
    assert amount(aten.mv.default, [left, meta(5)], [meta(3)]) == 2 * 3 * 5
    assert amount(aten.dot.default, [meta(5), meta(5)], [meta()]) == 2 * 5
    weight = [meta(2, 3, 5), meta(7, 5), meta(7)]
    assert amount(aten.linear.default, weight, [meta(2, 3, 7)]) == 2 * 2 * 3 * 5 * 7


def test_convolutions_count_groups_and_only_the_gradients_asked_for() -> None:
    image, weight, out = meta(2, 6, 8, 8), meta(4, 3, 3, 3), meta(2, 4, 8, 8)  # two groups
    flags = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
    once = 2 * out.numel * 3 * 9
    assert amount(aten.convolution.default, [image, weight], [out], (image, weight, None, *flags)) == once
    args = (out, image, weight, None, *flags, [True, True, False])
    grads = [image, weight, None]
    assert amount(aten.convolution_backward.default, [out, image, weight], grads, args) == 2 * once
    grads = [None, weight, None]
    assert amount(aten.convolution_backward.default, [out, image, weight], grads, args) == once


def test_transposed_convolutions_multiply_every_input_element() -> None:
    image, weight, out = meta(2, 6, 4, 4), meta(6, 5, 3, 3), meta(2, 5, 9, 9)
    flags = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    expected = 2 * image.numel * 5 * 9
    assert amount(aten.convolution.default, [image, weight], [out], (image, weight, None, *flags)) == expected


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    query, key, value = meta(2, 4, 8, 16), meta(2, 4, 10, 16), meta(2, 4, 10, 32)
    pairs = 2 * 4 * 8 * 10
    out, lse = meta(2, 4, 8, 32), meta(2, 4, 8)
    attention = torch.ops.monoflow.attention.default
    assert amount(attention, [query, key, value], [out, lse]) == 2 * pairs * (16 + 32)
    backward = torch.ops.monoflow.attention_backward.default
    inputs = [out, query, key, value, out, lse]
    assert amount(backward, inputs, [query, key, value]) == 2 * pairs * (3 * 16 + 2 * 32)


def test_calls_that_cost_more_than_their_class_have_their_own_where_it_was_measured() -> None:
    from_class = {"stream": Curve(((1.0, 1.0),)), "spread": Curve(((1.0, 5.0),))}
    curves = from_class | {
        "convolution_backward/float32": Curve(((1.0, 1.0),)),
        "strided_convolution_backward/float32": Curve(((1.0, 7.0),)),
        "product/float32": Curve(((1.0, 1e-9),)),
        "factors": Curve(((1.0, 3.0),)),
    }
    device = Device("", {"float32": 1.0}, 1.0, 0.0, 1, curves)
    image, channels, row = meta(2, 3, 8, 8), meta(3, 1, 1), meta(8)
    for op in (aten.mul.Tensor, aten.add.Tensor):
        assert op_seconds(op, [image, channels], [image], device) == 5 * image.numel
        assert op_seconds(op, [image, row], [image], device) == image.num_bytes * 2 + row.num_bytes
        assert op_seconds(op, [image, meta()], [image], device) == image.num_bytes * 2 + 4
    weight = meta(3, 3, 3, 3)
    for stride, factor in (([1, 1], 1), ([2, 2], 7)):
        flags = (None, stride, [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        args, grads = (image, image, weight, *flags), [image, weight, None]
        flops = amount(aten.convolution_backward.default, [image, image, weight], grads, args)
        found = op_seconds(aten.convolution_backward.default, [image, image, weight], grads, device, args)
        assert found == factor * flops
    few = [meta(4, 64), meta(64, 64)]
    assert op_seconds(aten.mm.default, few, [meta(4, 64)], device) == 3 * 4 * (2 * 4 * 64 + 64 * 64)


def test_what_moves_memory_counts_its_bytes() -> None:
    one = meta(4, 8)
    assert amount(aten.add.Tensor, [one, one], [one]) == 3 * 4 * 8 * 4
    assert amount(aten.add.Tensor, [meta(4, 8, dtype=BF16)] * 2, [meta(4, 8, dtype=BF16)]) == 3 * 4 * 8 * 2
    # Of a table only the rows that are read.
    index = meta(3, dtype=torch.int64)
    assert amount(aten.embedding.default, [meta(1000, 8), index], [meta(3, 8)]) == 2 * 3 * 8 * 4
    # The gradient's table is filled and read once, what is added three times.
    grads = amount(aten.embedding_dense_backward.default, [meta(3, 8), index], [meta(1000, 8)])
    assert grads == 1000 * 8 * 4 + 3 * 3 * 8 * 4
    whole = meta(10, 8)
    put = amount(aten.index_add.default, [whole, index, meta(3, 8)], [whole])
    assert put == 2 * 10 * 8 * 4 + 3 * 3 * 8 * 4
    assert amount(aten.tanh.default, [one], [one]) == 32


def test_an_update_is_priced_alike_in_place_and_not() -> None:
    assert (
        class_of(aten._fused_adamw.tensor_lr) is class_of(aten._fused_adamw_.tensor_lr) is OpClass.OPTIMIZER
    )


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (aten.view.default, OpClass.FREE),
        (aten.t.default, OpClass.FREE),
        (operator.getitem, OpClass.FREE),
        (aten.sum.dim_IntList, OpClass.REDUCTION),
        (aten._softmax.default, OpClass.SOFTMAX),
        (aten.native_layer_norm_backward.default, OpClass.NORM),
        (aten.clone.default, OpClass.STREAM),
        (aten._to_copy.default, OpClass.CONVERT),
        (torch.ops.monoflow.uniform.default, OpClass.RANDOM),
        (len, OpClass.STREAM),
    ],
)
def test_classes(op: Callable, kind: OpClass) -> None:
    assert class_of(op) is kind


DEVICE = Device("test", {"float32": 1e9, "bfloat16": 4e9}, 1e8, 1e-6, 10**9)


def test_the_roofline_is_arithmetic_or_memory_and_a_launch() -> None:
    square = meta(100, 100)
    product = op_seconds(aten.mm.default, [square, square], [square], DEVICE)
    assert product == pytest.approx(1e-6 + 2e6 / 1e9)  # memory: 1.2e5 bytes, 1.2 ms
    thin = [meta(1, 100), square]
    assert op_seconds(aten.mm.default, thin, [meta(1, 100)], DEVICE) == pytest.approx(1e-6 + 40800 / 1e8)
    half = meta(1000, 1000, dtype=BF16)
    fast = op_seconds(aten.mm.default, [half, half], [half], DEVICE)
    assert fast == pytest.approx(1e-6 + 2e9 / 4e9)
    double = meta(1000, 1000, dtype=torch.float64)  # no rate of its own: the slowest
    assert op_seconds(aten.mm.default, [double] * 2, [double], DEVICE) == pytest.approx(1e-6 + 2e9 / 1e9)
    assert op_seconds(aten.add.Tensor, [square, square], [square], DEVICE) == pytest.approx(
        1e-6 + 1.2e5 / 1e8
    )


def test_views_and_getitem_cost_nothing() -> None:
    assert op_seconds(aten.view.default, [meta(4)], [meta(2, 2)], DEVICE) == 0
    assert op_seconds(operator.getitem, [meta(4)], [meta(4)], DEVICE) == 0


def test_absent_tensors_are_left_out() -> None:
    one = meta(25)
    whole = op_seconds(aten.add.Tensor, [one, None, one], [one, None], DEVICE)
    assert whole == pytest.approx(1e-6 + 300 / 1e8)


def test_measured_curves_come_first() -> None:
    curves = {
        curve_key(OpClass.PRODUCT, F32): Curve(((1e3, 1e-5), (1e6, 1e-3))),
        "stream": Curve(((10.0, 2e-6),)),
        "free": Curve(((1.0, 3e-6),)),
    }
    device = Device("measured", {"float32": 1e9}, 1e12, 0.0, 1, curves)
    small, large = meta(5, 5), meta(100, 100)
    assert op_seconds(aten.mm.default, [small, small], [small], device) == pytest.approx(6e-5)  # as memory
    assert op_seconds(aten.mm.default, [large, large], [large], device) == pytest.approx(0.024)
    wide = Device("wide", {"float32": 1e9}, 1e12, 0.0, 1, {"product/float32": curves["product/float32"]})
    assert op_seconds(aten.mm.default, [large, large], [large], wide) == pytest.approx(2e-3)
    assert op_seconds(aten.mul.Tensor, [meta(1), meta(1)], [meta(1)], device) == pytest.approx(2.4e-6)
    assert op_seconds(aten.view.default, [meta(4)], [meta(2, 2)], device) == 3e-6
    assert op_seconds(operator.getitem, [meta(4)], [meta(4)], device) == 0
    half = [meta(10, 10, dtype=BF16)] * 2
    assert op_seconds(aten.mm.default, half, [meta(10, 10, dtype=BF16)], wide) == pytest.approx(2e3 / 1e9)


def test_a_curve_goes_through_its_points_and_bends_by_logarithms() -> None:
    curve = Curve(((1e2, 1e-6), (1e4, 1e-4), (1e5, 1e-3)))
    assert [curve.seconds(x) for x in (1.0, 1e2, 1e4, 1e5)] == pytest.approx([1e-6, 1e-6, 1e-4, 1e-3])
    assert curve.seconds(1e3) == pytest.approx(1e-5)
    assert curve.seconds(3e5) == pytest.approx(3e-3)


def test_measured_curves_never_fall() -> None:
    curve = Curve.through({1e4: 5e-5, 1e2: 3e-6, 1e3: 9e-5, 1e5: 2e-4})
    assert curve.points == ((1e2, 3e-6), (1e3, 5e-5), (1e4, 5e-5), (1e5, 2e-4))


@pytest.mark.parametrize(
    ("points", "facts"),
    [
        ((), "positive and ascending, got \\[\\]"),
        (((2.0, 1.0), (1.0, 1.0)), "ascending, got \\[2.0, 1.0\\]"),
        (((0.0, 1.0),), "positive and ascending, got \\[0.0\\]"),
        (((1.0, 0.0),), "seconds must be positive"),
    ],
)
def test_curves_that_are_none(points: tuple, facts: str) -> None:
    with pytest.raises(ValueError, match=facts):
        Curve(points)


def test_a_link_takes_a_kinds_own_curve() -> None:
    link = LinkCost(1.0, 0.5, 0.0, (("all_gather", Curve(((10.0, 7.0),))),))
    assert link.seconds("all_gather", 20) == 14.0
    assert link.seconds("all_reduce", 20) == 2.0 + 10.0
    assert link.seconds("slice", 20) == 0.0


def test_a_machine_of_one_link_has_it_on_every_axis() -> None:
    assert REFERENCE.on(3).links == REFERENCE.links * 3
    two = Machine(DEVICE, (LinkCost(1.0), LinkCost(2.0)))
    assert two.on(2) is two
    with pytest.raises(AssertionError, match="2 links for 3 axes"):
        two.on(3)
