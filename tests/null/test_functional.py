"""Writes become values: what is copied, what runs again, and that both give the same graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from monoflow.capture import functional as functional_module
from monoflow.capture import trace as capture_module
from monoflow.capture.functional import functionalize
from monoflow.capture.writes import Written
from monoflow.graph.passes.clean import clean
from monoflow.graph.step_graph import StepGraph

from .graph_run import Things, trace

aten = torch.ops.aten


def traced(
    function: Callable[..., Sequence[Tensor]], *shapes: tuple[int, ...]
) -> tuple[fx.GraphModule, list]:
    """The ops of a function on fakes of float32, and those."""
    with FakeTensorMode() as mode:
        fakes = [torch.empty(shape) for shape in shapes]
    with mode:
        made = make_fx(function)(*fakes)
    assert isinstance(made, fx.GraphModule)
    return made, fakes


# --- what is written to ----------------------------------------------------------------------------


def written(function: Callable[..., Sequence[Tensor]], *shapes: tuple[int, ...]) -> list[str]:
    """The ops whose results are, or share memory with, what is written to."""
    made, fakes = traced(function, *shapes)
    found = Written(made.graph, fakes)
    return [str(node.target) for node in made.graph.nodes if node.op != "output" and found.touches(node)]


def test_what_shares_memory_with_a_write_is_found() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        early = x.t()
        z = x * 2
        part = z[0]
        part.add_(1)
        return [early, z.sum(), y + 1]

    assert written(function, (3, 4), (2,)) == ["aten.mul.Tensor", "aten.select.int", "aten.add_.Tensor"]


def test_views_of_an_input_that_is_written_to_later_are_found() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        early = x.t()
        total = early.sum()
        x.copy_(y)
        return [total]

    assert written(function, (3, 4), (3, 4)) == ["x_1", "aten.t.default", "aten.copy_.default"]


def test_every_part_of_a_split_and_every_tensor_of_a_list_is_found() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = (x * 2).split(2)
        c = y * 3
        torch._foreach_add_([a, c], 1)  # pyright: ignore[reportPrivateImportUsage]
        return [a, b, c]

    assert written(function, (4,), (2,)) == [
        "aten.mul.Tensor",
        "aten.split.Tensor",
        "<built-in function getitem>",
        "<built-in function getitem>",
        "aten.mul.Tensor",
    ]


def test_each_output_of_an_op_is_memory_of_its_own() -> None:
    def function(x: Tensor) -> list[Tensor]:
        low, high = torch.aminmax(x, dim=0)
        return [low.add_(1), high * 2]

    made, fakes = traced(function, (3, 4))
    found = Written(made.graph, fakes)
    picks = [found.touches(node) for node in made.graph.nodes if "getitem" in str(node.target)]
    assert picks == [True, False]


def test_a_write_matters_where_it_can_be_seen() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        early = x.t()
        total = early.sum()
        through = x.view(6, 2)  # is read early, but not the view of it
        late = through[0]
        z = y * 2
        w = z + 1
        z.mul_(w)
        x.copy_(y)
        return [total, late.sum(), z]

    made, fakes = traced(function, (3, 4), (3, 4))
    found = Written(made.graph, fakes)
    matters = {node.name for node in made.graph.nodes if node.op == "call_function" and found.matters(node)}
    assert matters == {"view", "select", "copy_"}
    graph = functionalize(made, fakes).graph
    again = functionalize(*traced(function, (3, 4), (3, 4)), copy_nodes=False).graph
    assert ordered(graph) == ordered(again)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    given = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(x.clone(), y.clone())
    for one, other in zip(given, function(x, y), strict=True):
        assert torch.equal(one, other)


def ordered(graph: fx.Graph) -> list[tuple]:
    """What nodes call on which others, those called by their order."""
    number = {node: at for at, node in enumerate(graph.nodes)}
    return [
        (node.op, node.op == "placeholder" or node.target, str(fx.map_arg(node.args, number.__getitem__)))
        for node in graph.nodes
    ]


def test_statistics_are_written_though_no_schema_says_so() -> None:
    def function(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        y = aten.cudnn_batch_norm.default(x, w, w, mean, var, True, 0.1, 1e-5)[0]
        return [y, mean + 1]

    shapes = (4, 3, 2), (3,), (3,), (3,)
    assert "mean_1" in written(function, *shapes)
    made, fakes = traced(function, *shapes)
    graph = functionalize(made, fakes).graph
    (write, _) = [node for node in graph.nodes if node.target is aten.copy_.default]
    (plus,) = [node for node in graph.nodes if node.target is aten.add.Tensor and node.args[1] == 1]
    assert plus.args[0] in (write, write.args[1]), "the sum is of the new mean"


def test_a_form_that_writes_without_a_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [aten.hypot.default(x * 2, y)]

    def form(x: Tensor, y: Tensor) -> Tensor:
        return x.copy_(y) + 1

    monkeypatch.setattr(functional_module, "table", lambda _: {aten.hypot.default: form})
    made, fakes = traced(function, (3,), (3,))
    with pytest.raises(AssertionError, match="hypot writes to mul, and its op does not say so"):
        functionalize(made, fakes)


# --- both ways give the same graph -----------------------------------------------------------------


class Mixed(nn.Module):
    """What makes capture's second half work: tied weights, statistics, writes through views, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.bn, self.norm = nn.BatchNorm1d(6), nn.LayerNorm(6)
        self.q, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(2, 6))
        self.scale = torch.full((6,), 1.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.bn(x.flatten(0, 1)).view_as(x)
        seen = self.get_buffer("seen")
        before = seen.sum()
        seen[0].add_(x.detach().mean((0, 1)))
        seen.t()[2].mul_(0.5)
        y = self.norm(self.q(x)) * self.scale + seen[0] + before
        z = torch.zeros_like(y)
        z[:, 1:] = y[:, :-1]
        z[:, 0] = 1.0
        return self.head(self.drop(z.transpose(1, 2).contiguous().transpose(1, 2)))


def mixed(kind: Callable[..., torch.optim.Optimizer], *, clear: bool = True) -> tuple[Callable, Things]:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = kind(model.parameters())

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if clear:
            optimizer.zero_grad()
        return loss

    return step, (model, optimizer)


STEPS: dict[str, Callable[[], tuple[Callable, Things]]] = {
    "adamw": lambda: mixed(partial(torch.optim.AdamW, lr=0.1)),
    "momentum, gradients kept": lambda: mixed(partial(torch.optim.SGD, lr=0.1, momentum=0.9), clear=False),
    "plain tensor ops": lambda: mixed(partial(torch.optim.Adadelta, lr=0.1)),
}
IDS = torch.arange(12).reshape(3, 4) % 7


@pytest.mark.parametrize("name", STEPS)
def test_copied_nodes_are_those_that_a_second_run_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, things = STEPS[name]()
    copied = trace(step, things, IDS, IDS).graph
    ran = []

    def run_all(*args: object, **kwargs: object) -> fx.GraphModule:
        ran.append(True)
        return functionalize(*args, **kwargs, copy_nodes=False)  # type: ignore[arg-type]

    monkeypatch.setattr(capture_module, "functionalize", run_all)
    whole = trace(step, things, IDS, IDS).graph
    # Where a write is a change of names, no views are taken anew that undo each other.
    copied, whole = clean(copied), clean(whole)
    assert ran and text(copied) == text(whole)
    assert strides(copied) == strides(whole)


def text(graph: StepGraph) -> str:
    """The text form, with nodes called by their order."""
    names: dict[str, str] = {}
    return re.sub(r"%\w+", lambda found: names.setdefault(found[0], f"%{len(names)}"), graph.text())


def strides(graph: StepGraph) -> list[tuple[int, ...]]:
    values = [node.meta["val"] for node in graph.calls()]
    return [value.stride() for value in values if isinstance(value, Tensor)]


def test_only_what_a_write_or_a_form_needs_runs_again() -> None:
    def function(w: Tensor, x: Tensor) -> list[Tensor]:
        h = torch.mm(x, w.t()).relu()
        loss = h.mean()
        w.sub_(torch.mm(h.t(), x))
        return [loss, w.t() + 1]

    made, fakes = traced(function, (5, 4), (3, 4))
    vals = {id(node.meta["val"]): str(node.target) for node in made.graph.nodes if node.op == "call_function"}
    functional = functionalize(made, fakes)
    kept = [vals.get(id(node.meta["val"])) for node in functional.graph.nodes if node.op == "call_function"]
    ops = [str(node.target) for node in functional.graph.nodes if node.op == "call_function"]
    assert dict(zip(ops, kept, strict=True)) == {
        "aten.t.default": "aten.t.default",
        "aten.mm.default": "aten.mm.default",
        "aten.relu.default": "aten.relu.default",
        "aten.sum.dim_IntList": None,
        "aten.div.Tensor": None,
        "aten.sub.Tensor": None,
        "aten.add.Tensor": "aten.add.Tensor",
        "aten.copy_.default": None,
    }


def test_a_changed_order_in_memory_is_followed() -> None:
    """A write keeps the order in memory of what it writes to; its functional form may not."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        z = torch.zeros_like(x)
        z.copy_(y.t())
        return [z.relu().view(12)]

    made, fakes = traced(function, (3, 4), (4, 3))
    functional = functionalize(made, fakes)
    for node in functional.graph.nodes:
        if node.op == "call_function":
            arguments = fx.map_arg(node.args, lambda one: one.meta["val"])
            with fakes[0].fake_mode:
                again = node.target(*arguments, **node.kwargs)
            assert again.stride() == node.meta["val"].stride(), node


# --- writes that are only names --------------------------------------------------------------------


def renames(function: Callable[..., Sequence[Tensor]], *shapes: tuple[int, ...]) -> dict[str, bool]:
    """The ops that write, and whether each is only a change of names; asserts that all are computed right."""
    made, fakes = traced(function, *shapes)
    found = Written(made.graph, fakes)
    told = {node.name: found.renames(node) for node in made.graph.nodes if "_." in str(node.target)}
    graph = functionalize(made, fakes).graph
    assert not any("_." in str(node.target) for node in graph.nodes if node.target is not aten.copy_.default)
    values = [torch.randn(shape) for shape in shapes]
    for node in graph.nodes:
        if node.op == "call_function":
            given = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
            with fakes[0].fake_mode:
                again = node.target(*given[0], **given[1])
            if isinstance(again, Tensor):
                assert (again.shape, again.stride(), again.dtype) == (
                    node.meta["val"].shape, node.meta["val"].stride(), node.meta["val"].dtype
                ), node  # fmt: skip
    eager, own = [one.clone() for one in values], [one.clone() for one in values]
    results = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*own)
    for one, other in zip([*results, *own], [*function(*eager), *eager], strict=True):
        assert torch.equal(one, other)
    return told


def test_a_write_to_a_tensor_alone_is_a_change_of_names() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        z = (x.t() @ y).t().detach()  # a view, but nobody reads what it is a view of any more
        before = z * 2
        after = z.mul_(3).add_(before)
        late = z.t()  # a view of what z is by now
        x.copy_(y.view(3, 4))
        return [after, z + 1, late.sum(), x * 2]

    assert renames(function, (3, 4), (3, 4)) == {"mul_": True, "add_": True, "copy_": True}


def test_a_write_that_another_tensor_sees_is_more() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        row = x[0]
        x.mul_(2)
        z = y * 2
        z[0].add_(1)
        return [row + 1, z]

    assert renames(function, (3, 4), (3, 4)) == {"mul_": False, "add_": False}


def test_a_view_is_read_by_the_write_itself_at_the_latest() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        t = y.t()
        y.add_(t.relu())
        u = x.t()
        x.mul_(2)
        x.add_(u.relu())  # u is twice what it was
        return [y.sum(), x.sum()]

    assert renames(function, (3, 3), (3, 3)) == {"add_": True, "mul_": False, "add__1": False}


def test_a_write_keeps_the_type_of_what_it_writes_to() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        low = x.to(torch.float64)
        x.add_(low.sum() * torch.ones(3, dtype=torch.float64))
        z = torch.zeros_like(x).copy_(y.t())
        return [x * 2, z.relu().view(12)[:3]]

    assert all(renames(function, (4, 3), (3, 4)).values())


def test_a_list_is_renamed_whole_or_not_at_all() -> None:
    def alone(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = x * 2, y * 3
        torch._foreach_mul_([a, b], 2.0)  # pyright: ignore[reportPrivateImportUsage]
        return [a + 1, b]

    def seen(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = x * 2, y * 3
        row = b[0]
        torch._foreach_mul_([a, b], 2.0)  # pyright: ignore[reportPrivateImportUsage]
        a.add_(1)
        return [a + 1, row]

    assert renames(alone, (3, 4), (3, 4)) == {"_foreach_mul_": True}
    assert renames(seen, (3, 4), (3, 4)) == {"_foreach_mul_": False, "add_": False}


def test_writes_to_inputs_are_left_in_the_order_of_the_inputs() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        z.add_(1)
        row = y[0]
        y.mul_(2)
        x.sub_(1)
        return [row + 1]

    assert renames(function, (3, 4), (3, 4), (3, 4)) == {"add_": True, "mul_": False, "sub_": True}
    made, fakes = traced(function, (3, 4), (3, 4), (3, 4))
    graph = functionalize(made, fakes).graph
    whole = functionalize(*traced(function, (3, 4), (3, 4), (3, 4)), copy_nodes=False).graph
    for one in (graph, whole):
        written = [str(node.args[0]) for node in one.nodes if node.target is aten.copy_.default]
        assert written == [node.name for node in one.nodes if node.op == "placeholder"]
