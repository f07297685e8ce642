"""Users can catch every error by a public name, and read about it."""

from __future__ import annotations

import re

import monoflow as flow
from monoflow import errors
from tests.conftest import ROOT

ERRORS = [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, ValueError)]


def test_errors_are_public_and_have_a_page() -> None:
    assert {"FlowError", "NonFiniteError", "DamagedError"} <= set(ERRORS)
    told = re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    for name in ERRORS:
        assert getattr(flow, name) is getattr(errors, name)
        assert name in told
