"""The harness finds a wrong rule, a missing signature and a dead process, and keeps to what ops take."""

from __future__ import annotations

import os
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db

from monoflow.sbp.registry import OpRule, letters
from tests.null.rule_trial import values
from tests.rules.prove import asymmetric, narrowed, prove_samples, search_samples
from tests.rules.record import Sample, functional, recorded
from tests.rules.workers import Died, run_all

aten = torch.ops.aten
MM = Sample(aten.mm.default, (values(5, 4), values(4, 3)), {})


def _rule(spec: str, *linear: tuple[int, ...]) -> OpRule:
    return OpRule(lambda call, size, forms: letters(call, size, forms, spec, linear=linear))


def test_a_wrong_rule_is_found() -> None:
    proof = prove_samples(_rule("mk,kn->mn", (0, 1)), [MM], 1)
    assert proof.samples == 1 and proof.proven > 18  # three splits on three axes, in two dtypes; and pairs
    assert len(proof.wrong) > 6 and all("P(sum), P(sum) -> P(sum)" in one for one in proof.wrong)


def test_what_is_missing_is_found() -> None:
    proof = search_samples(_rule("mk,kn->mn", (0,)), [MM, MM], 2, 100)
    assert proof.surely_missing() == ["B, P(sum) -> P(sum)"]
    proof = search_samples(_rule("mk,kn->mn", (0,), (1,)), [MM], 2, 100)
    assert proof.surely_missing() == [] and proof.searched == 1


def test_samples_that_say_little_are_not_searched() -> None:
    zeros = Sample(aten.relu.default, (torch.zeros(4, 3),), {})
    assert search_samples(_rule("ab->ab"), [zeros], 2, 100).searched == 0


def test_equal_values_are_told_apart() -> None:
    changed = asymmetric(Sample(aten.mul.Tensor, (torch.ones(4, 3), torch.zeros(4, 3)), {}))
    assert changed is not None
    assert all(len(one.unique()) == 12 for one in changed.args)
    whole = Sample(aten.acos.default, (torch.ones(4, 3),), {})  # beyond one there is no angle
    assert asymmetric(whole) is whole
    assert asymmetric(Sample(aten.mm.default, (values(2, 3), values(2, 3)), {})) is None


def test_double_precision_becomes_single_in_numbers_too() -> None:
    one = narrowed(Sample(aten._to_copy.default, (values(4),), {"dtype": torch.float64}))
    assert one is not None and one.args[0].dtype == one.kwargs["dtype"] == torch.float32
    assert narrowed(Sample(aten.neg.default, (torch.arange(3),), {})) is None


def test_calls_are_recorded_forward_backward_and_undecomposed() -> None:
    infos = [info for info in op_db if info.name in ("nn.functional.silu", "matmul", "nn.functional.gelu")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = recorded(lambda op: True, limit=3, infos=infos)
    assert {
        aten.mm.default,
        aten.gelu.default,
        aten.gelu_backward.default,
        aten.matmul.default,
    } <= found.keys()
    assert all(len(samples) <= 3 for samples in found.values())
    shapes = [[one.shape for one in sample.args] for sample in found[aten.mm.default]]
    assert len(shapes) == len({str(one) for one in shapes})


def test_writes_stand_for_what_capture_makes_of_them() -> None:
    assert functional(aten.add_.Tensor) is aten.add.Tensor
    assert functional(aten.fill_.Scalar) is aten.fill.Scalar
    assert functional(aten.add.out) is None
    assert functional(aten.mm.default) is aten.mm.default


def _task(number: int) -> int:
    if number == 2:
        os._exit(7)
    if number == 3:
        raise ValueError("three")
    return number * 10


def test_a_task_that_ends_its_process_ends_no_other() -> None:
    found = dict(run_all(_task, [1, 2, 3, 4], 2))
    assert found[1] == 10 and found[4] == 40
    assert found[2] == Died("its process ended with status 7", True)
    assert "ValueError: three" in found[3].why and not found[3].crashed
