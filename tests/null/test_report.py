"""How verify judges tensors."""

from __future__ import annotations

import pytest
import torch

from monoflow.step.report import _Judge


@pytest.mark.parametrize("off", [3.0, 3.0j])
def test_a_deviation_of_either_part_of_a_complex_number_is_seen(off: complex) -> None:
    judge = _Judge()
    expected = torch.tensor([1 + 2j, 4j]).conj()
    judge.results([expected + torch.tensor([0, off])], [expected])
    judge.grads({"w": expected + off}, {"w": expected})
    result, gradient = judge.deviations()
    assert (result.largest, gradient.largest) == (3 / 4, 3 / 4)


def test_noise_in_one_part_of_a_complex_gradient_leaves_out_that_part() -> None:
    judge = _Judge()
    judge.grads({"w": torch.tensor([1 + 0j, 1 + 1j])}, {"w": torch.tensor([1 + 1e-9j, 1 + 1j])})
    assert judge.quiet["w"].tolist() == [[False, True], [False, False]]
