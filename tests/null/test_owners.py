"""The pass that files the nodes around an update under modules."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, fx, nn

from monoflow.graph.passes import PASSES
from monoflow.graph.passes.owners import name_owners
from monoflow.graph.step_graph import Phase, StepGraph, info_of
from monoflow.graph.verify import verify

from .graph_run import trace

X = torch.arange(12.0).reshape(3, 4) - 5


class Tied(nn.Module):
    """Two layers that share a weight, after one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4))
        self.second, self.third = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).relu())


def captured(model: nn.Module, optimizer: torch.optim.Optimizer, *, clear: bool = True) -> StepGraph:
    """A step with clipped gradients, after all passes."""

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if clear:
            optimizer.zero_grad()
        return loss

    graph = trace(step, (model, optimizer), X).graph
    for name, one in PASSES.items():
        graph = verify(one(graph), name)
    return graph


def ops(graph: StepGraph, module: str, phase: Phase = Phase.UPDATE) -> Counter[str]:
    """How often each op of a phase is filed under a module."""
    infos = ((node, info_of(node)) for node in graph.calls())
    names = (op(node) for node, info in infos if info.phase is phase and info.module == module)
    return Counter(names)


def op(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def test_updates_are_filed_under_the_owners_of_the_parameters() -> None:
    model = Tied()
    graph = captured(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert ops(graph, "first.0")["_fused_adamw.tensor_lr"] == 2
    assert ops(graph, "second")["_fused_adamw.tensor_lr"] == 1
    assert ops(graph, "third")["_fused_adamw.tensor_lr"] == 0
    updates = Counter(op(node) for node in graph.calls() if info_of(node).phase is Phase.UPDATE)
    owned = ops(graph, "first.0") + ops(graph, "second") + ops(graph, "third")
    shared = ops(graph, "")
    assert owned + shared == updates
    factor = ["stack", "sum", "sqrt", "add.Tensor", "reciprocal", "mul.Tensor", "clamp"]
    assert shared == Counter(factor), "the norm of all gradients, and the factor it gives, are nobody's"


def test_each_gradient_is_clipped_in_its_own_module() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    graph = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for module in ("0", "2"):  # one product for the norm, one by the factor, for a weight and a bias
        assert ops(graph, module)["mul.Tensor"] == 4
    assert ops(graph, "0") == ops(graph, "2")


def test_accumulated_gradients_are_filed_under_the_owner() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    graph = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), clear=False)
    for module in ("0", "2"):
        assert ops(graph, module, Phase.BACKWARD)["add.Tensor"] == 2


def test_phases_and_modules_that_are_known_stay() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum() + model.second.weight.sum()
        loss.backward()
        optimizer.step()
        return loss

    before = trace(step, (model, optimizer), X).graph
    text = before.text()
    after = verify(name_owners(before), "name-owners")
    assert before.text() == text
    assert "".join(line.partition("#")[0] for line in after.text().splitlines()) == "".join(
        line.partition("#")[0] for line in text.splitlines()
    )
    changed = []
    for old, new in zip(before.calls(), after.calls(), strict=True):
        was, now = info_of(old), info_of(new)
        assert (was.phase, was.source, was.sequence) == (now.phase, now.source, now.sequence)
        assert now.module == was.module or (was.module == "" and was.phase is not Phase.FORWARD)
        changed.append(was.module != now.module)
    assert any(changed)
