"""The ranks of a job as one process sees them."""

from __future__ import annotations

import pytest
import torch

from monoflow.errors import PlacementError
from monoflow.mesh import placement
from monoflow.runtime.world import World, current_world, share_key, simulate

LINE = placement("cpu", [0, 1, 2])


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_lone_process_is_one_rank() -> None:
    assert current_world("cpu") == World(1, 0, False)


def test_a_simulation_hosts_all_ranks_and_ends() -> None:
    with simulate(3):
        assert current_world("cpu") == World(3, 0, True)
        with simulate(2):
            assert current_world("cpu").size == 2
        assert current_world("cpu").hosted(LINE) == (0, 1, 2)
    assert current_world("cpu").size == 1


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_a_simulation_of_no_rank_is_refused(num_ranks: int) -> None:
    with pytest.raises(PlacementError, match=rf"simulate\({num_ranks}\)"), simulate(num_ranks):
        pass


def test_a_process_hosts_its_own_rank() -> None:
    assert World(3, 2, False).hosted(LINE) == (2,)
    assert World(5, 4, False).hosted(placement("cpu", [4, 1])) == (4,)


def test_a_placement_that_the_job_cannot_hold_is_refused() -> None:
    with pytest.raises(
        PlacementError, match=r"needs 3 ranks, this job has 2; .*`monoflow run -n 3 script.py`"
    ):
        World(2, 0, False).hosted(LINE)
    with pytest.raises(PlacementError, match="leaves out rank 3, which calls the step all the same"):
        World(4, 3, False).hosted(LINE)


def test_one_process_keeps_its_key() -> None:
    key = torch.tensor(7)
    assert share_key(key, World(1, 0, False), torch.device("cpu")).item() == 7
    assert share_key(key, World(4, 0, True), torch.device("cpu")).item() == 7
