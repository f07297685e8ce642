"""Results of ops on fakes are remembered: they are what torch gives, and what cannot be known is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from monoflow.capture.results import Call, Results
from monoflow.graph.step_graph import StepGraph

from .graph_run import Things, trace
from .test_functional import IDS, STEPS, strides, text

aten = torch.ops.aten


def fakes(*shapes: tuple[int, ...]) -> tuple[FakeTensorMode, list[Any]]:
    with FakeTensorMode() as mode:
        return mode, [torch.empty(shape) for shape in shapes]


def call_of(op: Any, *args: Any) -> Call:
    call = Call(op)
    for one in args:
        call.tensor(one) if isinstance(one, FakeTensor) else call.value(str(one))
    return call


def again(mode: FakeTensorMode, op: Any, first: tuple, second: tuple) -> Any:
    """What is remembered for the second arguments from a call with the first; None if nothing is."""
    results = Results()
    with mode:
        learned = call_of(op, *first)
        results.learn(learned, op, op(*first))
        return results.of(call_of(op, *second))


def looks(value: Tensor) -> tuple:
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad


CALLS: dict[str, tuple[Any, Callable[[Tensor], tuple]]] = {
    "memory of its own": (aten.mm.default, lambda x: (x, x.t())),
    "a view": (aten.slice.Tensor, lambda x: (x, 1, 1, 3)),
    "no schema says that it is a view": (aten._unsafe_view.default, lambda x: (x, [6, 4])),
    "a copy of another dtype": (aten._to_copy.default, lambda x: (x,)),
    "views of a list": (aten.split.Tensor, lambda x: (x, 2, 1)),
    "several": (aten.native_layer_norm.default, lambda x: (x, [6], None, None, 1e-5)),
    "the argument": (aten.mul_.Tensor, lambda x: (x, 2.0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered_is_what_torch_gives(name: str) -> None:
    op, arguments = CALLS[name]
    mode, (x, y) = fakes((4, 6), (4, 6))
    first, second = arguments(x), arguments(y)
    found = again(mode, op, first, second)
    assert found is not None
    with mode:
        real = op(*second)
    for live, kept, one in zip(*(flat(tree) for tree in (*found, real)), strict=True):
        assert looks(live) == looks(one) and looks(kept) == looks(one)
        storages = {value.untyped_storage()._cdata for value in (live, kept)}
        assert len(storages) == 1, "the trace keeps the same memory"
        shares = one.untyped_storage()._cdata == y.untyped_storage()._cdata
        assert (y.untyped_storage()._cdata in storages) is shares
        assert one.untyped_storage().nbytes() == live.untyped_storage().nbytes()
        assert (live is y) is (one is y)
        assert vars(kept).keys() == vars(one).keys() and kept.constant is None


def flat(tree: Any) -> list[Any]:
    return [one for part in tree for one in flat(part)] if isinstance(tree, (list, tuple)) else [tree]


def test_numbers_of_other_types_are_other_calls() -> None:
    mode, (x,) = fakes((3,))
    whole = x.to(torch.int64)
    assert again(mode, aten.mul.Tensor, (whole, 2), (whole, 2)) is not None
    assert again(mode, aten.mul.Tensor, (whole, 2), (whole, 2.0)) is None
    assert again(mode, aten.mul.Tensor, (x, 1), (x, True)) is None


def test_looks_of_arguments_tell_calls_apart() -> None:
    mode, (x, y) = fakes((3, 4), (4, 3))
    t = y.t()
    assert t.shape == x.shape
    assert again(mode, aten.relu.default, (x,), (t,)) is None
    assert again(mode, aten.relu.default, (x,), (x.to(torch.float64),)) is None
    z = torch.imag(torch.empty(3, 4, dtype=torch.complex64, device="meta"))
    assert z.is_neg() is False
    with mode:
        conj = torch.empty(3, 4, dtype=torch.complex64).conj()
        plain, negative = torch.view_as_real(torch.empty(3, 4, dtype=torch.complex64))[..., 1], conj.imag
    assert negative.is_neg() and again(mode, aten.relu.default, (plain,), (negative,)) is None


def test_what_one_call_does_not_tell_of_the_next_is_not_remembered() -> None:
    mode, (x, y) = fakes((4, 4), (4, 4))
    same = x.view(4, 4)
    assert again(mode, aten.add_.Tensor, (x, x), (x, y)) is None, "either argument could be what is given"
    assert again(mode, aten.expand.default, (x, [4, 4]), (y, [4, 4])) is not None
    assert same is not x
    assert again(mode, aten.unsqueeze_.default, (same, 0), (y, 0)) is None, "changes how its argument looks"
    _, (other,) = fakes((4, 4))
    assert again(mode, aten.relu.default, (x,), (other,)) is None, "a fake of another mode"


def test_ops_of_others_are_not_remembered() -> None:
    with torch.library._scoped_library("monoflow_test_results", "FRAGMENT") as library:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x.clone(), "Meta")
        op = torch.ops.monoflow_test_results.f.default
        mode, (x, y) = fakes((3,), (3,))
        assert again(mode, op, (x,), (y,)) is None


class Layer(nn.Module):
    """Attention, a norm, and what views, casts and writes are common between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).unbind(2)
        y = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True)
        mask = torch.zeros(x.shape[1], dtype=torch.bool)
        mask[0] = True
        y = torch.where(mask[None, :, None], x, self.out(y.transpose(1, 2).flatten(2)))
        return x + F.silu(y.to(torch.bfloat16)).float()


def stack(kind: Callable[..., torch.optim.Optimizer]) -> tuple[Callable, Things]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), *(Layer() for _ in range(3)), nn.Linear(8, 7))
    optimizer = kind(model.parameters(), lr=0.1)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (model, optimizer)


LAYERS: dict[str, Callable[[], tuple[Callable, Things]]] = {
    kind.__name__: partial(stack, kind)
    for kind in (
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
    )
}


def memory(graph: StepGraph) -> list[int]:
    """Which tensors of a graph share memory: a number a storage, in order."""
    numbers: dict[int, int] = {}
    values = [one for node in graph.graph.nodes for one in flat(node.meta.get("val"))]
    held = [one.untyped_storage()._cdata for one in values if isinstance(one, Tensor)]
    return [numbers.setdefault(one, len(numbers)) for one in held]


@pytest.mark.parametrize("name", [*STEPS, *LAYERS])
def test_a_graph_of_remembered_results_is_the_one_of_ops_that_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, things = (STEPS | LAYERS)[name]()
    known: list[bool] = []
    of = Results.of

    def noting(self: Results, call: Call) -> Any:
        found = of(self, call)
        known.append(found is not None)
        return found

    monkeypatch.setattr(Results, "of", noting)
    remembered = trace(step, things, IDS, IDS).graph
    assert sum(known) > len(known) / 3
    monkeypatch.setattr(Results, "of", lambda *_: None)
    ran = trace(step, things, IDS, IDS).graph
    assert remembered.text() == ran.text()
    assert text(remembered) == text(ran) and strides(remembered) == strides(ran)
    assert memory(remembered) == memory(ran)
