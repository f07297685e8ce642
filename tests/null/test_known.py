"""Values that depend on no input may steer Python while a step is captured; others may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import monoflow as flow
from monoflow.capture import known


def test_a_transformer_may_look_at_the_mask_it_made() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return model(source, target, tgt_mask=mask)

    source, target = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    got = flow.graph(model)(forward)(source, target)
    torch.testing.assert_close(got, forward(source, target).detach(), atol=1e-5, rtol=1e-5)


def test_a_branch_on_sizes_is_taken() -> None:
    model = nn.Linear(3, 3)

    @flow.graph(model)
    def step(x: torch.Tensor) -> torch.Tensor:
        scale = torch.arange(x.shape[0]).sum()
        return model(x) * 2 if scale > 2 else model(x)

    for rows, factor in ((2, 1), (4, 2)):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(step(x), model(x).detach() * factor)


def written_view(x: torch.Tensor) -> bool:
    mask = torch.zeros(4)
    mask[1:3] = 1
    return bool(mask.sum() == 2)


def written_from_input(x: torch.Tensor) -> bool:
    mask = torch.zeros(4)
    mask[0] = x[0, 0]
    return bool(mask.sum() == 0)


def random_value(x: torch.Tensor) -> bool:
    return bool(torch.rand(()) < 2)


def batch_value(x: torch.Tensor) -> bool:
    return bool((x * 0).sum() == 0)


def test_writes_through_views_count() -> None:
    model = nn.Linear(3, 3)
    step = flow.graph(model)(lambda x: model(x) if written_view(x) else model(x) * 100)
    x = torch.randn(2, 3)
    torch.testing.assert_close(step(x), model(x).detach())


def test_a_value_may_be_read_again_after_a_write() -> None:
    model = nn.Linear(3, 3)
    seen = []

    @flow.graph(model)
    def step(x: torch.Tensor) -> torch.Tensor:
        count, scale = torch.zeros(2), torch.tensor(1.0)
        part = count[1:]
        for _ in range(3):
            part += 1
            scale.mul_(2)
            seen.append((int(count.sum()), int(part), int(scale * 1)))
        return model(x)

    step(torch.ones(2, 3))
    assert seen == [(1, 1, 2), (2, 2, 4), (3, 3, 8)]


def test_every_op_is_computed_once_however_often_values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    run: list[fx.Node] = []
    foldable = known._is_foldable
    monkeypatch.setattr(known, "_is_foldable", lambda node: run.append(node) or foldable(node))

    @flow.graph(model)
    def step(x: torch.Tensor) -> torch.Tensor:
        count = torch.zeros(())
        for _ in range(5):
            count = count + 1
            assert count > 0
        return model(x)

    step(torch.ones(2, 3))
    assert len(run) == len(set(run)) > 5


def test_a_write_of_an_unknown_value_ends_what_was_known() -> None:
    model = nn.Linear(3, 3)

    @flow.graph(model)
    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4)
        assert mask.sum() == 0
        mask[0] = x[0, 0]
        return x if mask.sum() == 0 else model(x)

    with pytest.raises(flow.CaptureError, match=r"reads a tensor's value.*test_known\.py:\d+"):
        step(torch.ones(2, 3))


@pytest.mark.parametrize("looks", [written_from_input, random_value, batch_value])
def test_what_depends_on_inputs_or_chance_is_refused(looks: Callable[[torch.Tensor], bool]) -> None:
    model = nn.Linear(3, 3)
    step = flow.graph(model)(lambda x: model(x) if looks(x) else x)
    with pytest.raises(flow.CaptureError, match=r"test_known\.py:\d+"):
        step(torch.randn(2, 3))
