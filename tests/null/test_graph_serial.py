"""Saved step graphs come back the same: text, fingerprint, strides, origins, constants and values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from monoflow.compiler import subject_of, trace
from monoflow.errors import FlowError
from monoflow.graph.serial import decode, encode, target_of
from monoflow.graph.step_graph import Role, StepGraph, info_of
from monoflow.graph.verify import verify
from monoflow.lower.lower import lower
from monoflow.mesh import placement
from monoflow.plan.plan import fingerprint
from monoflow.plan.planner import plan_step

from .graph_build import built, values

X = torch.arange(12.0).reshape(3, 4)
Made = tuple[Callable, Sequence[Any], Sequence[Tensor]]


def train(model: nn.Module, loss_of: Callable[..., Tensor], *batch: Tensor) -> Made:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(*args: Tensor) -> Tensor:
        loss = loss_of(*args)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, (model, optimizer), batch


def gpt2() -> Made:
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(0, 32, (2, 8))
    return train(model, lambda ids: model(input_ids=ids, labels=ids).loss, ids)


def bert() -> Made:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(
        BertConfig(**sizes, intermediate_size=16, vocab_size=32, max_position_embeddings=8)
    )
    ids, mask = torch.randint(0, 32, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    labels = ids.masked_fill(ids < 16, -100)
    return train(
        model,
        lambda ids, mask, labels: model(input_ids=ids, attention_mask=mask, labels=labels).loss,
        ids,
        mask,
        labels,
    )


def conv() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1), nn.Flatten(), nn.Linear(64, 2)
    )
    return train(
        model,
        lambda x, y: F.cross_entropy(model(x), y),
        torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last),
        torch.tensor([0, 1, 1, 0]),
    )


def reloaded(graph: StepGraph, tmp_path: Path) -> StepGraph:
    graph.save(tmp_path / "graph.json")
    return verify(StepGraph.load(tmp_path / "graph.json"), "load")


def described(graph: StepGraph) -> list[Any]:
    """What text and fingerprint leave out: strides, devices and whole origins."""

    def one(value: Any) -> Any:
        return (value.shape, value.stride(), value.device) if isinstance(value, Tensor) else value

    return [
        (node.name, info_of(node), [one(value) for value in pytree.tree_leaves(node.meta["val"])])
        for node in graph.graph.nodes
        if node.op != "output"
    ]


@pytest.mark.parametrize("make", [gpt2, bert, conv])
def test_a_captured_model_comes_back_the_same(make: Callable[[], Made], tmp_path: Path) -> None:
    step, things, batch = make()
    graph = trace(step, subject_of(things), batch, {}).graph
    loaded = reloaded(graph, tmp_path)
    assert loaded.text() == graph.text()
    assert fingerprint(loaded) == fingerprint(graph)
    assert described(loaded) == described(graph)
    assert (loaded.inputs, loaded.outputs, loaded.source) == (graph.inputs, graph.outputs, graph.source)
    values_of = [value for node in loaded.graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    assert all(isinstance(value, FakeTensor) for value in values_of if isinstance(value, Tensor))
    assert (tmp_path / "graph.json.safetensors").exists() == bool(graph.constants)


@pytest.mark.parametrize(("make", "name"), [(conv, "data"), (gpt2, "tensor")])
def test_a_loaded_graph_plans_and_lowers_the_same(
    make: Callable[[], Made], name: str, tmp_path: Path
) -> None:
    step, things, batch = make()
    graph = trace(step, subject_of(things), batch, {}).graph
    loaded = reloaded(graph, tmp_path)
    devices = placement("cpu", [0, 1])
    plan, other = (plan_step(one, devices, name) for one in (graph, loaded))
    assert other.text() == plan.text()
    programs, others = (lower(one, [0, 1], torch.device("cpu")).programs for one in (plan, other))
    assert [others[rank].text() for rank in (0, 1)] == [programs[rank].text() for rank in (0, 1)]


def with_constants() -> StepGraph:
    return built(
        lambda x, c, d: [torch.where(d, x * c.t(), -math.inf)],
        {
            "x": (Role.BATCH, X),
            "constant:0": (Role.CONSTANT, (X.to(torch.bfloat16) / 3).t()),
            "constant:1": (Role.CONSTANT, X > 5),
        },
    )


def test_constants_keep_their_values(tmp_path: Path) -> None:
    graph = with_constants()
    loaded = reloaded(graph, tmp_path)
    assert loaded.constants.keys() == graph.constants.keys()
    for name, value in graph.constants.items():
        assert loaded.constants[name].dtype == value.dtype and torch.equal(loaded.constants[name], value)
    want = values(graph, X, *graph.constants.values())
    assert torch.equal(values(loaded, X, *loaded.constants.values())[0], want[0])


def test_lost_constants_are_named(tmp_path: Path) -> None:
    with_constants().save(tmp_path / "graph.json")
    (tmp_path / "graph.json.safetensors").unlink()
    with pytest.raises(FlowError, match=r"constants cannot be read from .*graph\.json\.safetensors"):
        StepGraph.load(tmp_path / "graph.json")


VALUES: list[Any] = [
    None, True, 3, -2, 1.0, 0.1, 1e300, -0.0, math.inf, -math.inf, 1 + 2j, "floor", [1, [2.5, None]],
    (1, (2,)),
    {"a": [1]}, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.device("cpu"), torch.device("meta"),
    torch.strided, torch.sparse_csr, torch.channels_last, torch.preserve_format, 2**62,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_kind_of_argument_comes_back(value: Any) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    back = decode(json.loads(text), {}, FakeTensorMode())
    assert type(back) is type(value) and back == value and repr(back) == repr(value)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(decode(encode(math.nan), {}, FakeTensorMode()))


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(FlowError, match=r"a function in the graph cannot be saved"):
        encode([test_not_a_number_comes_back])
    graph = with_constants()
    node: fx.Node = next(iter(graph.calls()))
    node.target = math.sqrt
    with pytest.raises(FlowError, match=r"sqrt.* is no registered op and cannot be saved"):
        graph.save("unused.json")


@pytest.mark.parametrize(
    "name",
    ["aten.no_such_op.default", "aten.mm.no_such_overload", "os.system", "aten.mm", "nowhere.mm.default",
     "load_library.a.b", "aten.mm.__class__", "", "builtins.eval.default"],
)  # fmt: skip
def test_only_registered_ops_are_found(name: str) -> None:
    with pytest.raises(FlowError, match="the saved graph calls") as caught:
        target_of(name)
    assert repr(name) in str(caught.value)


Change = Callable[[dict[str, Any]], Any]
DAMAGED: dict[str, tuple[Change, str]] = {
    "format": (lambda data: data.update(format="other 7"), r"has format 'other 7', this version reads"),
    "no format": (lambda data: data.pop("format"), r"is not a saved step graph"),
    "op": (lambda data: data["nodes"][3].update(op="my.own.op"), r"calls 'my\.own\.op', which torch"),
    "reference": (
        lambda data: data["nodes"][3].update(args=[{"node": "later"}]),
        r"reads node 'later' before it is made",
    ),
    "dtype": (
        lambda data: data["nodes"][3].update(args=[{"dtype": "float3"}]),
        r"holds dtype 'float3', which torch .* does not know",
    ),
    "tag": (lambda data: data["nodes"][3].update(args=[{"code": "1"}]), r"holds code '1'"),
    "device": (
        lambda data: data["nodes"][0]["value"]["tensor"].__setitem__(3, {"device": "hpu:0"}),
        r"captured for hpu:0, this torch works on cpu",
    ),
    "name": (lambda data: data["nodes"][0].update(name="a b"), r"node called 'a b'"),
    "missing": (lambda data: data.pop("outputs"), r"is damaged: KeyError 'outputs'"),
    "role": (lambda data: data["inputs"][0].update(role="king"), r"is damaged: ValueError .*king"),
    "inputs": (lambda data: data["inputs"].pop(0), r"is damaged: ValueError"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_with_what_is_wrong(kind: str, tmp_path: Path) -> None:
    change, message = DAMAGED[kind]
    path = tmp_path / "graph.json"
    with_constants().save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(FlowError, match=message) as caught:
        StepGraph.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "[1]", "null", "{", "\x80"])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(content)
    with pytest.raises(FlowError, match="is not a saved step graph"):
        StepGraph.load(path)
