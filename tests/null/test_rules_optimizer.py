"""Rules of fused and foreach optimizer ops."""

import pytest
import torch

from monoflow.sbp.rules.optimizer import RULES
from tests.null.rule_trial import holds, proven, values

aten = torch.ops.aten
ADAM = [
    aten._fused_adamw.default,
    aten._fused_adam.default,
    aten._fused_adamw.tensor_lr,
    aten._fused_adam.tensor_lr,
]


def _lists(count, shapes, dtype=torch.float32):
    return [
        [values(*shape, seed=i + 7 * k, dtype=dtype).abs() for k, shape in enumerate(shapes)]
        for i in range(count)
    ]


def _lr(op, value=0.1):
    return torch.tensor(value) if "tensor_lr" in str(op) else value


def _adam(op, shapes, amsgrad, **extra):
    lists = _lists(5 if amsgrad else 4, shapes)
    steps = [torch.tensor(3.0) for _ in shapes]
    args = (*lists, *([] if amsgrad else [[]]), steps)
    kwargs = {
        "lr": _lr(op), "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8,
        "amsgrad": amsgrad, "maximize": False, **extra,
    }  # fmt: skip
    return args, kwargs


def _alike(inputs, whole, outputs, rank):
    """The same split of parameters, gradients and moments; steps and rates whole."""
    return {
        f"{', '.join([f'S({d})'] * inputs + ['B'] * whole)} -> {', '.join([f'S({d})'] * outputs)}"
        for d in range(rank)
    }


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("op", ADAM, ids=str)
def test_adam_of_one_parameter(op, amsgrad):
    args, kwargs = _adam(op, [(7, 3)], amsgrad)
    lists = 5 if amsgrad else 4
    found = proven(RULES[op], op, *args, **kwargs)
    assert found == _alike(lists, 2 if "tensor_lr" in str(op) else 1, lists, 2)


def test_adam_with_a_gradient_scaler():
    op = aten._fused_adamw.default
    args, kwargs = _adam(op, [(5,)], False, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0))
    assert proven(RULES[op], op, *args, **kwargs) == _alike(4, 3, 4, 1)


def test_adam_of_several_parameters_splits_all_alike():
    op = aten._fused_adamw.default
    args, kwargs = _adam(op, [(7, 3), (2, 5), (4,)], False)
    assert proven(RULES[op], op, *args, **kwargs) == _alike(12, 3, 12, 1)


def test_scalar_parameters_are_not_split():
    op = aten._fused_adamw.default
    args, kwargs = _adam(op, [()], False)
    assert proven(RULES[op], op, *args, **kwargs) == set()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("op", [aten._fused_sgd.default, aten._fused_sgd.tensor_lr], ids=str)
def test_sgd(op, momentum):
    lists = _lists(3 if momentum else 2, [(7, 3)])
    args = (*lists, *([] if momentum else [[]]))
    found = proven(
        RULES[op], op, *args, weight_decay=0.1, momentum=momentum, lr=_lr(op), dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    )  # fmt: skip
    assert found == _alike(len(lists), int("tensor_lr" in str(op)), len(lists), 2)


def test_adagrad_returns_its_steps_whole():
    op = aten._fused_adagrad.default
    assert "state_steps_out" in str(op._schema)
    options = {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    found = proven(RULES[op], op, *_lists(3, [(7, 3)]), [torch.tensor(3.0)], **options)
    assert found == {
        "S(0), S(0), S(0), B -> S(0), S(0), S(0), B", "S(1), S(1), S(1), B -> S(1), S(1), S(1), B",
    }  # fmt: skip


def test_adagrad_with_a_rate_in_a_tensor():
    op = aten._fused_adagrad.tensor_lr
    options = {"lr": torch.tensor(0.1), "lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    found = proven(RULES[op], op, *_lists(3, [(7, 3)]), [torch.tensor(3.0)], **options)
    assert found == _alike(3, 2, 3, 2)


def test_bfloat16_parameters():
    op = aten._fused_adamw.default
    args, kwargs = _adam(op, [(7, 3)], False)
    args = tuple([one.bfloat16() for one in each] for each in args[:4]) + args[4:]
    assert proven(RULES[op], op, *args, **kwargs) == _alike(4, 1, 4, 2)


LISTS = [(5, 3), (7, 2)]
FOREACH = [op for op in RULES if "_foreach" in str(op)]
LINEAR = {
    aten._foreach_add.List, aten._foreach_sub.List, aten._foreach_neg.default, aten._foreach_lerp.Scalar,
    aten._foreach_clone.default, aten._foreach_mul.Scalar, aten._foreach_mul.ScalarList,
    aten._foreach_mul.Tensor, aten._foreach_div.Scalar, aten._foreach_div.ScalarList,
    aten._foreach_div.Tensor,
}  # fmt: skip


def _foreach_arguments(op):
    """Arguments by type: values in (0, 1), so that every function is defined."""
    made = {
        "List[Tensor]": lambda i: [torch.sigmoid(one) for one in _lists(i + 1, LISTS, torch.float64)[i]],
        "Tensor": lambda i: torch.tensor([0.5, 0.7]) if "addc" in str(op) else torch.tensor(0.5),
        "number": lambda i: 0.5,
        "List[number]": lambda i: [0.5, 0.7],
    }
    return [
        made[str(one.type)](i) for i, one in enumerate(op._schema.arguments) if not one.has_default_value()
    ]


@pytest.mark.parametrize("op", FOREACH, ids=str)
def test_foreach(op):
    args = _foreach_arguments(op)
    lists = sum(isinstance(one, list) and isinstance(one[0], torch.Tensor) for one in args)
    lone = sum(isinstance(one, torch.Tensor) for one in args)
    found = proven(RULES[op], op, *args)
    sums = f"{', '.join(['P(sum)'] * 2 * lists + ['B'] * lone)} -> P(sum), P(sum)"
    assert found == _alike(2 * lists, lone, 2, 2) | ({sums} if op in LINEAR else set())


def test_foreach_of_lists_that_broadcast_is_left_alone():
    op = aten._foreach_add.List
    assert proven(RULES[op], op, [values(5, 3)], [values(3)]) == set()


def test_every_foreach_op_is_listed_or_known_not_to_be_elementwise():
    left_out = {"norm", "max", "powsum", "mm", "zero", "copy"}
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::_foreach_").partition(".")
        if (
            not name.startswith("aten::_foreach_")
            or packet.rstrip("_") in left_out
            or overload.endswith("out")
        ):
            continue
        op = getattr(getattr(aten, f"_foreach_{packet}"), overload or "default")
        assert op._schema.is_mutable or op in RULES, name


def test_blocked_splits_travel_through():
    op = aten._fused_adamw.default
    args, kwargs = _adam(op, [(8, 3)], False)
    holds(proven(RULES[op], op, *args, **kwargs), "S(0), S(0), S(0), S(0), B -> S(0), S(0), S(0), S(0)")
