"""Updates of touched rows against the dense update by torch's own optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn

from monoflow.lower.local import update_in_place
from monoflow.lower.touched_rows import adagrad_rows, sgd_rows, touched_rows
from monoflow.runtime.program import task_module
from monoflow.sbp.rules.embedding import embedding_backward_shard

aten = torch.ops.aten
INDEX = torch.tensor([[3, 0, 3], [6, 5, 3]])  # row 3 three times; rows 1, 2 and 4 never
SGD = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}


def task(op: Any, options: Mapping[str, Any], runs: tuple[int, ...] | None = None, padding: int = -1) -> Any:
    """A task from (table, gradient of what was looked up, index, state...) to the updated lists."""
    graph = fx.Graph()
    table, grad, index, *state = (
        graph.placeholder(name) for name in ("table", "grad", "index", "sums", "steps")
    )
    if runs is None:
        made = graph.call_function(aten.embedding_dense_backward.default, (grad, index, 7, padding, False))
    else:
        made = graph.call_function(
            embedding_backward_shard, (grad, index, runs[1] - runs[0], runs, padding, False)
        )
    lists = (
        ([table], [made], []) if op is aten._fused_sgd_.default else ([table], [made], *([x] for x in state))
    )
    graph.call_function(update_in_place, (op, *lists), dict(options))
    graph.output([table, *state])
    return task_module(graph)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(7, 4), torch.randn(2, 3, 4), INDEX, torch.rand(7, 4), torch.tensor(3.0)]


def run(module: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return module.forward([one.clone() for one in given])


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd_is_what_torch_does_with_a_dense_gradient(padding: int, maximize: bool):
    rows = touched_rows(
        task(aten._fused_sgd_.default, SGD | {"lr": 0.1, "maximize": maximize}, padding=padding)
    )
    assert sgd_rows in [node.target for node in rows.graph.nodes]
    assert all(node.target is not aten.embedding_dense_backward.default for node in rows.graph.nodes)
    given = inputs()
    table = nn.Embedding(7, 4, padding_idx=padding if padding >= 0 else None)
    table.weight.data.copy_(given[0])
    table(INDEX).backward(given[1])
    torch.optim.SGD(table.parameters(), lr=0.1, maximize=maximize, fused=False).step()
    torch.testing.assert_close(run(rows, given)[0], table.weight.data)
    assert torch.equal(run(rows, given)[0][[1, 2, 4]], given[0][[1, 2, 4]])


@pytest.mark.parametrize("padding", [-1, 3])
def test_adagrad_is_what_torch_does_with_a_dense_gradient(padding: int):
    options = {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.0, "eps": 1e-10, "maximize": False}
    rows = touched_rows(task(aten._fused_adagrad_.default, options, padding=padding))
    assert adagrad_rows in [node.target for node in rows.graph.nodes]
    given = inputs()
    table = nn.Embedding(7, 4, padding_idx=padding if padding >= 0 else None)
    table.weight.data.copy_(given[0])
    table(INDEX).backward(given[1])
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1, lr_decay=0.5, fused=False)
    optimizer.state[table.weight].update(sum=given[3].clone(), step=given[4] - 1)
    optimizer.step()
    after, sums, _ = run(rows, given)
    torch.testing.assert_close(after, table.weight.data)
    torch.testing.assert_close(sums, optimizer.state[table.weight]["sum"])


ADAGRAD = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10, "maximize": False}


@pytest.mark.parametrize(
    ("op", "options"),
    [
        (aten._fused_sgd_.default, SGD | {"lr": 0.1, "maximize": False}),
        (aten._fused_adagrad_.default, ADAGRAD),
    ],
)
def test_shards_of_a_table_are_the_table(op: Any, options: Mapping[str, Any]):
    given = inputs()
    whole = run(task(op, options, padding=5), given)
    parts = []
    for start, stop in ((0, 3), (3, 7)):
        rows = touched_rows(task(op, options, (start, stop), padding=5))
        assert rows.graph.find_nodes(op="call_function", target=update_in_place) == []
        own = [given[0][start:stop], *given[1:3], given[3][start:stop], given[4]]
        parts.append(run(rows, own))
    for at in (0, 1):
        torch.testing.assert_close(torch.cat([part[at] for part in parts]), whole[at])


@pytest.mark.parametrize("change", [{"weight_decay": 0.1}, {"momentum": 0.9}])
def test_updates_that_move_every_row_stay_dense(change: Mapping[str, Any]):
    module = task(aten._fused_sgd_.default, SGD | {"lr": 0.1, "maximize": False} | dict(change))
    assert touched_rows(module) is module


def test_adagrad_without_eps_stays_dense():
    module = task(aten._fused_adagrad_.default, ADAGRAD | {"eps": 0.0})
    assert touched_rows(module) is module


def test_a_gradient_with_another_reader_stays_dense():
    module = task(aten._fused_sgd_.default, SGD | {"lr": 0.1, "maximize": False})
    gradient = module.graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default)[0]
    results = module.graph.output_node()
    results.args = ([*results.args[0], gradient],)
    assert touched_rows(module) is module
