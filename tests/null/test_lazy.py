"""Modules built without memory: what is recorded, what it becomes, whole and in parts, what is refused."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import monoflow as flow
from monoflow.sbp.layout import B, NdSbp, S, shard
from monoflow.tensor import replay_part
from monoflow.tensor.record import memory_of, view_of
from monoflow.tensor.replay import value_of
from monoflow.tensor.replay_part import Part, part_of

HERE = Path(__file__).name
ROWS, COLUMNS = 13, 6


def value(tensor: torch.Tensor) -> torch.Tensor:
    """What a lazily built tensor becomes on one device."""
    return part_of(view_of(tensor), Part((), (), ()))


def own(attribute: object) -> torch.Tensor:
    """A module's attribute that is a tensor."""
    assert isinstance(attribute, torch.Tensor)
    return attribute


def empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(ROWS, COLUMNS, dtype=dtype)


def row_and_rows() -> torch.Tensor:
    weight = nn.init.normal_(empty(), std=0.02)
    weight[1].zero_()
    weight[6 : ROWS - 1].mul_(3)
    weight[:, 1:3].fill_(2.0)
    return weight


def experts() -> torch.Tensor:
    weight = torch.empty(4, COLUMNS, ROWS)
    for index in range(4):
        weight[index].normal_(std=0.1 * (index + 1))
    return weight


def scaled_by_norm() -> torch.Tensor:
    weight = empty().normal_()
    return weight.mul_(torch.tensor(0.5)).div_(weight.norm())


def copied() -> torch.Tensor:
    source = empty().uniform_()
    weight = empty().copy_(source)
    source.zero_()
    return weight.clamp_(0.2, 0.9)


ELEMENTWISE = {
    "normal": lambda: nn.init.normal_(empty(), 0.1, 0.02),
    "bfloat16": lambda: empty(torch.bfloat16).normal_(0.1, 0.3),
    "float64": lambda: empty(torch.float64).normal_(),
    "uniform": lambda: nn.init.uniform_(empty(), -2, 3),
    "trunc_normal": lambda: nn.init.trunc_normal_(empty()),
    "trunc_normal bfloat16": lambda: nn.init.trunc_normal_(empty(torch.bfloat16), std=0.02),
    "kaiming": lambda: nn.init.kaiming_uniform_(empty()),
    "xavier": lambda: nn.init.xavier_normal_(empty()),
    "constant": lambda: nn.init.constant_(empty(), 0.3),
    "exponential": lambda: empty().exponential_(2.0),
    "bernoulli": lambda: empty().bernoulli_(0.3),
    "randint": lambda: torch.randint(0, 9, (ROWS, COLUMNS)),
    "function": lambda: (torch.randn(ROWS, COLUMNS) * 0.02 + 1).to(torch.bfloat16),
    "torch.normal": lambda: torch.normal(0.0, 2.0, size=(ROWS, COLUMNS)),
    "rows": row_and_rows,
    "experts": experts,
    "norm": scaled_by_norm,
    "copied": copied,
    "dirac": lambda: nn.init.dirac_(torch.empty(8, 6, 3)),
}
WHOLE = {
    "orthogonal": lambda: nn.init.orthogonal_(empty(), gain=2),
    "eye": lambda: nn.init.eye_(empty()),
    "sparse": lambda: nn.init.sparse_(empty(), 0.5),
    "list": lambda: torch.tensor([[1.0, 2.0, 3.0] * 2, [4.0, 5.0, 6.0] * 2]),
    "written list": lambda: torch.tensor([[1.0, 2.0, 3.0] * 2, [4.0, 5.0, 6.0] * 2]).mul_(2),
    "transposed": lambda: torch.empty(COLUMNS, ROWS).normal_().t(),
    "permutation": lambda: torch.randperm(ROWS),
    "position": lambda: torch.outer(torch.arange(ROWS), torch.arange(COLUMNS) / 3).sin(),
}
LAYOUTS: list[tuple[NdSbp, tuple[int, ...]]] = [
    ((S(0),), (2,)),
    ((S(1),), (3,)),
    ((S(0), S(1)), (2, 2)),
    ((S(0), S(0)), (2, 3)),
    ((S(1, 2),), (3,)),
    ((B, S(0)), (1, 8)),
]


@pytest.mark.parametrize("block", [1 << 20, 20])
@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_every_part_is_bitwise_the_part_of_the_whole(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with flow.lazy(), torch.no_grad():
        tensor = (ELEMENTWISE | WHOLE)[name]()
    expected = value_of(view_of(tensor))
    wholes: list[object] = []
    monkeypatch.setattr(replay_part, "value_of", lambda view: wholes.append(view) or value_of(view))
    monkeypatch.setattr(replay_part, "_BLOCK", block)
    assert torch.equal(value(tensor), expected)
    for layout, mesh in LAYOUTS:
        if any(one.dim >= tensor.dim() for one in layout if one != B):  # type: ignore[union-attr]
            continue
        for coordinate in itertools.product(*map(range, mesh)):
            part = part_of(view_of(tensor), Part(layout, mesh, coordinate))
            want = shard(expected, layout, mesh, coordinate)
            assert part.dtype == want.dtype and torch.equal(part, want), (layout, mesh, coordinate)
    assert bool(wholes) == (name in WHOLE), "a tensor was made whole that need not be, or the reverse"


@pytest.mark.parametrize("name", ["constant", "eye", "dirac", "position", "list", "written list"])
def test_what_is_not_random_is_what_torch_makes(name: str) -> None:
    make = (ELEMENTWISE | WHOLE)[name]
    with flow.lazy(), torch.no_grad():
        tensor = make()
    assert tensor.is_meta
    assert torch.equal(value(tensor), make())


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: nn.init.normal_(x, 1.5, 0.3),
        lambda x: nn.init.uniform_(x, -2, 5),
        lambda x: nn.init.trunc_normal_(x, 0.2, 0.7, -0.5, 1.0),
        lambda x: nn.init.trunc_normal_(x, 0.0, 1.0, 2.0, 4.0),
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
        nn.init.xavier_uniform_,
        lambda x: x.exponential_(3.0),
        lambda x: x.bernoulli_(0.3),
        lambda x: x.log_normal_(0.1, 0.2),
    ],
)
def test_random_numbers_are_distributed_as_torchs(draw) -> None:
    torch.manual_seed(3)
    with flow.lazy(), torch.no_grad():
        tensor = torch.empty(300, 200)
        draw(tensor)
    with torch.no_grad():
        expected = torch.empty(300, 200)
        draw(expected)
    drawn, expected = value(tensor).flatten().sort().values, expected.flatten().sort().values
    points = torch.cat([drawn, expected])
    below = [torch.searchsorted(one, points, right=True) / one.numel() for one in (drawn, expected)]
    assert (below[0] - below[1]).abs().max() < 1.95 * (2 / drawn.numel()) ** 0.5  # Kolmogorov-Smirnov, 0.1 %


def test_truncated_numbers_stay_inside_and_orthogonal_rows_are_orthonormal() -> None:
    with flow.lazy(), torch.no_grad():
        truncated = nn.init.trunc_normal_(torch.empty(1000), std=2.0, a=-1.0, b=0.5)
        orthogonal = nn.init.orthogonal_(torch.empty(6, 20))
    assert value(truncated).min() >= -1 and value(truncated).max() <= 0.5
    rows = value(orthogonal)
    assert torch.allclose(rows @ rows.T, torch.eye(6), atol=1e-5)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=3)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16)
        self.norm = nn.BatchNorm1d(8)
        self.gru = nn.GRU(8, 8)
        self.spectral = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.weighted = parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("rotary", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))
        table = torch.zeros(4, 6)
        table[:, 0::2] = torch.from_numpy(np.sin(np.arange(12.0).reshape(4, 3)))
        self.register_buffer("table", table)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
        self.scale = torch.tensor([0.5, 2.0])


def test_a_module_of_many_kinds_takes_no_memory_and_gets_its_values() -> None:
    torch.manual_seed(0)
    with flow.lazy():
        model = Everything()
    tensors = [*model.parameters(), *model.buffers(), model.scale]
    assert all(tensor.is_meta and memory_of(tensor) is not None for tensor in tensors)
    objects = {name: id(tensor) for name, tensor in model.named_parameters()}
    flow.materialize(model)
    expected = Everything()
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == objects
    assert model.head.weight is model.embedding.weight
    assert model.rates == expected.rates and torch.equal(model.scale, expected.scale)
    for name in ("rotary", "mask", "table", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(model.get_buffer(name), expected.get_buffer(name)), name
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert type(ours) is type(theirs) and ours.requires_grad and ours.is_leaf, name
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride(), name
        bound = 5 * theirs.std() / theirs.numel() ** 0.5 if theirs.numel() > 20 else 1.0
        assert abs(ours.mean() - theirs.mean()) <= 2 * bound, name
    assert model.embedding.weight[3].eq(0).all() and model.embedding.weight[4].ne(0).all()
    x = model.embedding(torch.tensor([[1, 3, 5]]))
    model.head(model.weighted(model.spectral(model.gru(model.encoder(x))[0]))).sum().backward()
    assert all(param.grad is not None for name, param in model.named_parameters() if name[:5] != "norm.")


def test_one_state_of_a_tensor_is_copied_and_another_is_kept() -> None:
    with flow.lazy():
        first = torch.zeros(4)
        before = first.clone()
        first.add_(1)
        after = first + before
        first.fill_(7)
        first[1:3].mul_(2)
    assert value(before).tolist() == [0] * 4
    assert value(after).tolist() == [1] * 4
    assert value(first).tolist() == [7, 14, 14, 7]


def test_the_seed_decides_and_every_op_draws_its_own_numbers() -> None:
    def build(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        own = torch.Generator().manual_seed(5)
        with flow.lazy(), torch.no_grad():
            made = [nn.Linear(4, 4).weight, nn.Linear(4, 4).weight, torch.randn(4, 4, generator=own)]
        return [value(tensor) for tensor in made]

    first, again, other = build(1), build(1), build(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])
    assert torch.equal(first[2], other[2]), "it has a generator of its own"


def test_memory_that_nothing_wrote_is_zero_and_dtypes_are_those_of_the_time() -> None:
    with flow.lazy():
        unwritten = torch.empty(3)
        torch.set_default_dtype(torch.float64)
        try:
            thirds = torch.arange(3) / 3
            drawn = torch.rand(2)
        finally:
            torch.set_default_dtype(torch.float32)
    assert value(unwritten).tolist() == [0, 0, 0]
    assert torch.equal(value(thirds), torch.arange(3, dtype=torch.float64) / 3)
    assert value(drawn).dtype == torch.float64


def looks_at(what: str) -> None:
    weight = nn.Parameter(torch.empty(3, 3))
    if what == "branch" and weight.data.normal_().sum() > 0:
        weight.data.zero_()
    if what == "item":
        torch.rand(()).item()
    if what == "list":
        torch.rand(2).tolist()
    if what == "numpy":
        weight.detach().normal_().numpy()
    if what == "nonzero":
        torch.rand(3).gt(0.5).nonzero()
    if what == "parameter":
        nn.init.ones_(weight)[0, 0].item()


@pytest.mark.parametrize("what", ["branch", "item", "list", "numpy", "nonzero"])
def test_looking_at_random_values_is_refused_with_the_line(what: str) -> None:
    with (
        pytest.raises(flow.CaptureError, match=rf"{HERE}:\d+ looks at a value .* at random") as error,
        flow.lazy(),
    ):
        looks_at(what)
    line = int(str(error.value).split(f"{HERE}:")[1].split()[0])
    assert f'"{what}"' in "".join(Path(__file__).read_text().splitlines()[line - 2 : line])
    assert "flow.materialize(model)" in str(error.value)


def test_looking_at_a_parameter_is_refused() -> None:
    with pytest.raises(flow.CaptureError, match=r"looks at a parameter, of shape \(1,\)"), flow.lazy():
        nn.Parameter(torch.ones(1)).item()


def test_code_that_asks_where_a_tensor_is_sees_where_it_was_asked_for() -> None:
    with flow.lazy():
        tensor = torch.zeros(3)
        assert not tensor.is_meta and tensor.device == torch.device("cpu") and tensor.is_cpu
        assert torch.ones(2, device=tensor.device).tolist() == [1, 1]
    assert tensor.is_meta


def test_what_is_done_before_there_is_memory_is_recorded_or_refused() -> None:
    with flow.lazy():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    own(model[0].bias).data.fill_(3)
    with torch.no_grad():
        own(model[0].weight)[1:] = 2.0
        nn.init.orthogonal_(own(model[0].weight)[:1], gain=2)
    with pytest.raises(flow.CaptureError, match=rf"{HERE}:\d+ looks at a value"):
        nn.init.trunc_normal_(own(model[1].weight))
    model.double()
    twin = copy.deepcopy(model)
    with pytest.raises(flow.CaptureError, match=rf"{HERE}:\d+ looks at a value that is drawn at random"):
        model(torch.ones(2, 4, dtype=torch.float64)).sum().item()
    assert all(tensor.is_meta and tensor.device.type == "meta" for tensor in model.state_dict().values())
    for one in (model, twin):
        flow.materialize(one)
        weight, bias = own(one[0].weight), own(one[0].bias)
        assert type(weight) is nn.Parameter and weight.dtype == torch.float64
        assert bias.eq(3).all() and weight[1:].eq(2).all()
        assert weight[0].norm().item() == pytest.approx(2)
        assert own(one[1].running_var).eq(1).all()
    assert torch.equal(own(twin[0].weight), own(model[0].weight)) and twin[0].weight is not model[0].weight


def test_values_from_outside_are_kept_as_they_were() -> None:
    outside = torch.arange(3.0)
    with flow.lazy():
        buffer = torch.zeros(3)
        buffer.add_(outside)
    outside.zero_()
    assert value(buffer).tolist() == [0, 1, 2]


def test_a_meta_tensor_from_outside_is_refused() -> None:
    outside = torch.empty(3, device="meta")
    with (
        pytest.raises(flow.CaptureError, match=rf"meta tensor of shape \(3,\) from outside.*{HERE}"),
        flow.lazy(),
    ):
        torch.zeros(3).add_(outside)
