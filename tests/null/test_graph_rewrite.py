"""What passes share: graphs are copied, never changed; traced functions are inserted with their origin."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from monoflow.graph.rewrite import copied, finished, insert_traced
from monoflow.graph.step_graph import (
    NodeInfo,
    Phase,
    Role,
    StepGraph,
    info_of,
    metas_of,
    op_call,
    output_paths,
    source_of,
    tensor_args,
)
from monoflow.graph.verify import verify
from monoflow.sbp.signature import TensorMeta

from .graph_build import built, targets, values

aten = torch.ops.aten
X, Y = torch.arange(12.0).reshape(3, 4) - 5, torch.arange(12.0).reshape(3, 4).flip(0)


def small() -> StepGraph:
    inputs = {"x": (Role.BATCH, X), "y": (Role.BATCH, Y)}
    graph = built(lambda x, y: [torch.mul(x, y), x.sum()], inputs)
    for node in graph.calls():
        node.meta["info"] = NodeInfo(Phase.BACKWARD, f"at.{node.name}", "model.py:3", 7)
    return graph


def test_a_copy_is_free_to_edit() -> None:
    graph = small()
    before = graph.text()
    copy = copied(graph)
    assert [node.name for node in copy.nodes] == [node.name for node in graph.graph.nodes]
    for node in copy.nodes:
        node.meta["info"] = NodeInfo()
    nodes = {node.name: node for node in copy.nodes}
    nodes["mul"].replace_all_uses_with(nodes["x_1"])
    after = verify(finished(graph, copy), "edit")
    assert graph.text() == before and targets(graph) == ["mul.Tensor", "sum"]
    assert targets(after) == ["sum"]


def test_finished_drops_whole_chains_but_no_input() -> None:
    graph = small()
    copy = copied(graph)
    output = copy.output_node()
    x = next(iter(copy.nodes))
    with copy.inserting_before(output):
        first = copy.call_function(aten.neg.default, (x,))
        copy.call_function(aten.exp.default, (first,))
    output.args = ((output.args[0][1],),)  # pyright: ignore
    after = finished(replace(graph, outputs=graph.outputs[1:]), copy)
    assert targets(verify(after, "edit")) == ["sum"]
    assert [one.name for one in after.inputs] == ["x", "y"]
    assert torch.equal(values(after, X, Y)[0], X.sum())


def replaced(function, *extra) -> StepGraph:
    """`small` with the product replaced by function([x, y], *extra)."""
    graph = small()
    copy = copied(graph)
    mul = next(node for node in copy.nodes if node.target is aten.mul.Tensor)
    found = insert_traced(copy, mul, function, (list(mul.args), *extra))
    mul.replace_all_uses_with(found)
    return verify(finished(graph, copy), "replace")


def test_inserted_ops_compute_the_function_and_take_the_origin() -> None:
    def scaled(pair: list[Tensor], options: dict[str, float]) -> Tensor:
        return (pair[0] - pair[1]) * options["by"] + math.pi

    after = replaced(scaled, {"by": 2.0})
    assert targets(after) == ["sub.Tensor", "mul.Tensor", "add.Tensor", "sum"]
    origins = {info_of(node) for node in after.calls() if node.target is not aten.sum.default}
    assert origins == {NodeInfo(Phase.BACKWARD, "at.mul", "model.py:3", 7)}
    torch.testing.assert_close(values(after, X, Y)[0], (X - Y) * 2 + math.pi)
    assert all(metas_of(node)[0] == TensorMeta((3, 4), torch.float32) for node in list(after.calls())[:3])


def test_a_function_may_give_its_argument_back() -> None:
    after = replaced(lambda pair: pair[1])
    assert targets(after) == ["sum"] and [str(node) for node in after.results] == ["y_1", "sum_1"]


def test_results_keep_their_nesting() -> None:
    graph = small()
    copy = copied(graph)
    output = copy.output_node()
    x = next(iter(copy.nodes))
    total = output.args[0][1]  # pyright: ignore
    found = insert_traced(copy, total, lambda x: {"a": (x + 1, [x * 2]), "b": 3}, (x,))  # pyright: ignore
    assert found["b"] == 3
    assert [found["a"][0].target, found["a"][1][0].target] == [aten.add.Tensor, aten.mul.Tensor]


def test_a_function_that_closes_over_a_tensor_is_refused() -> None:
    with pytest.raises(AssertionError, match="closes over a tensor"):
        replaced(lambda pair: pair[0] + Y)


def test_outputs_are_followed_through_getitem() -> None:
    def function(p: Tensor, g: Tensor, lr: Tensor) -> list[Tensor]:
        options = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
        new = aten._fused_sgd.tensor_lr(
            [p, p + 1], [g, g], [], lr=lr, maximize=False, is_first_step=True, **options
        )
        return [new[0][1], torch.max(g, 0)[1]]

    inputs = dict.fromkeys(("p", "g"), (Role.BATCH, X)) | {"lr": (Role.HYPER, torch.tensor(0.1))}
    graph = built(function, inputs)
    update, index = (source_of(node) for node in graph.results)
    assert update[0].target is aten._fused_sgd.tensor_lr and index == (index[0], 1)
    assert output_paths(update[0])[update[1]] == (0, 1)
    assert output_paths(index[0]) == [(0,), (1,)]
    assert metas_of(index[0]) == (TensorMeta((4,), torch.float32), TensorMeta((4,), torch.int64))


def test_a_call_as_rules_see_it() -> None:
    graph = built(lambda x, y: [torch.cat([x, y, x], 1)], {"x": (Role.BATCH, X), "y": (Role.BATCH, Y)})
    (cat,) = graph.calls()
    meta = TensorMeta((3, 4), torch.float32)
    assert [node.name for node in tensor_args(cat)] == ["x_1", "y_1", "x_1"]
    call = op_call(cat)
    assert call.op is aten.cat.default and call.inputs == (meta,) * 3 and call.args[1] == 1
    assert call.outputs == (TensorMeta((3, 12), torch.float32),)


def test_an_absent_output_has_no_meta() -> None:
    def function(grad: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        found = aten.convolution_backward.default(
            grad, x, weight, [2], [1], [0], [1], False, [0], 1, [False, True, False]
        )
        return [found[1]]

    shapes = {"grad": (2, 2, 4), "x": (2, 3, 4), "weight": (2, 3, 1)}
    graph = built(function, {name: (Role.BATCH, torch.zeros(shape)) for name, shape in shapes.items()})
    call = next(iter(graph.calls()))
    assert metas_of(call) == (None, TensorMeta((2, 3, 1), torch.float32), None)
    assert source_of(graph.results[0]) == (call, 1)
