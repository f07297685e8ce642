"""Models built without memory, on several ranks: each takes its parts, bit for bit those of one device."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import monoflow as flow
from tests.conftest import RunRanks

WIDTH = 2048  # a matrix of 16 MiB
MEGABYTE = 1 << 20


class Net(nn.Module):
    def __init__(self, width: int = 10, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width, padding_idx=2)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 13, bias=False)
        nn.init.orthogonal_(self.head.weight)
        nn.init.trunc_normal_(self.head.weight[:5], std=0.02)
        self.register_buffer("scale", torch.arange(width) / width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def built(seed: int, weights: str | None = None) -> Net:
    torch.manual_seed(seed)
    with flow.lazy(weights):
        return Net()


def whole_of_one_device(seed: int = 7) -> dict[str, torch.Tensor]:
    model = built(seed)
    flow.materialize(model)
    return dict(model.state_dict())


def trained(plan: str, seed_step: int = 0, weights: str | None = None) -> tuple:
    """Whole values before the first step, losses, and what of the parameters this rank holds."""
    model = built(7 + seed_step * dist.get_rank(), weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @flow.graph(model, optimizer, plan=plan)
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ids = torch.arange(24).reshape(8, 3) % 13
    step.compile(ids)
    begun = {name: value.numpy() for name, value in flow.full_state_dict(model).items()}
    kept = [isinstance(param, DTensor) for param in model.parameters()]
    owned = all(
        param is mine
        for param, mine in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True)
    )
    return begun, [step(ids).item() for _ in range(3)], any(kept), owned


def loss_of_one_device() -> list[float]:
    model = built(7)
    flow.materialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(torch.arange(24).reshape(8, 3) % 13)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("plan", "num_ranks", "seed_step"), [("tensor", 2, 1), ("zero", 4, 0)])
def test_a_step_begins_with_the_values_of_one_device(
    plan: str, num_ranks: int, seed_step: int, run_ranks: RunRanks
) -> None:
    """Where seeds differ from rank to rank, the first rank's counts."""
    expected, losses = whole_of_one_device(), loss_of_one_device()
    for begun, found, any_split, owned in run_ranks(num_ranks, trained, plan, seed_step):
        assert any_split and owned
        assert begun.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.from_numpy(begun[name]), value), name
        assert found == pytest.approx(losses, rel=1e-4)


def test_ranks_read_their_slices_of_files(run_ranks: RunRanks, tmp_path: Path) -> None:
    saved = {name: torch.randn(value.shape) for name, value in whole_of_one_device().items()}
    save_file(saved, tmp_path / "model.safetensors")
    for begun, *_ in run_ranks(2, trained, "zero", 0, str(tmp_path)):
        for name, value in saved.items():
            assert torch.equal(torch.from_numpy(begun[name]), value), name


def built_differently() -> str:
    torch.manual_seed(0)
    with flow.lazy():
        model = nn.Linear(4, 4)
        if dist.get_rank():
            model.weight.data.mul_(2)
    placement = flow.placement("cpu", [0, 1])
    with pytest.raises(flow.LayoutError) as error:
        flow.materialize(model, placement, {"weight": "S(0)"})
    return f"{error.value} {model.weight.is_meta}"


def test_ranks_that_record_different_ops_are_refused(run_ranks: RunRanks) -> None:
    for text in run_ranks(2, built_differently):
        assert re.search(r"built the model differently: how flow.lazy\(\) recorded .* differ", text)
        assert text.endswith("True"), "nothing was given memory"


# --- memory ----------------------------------------------------------------------------------------


def resident(field: str) -> int:
    """Bytes of this process' memory: VmRSS now, VmHWM at most since the last `forget_peak`."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def big(weights: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    with flow.lazy(weights):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)]
        nn.init.orthogonal_(layers[0].weight[: WIDTH // 8])
        nn.init.trunc_normal_(layers[1].weight)
    return nn.Sequential(*layers)


def grown(layout: str, weights: str | None) -> tuple[int, int]:
    """How much memory a rank took at most, and how much of it stays, beside what torch takes to begin."""
    placement = flow.placement("cpu", range(dist.get_world_size()))
    with flow.lazy():
        warm = nn.Linear(64, 64)
        nn.init.orthogonal_(warm.weight)
        nn.init.trunc_normal_(nn.Parameter(torch.empty(64)))
    flow.materialize(warm, placement, {"weight": layout})
    model = big(weights)
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    flow.materialize(model, placement, {"*": layout})
    return resident("VmHWM") - before, resident("VmRSS") - before


@pytest.mark.parametrize(
    ("source", "layout", "num_ranks"),
    [("initialization", "S(0)", 2), ("initialization", "S(0)", 4), ("files", "S(1)", 4)],
)
def test_a_rank_takes_its_parts_and_one_tensor_at_most(
    source: str, layout: str, num_ranks: int, run_ranks: RunRanks, tmp_path: Path
) -> None:
    matrix = WIDTH * WIDTH * 4
    weights = None
    if source == "files":
        weights = str(tmp_path)
        save_file(
            {f"{i}.weight": torch.zeros(WIDTH, WIDTH) for i in range(7)}, tmp_path / "model.safetensors"
        )
    slack = 24 * MEGABYTE
    for peak, stays in run_ranks(num_ranks, grown, layout, weights):
        parts = 7 * matrix // num_ranks
        assert peak <= parts + matrix + slack, (peak / MEGABYTE, parts / MEGABYTE)
        assert stays >= parts * 0.9, "the parts are not there"
