"""The shorter way into torch's trace: which ops take it, and that the trace is the one torch makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from monoflow.capture.record import Recorder, Recording


class Noting(Recorder):
    """Notes which ops do not go the short way."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[str] = []

    def record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = super().record(func, args, kwargs)
        if result is NotImplemented and func.namespace != "prim":  # a question, no op of the trace
            self.others.append(str(func).removeprefix("aten."))
        return result


def both(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[fx.Graph, fx.Graph, list[str]]:
    """The trace with the short way, torch's own, and the ops that did not go the short way."""
    traces, mode = [], Recording()
    mode.recorder = noting = Noting()
    for short in (True, False):
        with FakeTensorMode() as fakes:
            inputs = [torch.empty(shape) for shape in shapes]

        def run(*tensors: Tensor, short: bool = short, fakes: FakeTensorMode = fakes) -> Any:
            with fakes:
                if short:
                    with mode:
                        return function(*tensors)
                return function(*tensors)

        graph = make_fx(run)(*inputs).graph
        graph.eliminate_dead_code(lambda node: node.op != "call_function" or "_." in str(node.target))
        traces.append(graph)
    return traces[0], traces[1], noting.others


def lines(graph: fx.Graph) -> list[tuple]:
    """Per node: what it calls on what, and how its values look."""
    order = {node: number for number, node in enumerate(graph.nodes)}

    def looks(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        return type(value)(map(looks, value)) if isinstance(value, (list, tuple)) else value

    return [
        (
            node.name,
            str(node.target),
            str(fx.map_arg((node.args, node.kwargs), lambda one: order[one])),  # type: ignore[arg-type,return-value]
            looks(node.meta.get("val")),
        )
        for node in graph.nodes
        if node.op != "placeholder"
    ]


def layer(w: Tensor, x: Tensor) -> list[Tensor]:
    w = w.detach().requires_grad_()
    h = torch.nn.functional.layer_norm(x @ w.t(), (5,)).relu()
    low, high = torch.aminmax(h, dim=0)
    (h.sum() + (high - low).sum(dtype=torch.float64)).backward()
    return [h, w.grad]  # pyright: ignore[reportReturnType]


def writes(x: Tensor, y: Tensor) -> list[Tensor]:
    z = torch.zeros(3, 4)
    z[1:].copy_(y[:2])
    z.t().mul_(2)
    torch._foreach_add_([x, z], 1.0)  # pyright: ignore[reportPrivateImportUsage]
    a, b = x.split(2)
    return [z, a, b.add_(1), torch.cat([x, y[:1]])]


@pytest.mark.parametrize(
    ("function", "shapes"), [(layer, ((5, 4), (3, 4))), (writes, ((3, 4), (3, 4)))], ids=["layer", "writes"]
)
def test_the_trace_is_torchs_own(function: Callable, shapes: Sequence[tuple[int, ...]]) -> None:
    short, whole, others = both(function, *shapes)
    assert lines(short) == lines(whole)
    assert not others
    assert len(lines(short)) > 10


def test_what_needs_torchs_own_way_takes_it() -> None:
    def function(x: Tensor) -> list[Tensor]:
        two = torch.tensor(2.0)  # a known value
        assert two.item() == 2.0
        return [x * two, x + two.neg(), torch.nn.functional.dropout(x)]

    short, whole, others = both(function, (3, 4))
    assert lines(short) == lines(whole)
    assert {"lift_fresh.default", "mul.Tensor", "neg.default", "add.Tensor"} <= set(others)
    assert any("dropout" in name or "bernoulli" in name for name in others)


def test_an_op_that_fails_leaves_the_trace_as_it_was() -> None:
    def function(x: Tensor) -> list[Tensor]:
        with pytest.raises(RuntimeError, match="reduction dim"):
            torch.ops.aten.mm.default(x, x)
        return [x + 1]

    short, _, _ = both(function, (3, 4))
    assert [line[1] for line in lines(short)][:-1] == ["aten.add.Tensor"]


def test_ops_that_torch_decomposes_are_left_to_it() -> None:
    def function(x: Tensor) -> list[Tensor]:
        with Recording(others=(torch.ops.aten.silu.default,)):
            return [torch.nn.functional.silu(x) + 1]

    with FakeTensorMode() as mode:
        x = torch.empty(3)
    form = {torch.ops.aten.silu.default: lambda x: x * x.sigmoid()}
    graph = make_fx(function, decomposition_table=form)(x).graph  # type: ignore[arg-type]
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == [
        "aten.sigmoid.default",
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]
    assert all(node.meta["val"].fake_mode is mode for node in graph.nodes if node.op == "call_function")


def test_memory_shared_by_views_is_shared_by_what_the_trace_keeps() -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x * 2
        return [y, y.t(), y.relu()]

    short, _, _ = both(function, (3, 4))
    mul, t, relu = (
        node.meta["val"].untyped_storage()._cdata for node in short.nodes if "aten" in str(node.target)
    )
    assert mul == t != relu
