"""Tables of which a step updates the rows that it looked up, on layouts, against dense gradients in torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from monoflow.lower.touched_rows import adagrad_rows, sgd_rows

from .harness import ALL_LAYOUTS
from .models import KINDS, Batch, Recommender, batch_of, click_loss


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.1)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize(
    ("layout", "num_tables"), [("one", 2), ("tensor-2", 2), ("tensor-3", 2), ("data-2", 0), ("zero-2", 0)]
)
def test_training_is_torchs(name: str, layout: str, num_tables: int):
    torch.manual_seed(0)
    model = Recommender(0.0).train()
    other = copy.deepcopy(model)
    optimizer, others = optimizer_of(name, model), optimizer_of(name, other)

    def step(batch: Batch) -> torch.Tensor:
        loss = click_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with ALL_LAYOUTS[layout].ranks():
        ours = ALL_LAYOUTS[layout].compiled(model, optimizer)(step)
        for seed in range(3):
            batch = batch_of(KINDS["dlrm"], 4, seed)
            found = ours(batch)
            expected = click_loss(other, batch)
            expected.backward()
            others.step()
            others.zero_grad()
            torch.testing.assert_close(found, expected.detach())
        programs = ours._require().lowered.programs.values()
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, same)
    for program in programs:
        targets = [node.target for task in program.tasks if task.compute for node in task.compute.graph.nodes]
        assert sum(target in (sgd_rows, adagrad_rows) for target in targets) == num_tables
