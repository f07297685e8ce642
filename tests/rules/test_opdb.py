"""A slice of `make test-rules`: a few samples of every op of torch's, all rules that they meet."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.rules.collect import PROVABLE
from tests.rules.own_samples import own_samples
from tests.rules.prove import prove_samples
from tests.rules.record import recorded
from tests.rules.stand_ins import kernels_as_maths

_PARTS = 4


@pytest.fixture(autouse=True)
def _quiet_and_in_order():
    """torch's samples warn of what they are made to try; threads race where an index comes twice."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("part", range(_PARTS))
def test_rules_hold_on_samples_of_torch(part: int) -> None:
    found = recorded(lambda op: op in PROVABLE, limit=2, infos=op_db[part::_PARTS], samples_each=2)
    assert len(found) > 60
    proofs = [prove_samples(PROVABLE[op], samples, 1, (3,)) for op, samples in found.items()]
    assert [one.wrong for one in proofs if one.wrong] == []
    assert sum(one.proven for one in proofs) > 400


def test_rules_hold_on_samples_of_our_own() -> None:
    with kernels_as_maths():
        samples = own_samples()
        assert samples.keys() <= PROVABLE.keys()
        proofs = [prove_samples(PROVABLE[op], given, 0, (2,)) for op, given in samples.items()]
    assert [one.wrong for one in proofs if one.wrong] == []
    assert [one.name for one in proofs if not one.samples] == []
