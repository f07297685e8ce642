"""Tasks in pieces: where they are cut, what is shared, and that they compute what the ops do.

The compiler is a stand-in that runs the ATen form op by op; the real one is in tests/local/test_compiled.py.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config, cpp_builder, exc
from torch._inductor.runtime import cache_dir_utils

from monoflow.lower import building, compiled, inductor
from monoflow.lower.compiled import Library
from monoflow.lower.inductor import Compiling, Submit
from monoflow.lower.local import update_in_place
from monoflow.lower.pieces import Look, draw_at_once, layer_of_module
from monoflow.runtime.program import task_module
from monoflow.sbp.ops import pack_runs
from monoflow.sbp.ops.random import draw, lanes, states

aten, own = torch.ops.aten, torch.ops.monoflow
Tensor = torch.Tensor


def op_by_op(module: fx.GraphModule, inputs: Sequence[Tensor], submit: Submit) -> Compiling:
    """Stands in for the compiler."""

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        given = list(tensors)
        tensors.clear()
        return module(*given)

    return lambda: (run, None)


def at_once(function: Callable[[], None]) -> Future:
    """Stands in for threads."""
    future: Future = Future()
    future.set_result(function())
    return future


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_graph", op_by_op)


class Layers:
    """A task with layers of one kind between an embedding and a sum, as lowering makes them."""

    def __init__(self, num_layers: int = 3, shift: Callable[[int], Any] = lambda layer: torch.neg) -> None:
        self.graph, self.modules = fx.Graph(), {}
        table, index, key = (self.graph.placeholder(name) for name in ("table", "index", "key"))
        weights = [self.graph.placeholder(f"weight{layer}") for layer in range(num_layers)]
        x = self._call("", aten.embedding.default, table, index)
        for layer, weight in enumerate(weights):
            x = self._layer(f"blocks.{layer}", x, weight, key, layer, shift(layer))
        loss = self._call("head", aten.sum.default, x)
        self.graph.output([loss, x])
        self.module = task_module(self.graph)

    def _call(self, module: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        name = target.__name__.split(".")[0]
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        self.modules[node.name] = module
        return node

    def _layer(self, name: str, x: Any, weight: Any, key: Any, number: int, shift: Any) -> fx.Node:
        call = partial(self._call, name)
        y = x
        for _ in range(10):
            y = call(aten.relu.default, call(aten.mm.default, y, weight))
            y = call(aten.add.Tensor, y, x)
        chance = call(own.uniform.default, key, 100 + number, [5, 4], dtype=torch.float32)
        return call(shift, call(aten.mul.Tensor, y, call(aten.lt.Scalar, chance, 0.9)))

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(0)
        num_weights = len(self.graph.find_nodes(op="placeholder")) - 3
        first = [torch.randn(6, 4), torch.tensor([1, 0, 5, 5, 2]), torch.tensor(17)]
        return first + [torch.randn(4, 4) / 4 for _ in range(num_weights)]

    def compiled(self, library: Library | None = None) -> compiled.CompiledTask:
        looks = [Look.of(one) for one in self.inputs()]
        library = Library() if library is None else library
        return compiled.compiled(self.module, looks, library, self.modules.get, lambda name: f"<{name}>")


def test_equal_layers_share_their_code():
    library = Library()
    task = Layers().compiled(library)
    shared = [step.code for step in task.steps if len(step.piece.nodes) > 30]
    assert len(shared) == 3 and len(set(shared)) == 1
    assert len(library.codes) == 1  # embedding and loss are too small
    Layers().compiled(library)
    assert len(library.codes) == 1


def test_layers_whose_functions_hold_other_values_do_not():
    def plus(number: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x + number

    library = Library()
    Layers(shift=lambda layer: plus(min(layer, 1))).compiled(library)
    assert len(library.codes) == 2  # the first, and the second as the third
    library = Library()
    Layers(shift=lambda layer: plus(7)).compiled(library)  # three functions of one code and one value
    assert len(library.codes) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_compiled_task_computes_what_the_ops_do_and_takes_its_inputs():
    layers = Layers()
    task = layers.compiled()
    expected = layers.module.forward(layers.inputs())
    for build in (False, True):
        if build:
            task.build(at_once)
        given = layers.inputs()
        found = task.forward(given)
        assert given == []
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
    assert all(step.code.is_compiled for step in task.steps if step.code is not None)


@pytest.mark.usefixtures("stand_in")
def test_inputs_that_lie_otherwise_are_laid_out_and_other_shapes_refused():
    layers = Layers()
    task = layers.compiled()
    task.build(at_once)
    given = layers.inputs()
    expected = layers.module.forward(layers.inputs())
    given[3] = given[3].t().contiguous().t()
    torch.testing.assert_close(task.forward(given), expected)
    given = layers.inputs()
    given[4] = given[4][:3]
    with pytest.raises(AssertionError, match=r"compiled for \(4, 4\) is given \(3, 4\)"):
        task.forward(given)


def update_task() -> fx.GraphModule:
    """An SGD update of a weight by a gradient that is a chain of ops, and a result that reads the weight."""
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    y = graph.call_function(aten.mm.default, (x, weight))
    for _ in range(8):
        y = graph.call_function(aten.sin.default, (y,))
    options: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False, "is_first_step": False}
    done = graph.call_function(update_in_place, (aten._fused_sgd_.default, [weight], [y], []), options)
    lists = graph.call_function(operator.getitem, (done, 0))
    updated = graph.call_function(operator.getitem, (lists, 0))
    graph.output([graph.call_function(aten.sum.default, (y,)), updated])
    return task_module(graph)


@pytest.mark.usefixtures("stand_in")
def test_updates_are_written_in_place():
    module = update_task()
    torch.manual_seed(0)
    weight, x = torch.randn(3, 3), torch.randn(3, 3)
    expected = weight - 0.5 * (lambda y: [y := y.sin() for _ in range(8)][-1])(x @ weight)
    task = compiled.compiled(module, [Look.of(weight), Look.of(x)], Library())
    task.build(at_once)
    _, updated = task.forward([weight, x])
    torch.testing.assert_close(weight, expected)
    assert updated.data_ptr() == weight.data_ptr()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("op", "size"), [("embedding", 6), ("gather", 6), ("index", 6), ("scatter", 6)])
@pytest.mark.parametrize("wrong", [6, -7])
def test_an_index_out_of_range_is_named(op: str, size: int, wrong: int):
    graph = fx.Graph()
    source, rows = graph.placeholder("source"), graph.placeholder("rows")
    shifted = graph.call_function(aten.add.Tensor, (rows, 0))
    call: dict[str, tuple[Any, tuple]] = {
        "embedding": (aten.embedding.default, (source, shifted)),
        "gather": (aten.gather.default, (source, 0, shifted)),
        "index": (aten.index.Tensor, (source, [shifted])),
        "scatter": (aten.scatter.value, (source, 0, shifted, 1.0)),
    }
    y = graph.create_node("call_function", *call[op], name=op)
    for _ in range(6):
        y = graph.call_function(aten.cos.default, (y,))
    graph.output([y])
    table = torch.randn(size, 2)
    right = torch.tensor([[0, 5], [3, 3]])
    task = compiled.compiled(
        task_module(graph), [Look.of(table), Look.of(right)], Library(), describe=lambda name: f"<{name}>"
    )
    task.build(at_once)
    torch.testing.assert_close(task.forward([table, right]), task_module(graph).forward([table, right]))
    with pytest.raises(IndexError, match=f"index {wrong} is out of range for {size} rows") as caught:
        task.forward([table, torch.tensor([[0, wrong], [3, 3]])])
    assert any(f"<{op}>" in note for note in caught.value.__notes__)


def test_random_numbers_at_once_are_those_of_the_op():
    key = torch.tensor(5)
    runs = pack_runs([[(2, 4), (6, 7)], [(0, 5)]])
    for kind, dtype in (("uniform", torch.float32), ("normal", torch.float64), ("bits", torch.int64)):
        state = states(key, lanes(kind, 77))
        given: dict[str, Any] = {"dtype": dtype, "global_shape": [8, 5], "runs": runs}
        assert torch.equal(draw_at_once(kind, state, [3, 5], **given), draw(kind, state, [3, 5], **given))


def test_what_does_not_compile_runs_op_by_op_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fails(module: fx.GraphModule, inputs: Sequence[Tensor], submit: Submit) -> Any:
        raise NotImplementedError("no kernel for this\nmore lines")

    monkeypatch.setattr(compiled, "compile_graph", fails)
    layers = Layers()
    task = layers.compiled()
    with caplog.at_level(logging.WARNING, "monoflow.lower"):
        task.build(at_once)
        task.build(at_once)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "NotImplementedError: no kernel for this" in told[0] and "<mm>" in told[0]
    torch.testing.assert_close(task.forward(layers.inputs()), layers.module.forward(layers.inputs()))


def test_layers_are_named_by_the_first_number():
    names = ["transformer.h.3.attn.c_attn", "layer1.0.conv1", "blocks.12", "0.weight", "wte", "head2.x"]
    assert [layer_of_module(name) for name in names] == [
        "transformer.h.3",
        "layer1.0",
        "blocks.12",
        "0",
        "",
        "",
    ]


# --- when ------------------------------------------------------------------------------------------


def builder(beside: bool) -> building.Builder:
    layers = Layers()
    return building.Builder(Library(), layers.modules.get, lambda name: f"<{name}>", beside)


@pytest.mark.usefixtures("stand_in")
def test_ahead_a_task_is_compiled_before_it_first_runs():
    layers, made = Layers(), builder(False)
    function = building.TaskFunction(layers.module, made)
    torch.testing.assert_close(function.forward(layers.inputs()), layers.module.forward(layers.inputs()))
    assert function.is_compiled and all(code.is_compiled for code in made.library.codes.values())


@pytest.mark.usefixtures("stand_in")
def test_in_the_background_the_compiler_starts_once_ops_took_long(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(100))
    monkeypatch.setattr(building, "perf_counter", lambda: next(clock))  # a run takes a second
    layers, made = Layers(), builder(True)
    function = building.TaskFunction(layers.module, made)
    expected = layers.module.forward(layers.inputs())
    function.forward(layers.inputs())
    assert made._thread is None and not function.is_compiled and not made.library.codes
    torch.testing.assert_close(function.forward(layers.inputs()), expected)
    assert made._thread is not None
    made.join()
    assert function.is_compiled
    torch.testing.assert_close(function.forward(layers.inputs()), expected)


def test_an_op_that_fails_is_named_before_and_after_compiling(monkeypatch: pytest.MonkeyPatch):
    layers, made = Layers(), builder(False)
    monkeypatch.setattr(compiled, "compile_graph", op_by_op)
    function = building.TaskFunction(layers.module, made)
    given = layers.inputs()
    given[1] = torch.tensor([1, 0, 6, 5, 2])
    with pytest.raises(IndexError) as caught:
        function.forward(given)
    assert any("<embedding>" in note for note in caught.value.__notes__)


def test_a_compiler_is_there_or_its_lack_is_told(monkeypatch: pytest.MonkeyPatch):
    assert inductor.missing_compiler(torch.device("cpu")) == ""

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert "C++ compiler" in inductor.missing_compiler(torch.device("cpu"))


def test_the_folder_is_torchs_own_and_settings_are_what_differs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert inductor.cache_folder() == Path(cache_dir_utils.default_cache_dir(), "monoflow")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert inductor.cache_folder() == Path("/elsewhere/monoflow")

    before = inductor.settings()
    with config.patch({"cpp.simdlen": 256}):
        assert "simdlen=256" in inductor.settings() and "simdlen" not in before
    assert inductor.settings() == before


def test_without_a_compiler_it_is_told_once_and_ops_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(compiled, "missing_compiler", lambda device: "there is no C++ compiler")
    building._tell_once.cache_clear()
    layers = Layers()
    with caplog.at_level(logging.WARNING, "monoflow.lower"):
        for beside in (False, True):
            made = builder(beside)
            for function in (building.TaskFunction(layers.module, made) for _ in range(2)):
                for _ in range(2):
                    expected = layers.module.forward(layers.inputs())
                    torch.testing.assert_close(function.forward(layers.inputs()), expected)
                made.join()
                assert not function.is_compiled
    building._tell_once.cache_clear()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["steps run op by op: there is no C++ compiler"]


def test_what_begins_as_layers_do_is_cut_behind_that():
    layers = Layers()
    *_, loss, _ = list(layers.graph.nodes)
    with layers.graph.inserting_before(loss):
        x = layers.graph.call_function(aten.sum.dim_IntList, (loss.args[0], [0]))
    layers.modules[x.name] = "blocks.2"
    results: Any = layers.graph.output_node().args[0]
    layers.graph.output_node().args = ([*results, x],)
    layers.module = task_module(layers.graph)
    task = layers.compiled()
    shared = [step.code for step in task.steps if len(step.piece.nodes) > 30]
    assert len(shared) == 3 and len(set(shared)) == 1
    expected = layers.module.forward(layers.inputs())
    torch.testing.assert_close(task.forward(layers.inputs()), expected)


def test_an_op_is_done_once_on_the_same_arguments():
    graph = fx.Graph()
    x = graph.placeholder("x")
    twice = [graph.call_function(aten.exp.default, (x,)) for _ in range(2)]
    graph.output([graph.call_function(aten.mul.Tensor, (twice[0], twice[1]))])
    found = inductor.without_repeats(graph)
    assert len(found.find_nodes(op="call_function", target=aten.exp.default)) == 1
