"""Core ATen is covered, and reasons are given for nothing that has a rule."""

from __future__ import annotations

import torch

from tests.rules.core_aten import WITHOUT, core_overloads, coverage


def test_every_core_op_that_can_have_a_rule_has_one() -> None:
    found = coverage()
    assert found.missing == ()
    assert len(found.ruled) >= 179
    assert len(found.ruled) + len(found.without) == len(core_overloads())


def test_reasons_are_for_core_ops_without_a_rule() -> None:
    names = {name.split(".")[0] for name in coverage().without}
    assert WITHOUT.keys() <= names


def test_the_list_is_torchs_own() -> None:
    overloads = core_overloads()
    assert {torch.ops.aten.mm.default, torch.ops.aten.prod.dim_int, torch.ops.aten.nonzero.default} <= {
        *overloads
    }
    assert len(overloads) == len(set(overloads))
