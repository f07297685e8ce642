"""Every pass: what it changes, what it must leave, and that values stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from monoflow import compiler
from monoflow.graph.passes.clean import clean
from monoflow.graph.passes.guard import guard
from monoflow.graph.passes.norms import join_norms
from monoflow.graph.passes.owners import name_owners
from monoflow.graph.passes.prologue import hoist_counts
from monoflow.graph.rewrite import Pass
from monoflow.graph.step_graph import Phase, Role, StepGraph, info_of
from monoflow.graph.verify import verify

from .graph_build import built, targets, values
from .graph_run import trace

aten = torch.ops.aten
X = torch.arange(12.0).reshape(3, 4) - 5


def applied(one: Pass, graph: StepGraph) -> StepGraph:
    """The graph after a pass, well formed; the graph before it is not touched."""
    before = graph.text()
    after = verify(one(graph), one.__name__)
    assert graph.text() == before
    return after


def assert_same_values(before: StepGraph, after: StepGraph, *inputs: Tensor, tolerance: float = 0.0) -> None:
    for want, have in zip(values(before, *inputs), values(after, *inputs), strict=True):
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


# --- clean -----------------------------------------------------------------------------------------


GONE: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": aten.detach.default,
    "alias": aten.alias.default,
    "view of the same shape": lambda x: aten.view.default(x, [3, 4]),
    "expand to the same shape": lambda x: aten.expand.default(x, [3, 4]),
    "slice of the whole dim": lambda x: aten.slice.Tensor(x, 1, 0, 9223372036854775807),
    "squeeze of a dim that stays": lambda x: aten.squeeze.dim(x, 0),
    "copy to the same dtype": lambda x: aten._to_copy.default(x, dtype=torch.float32),
    "copy over another": lambda x: aten.copy.default(x + 1, x),
    "t and back": lambda x: aten.t.default(aten.t.default(x)),
    "t there and back twice": lambda x: aten.t.default(aten.t.default(aten.t.default(aten.t.default(x)))),
    "transpose and back": lambda x: aten.transpose.int(aten.transpose.int(x, 0, 1), -1, 0),
    "view and back": lambda x: aten.view.default(aten.view.default(x, [4, 3]), [3, 4]),
    "cat of one": lambda x: aten.cat.default([x]),
    "cat with nothing": lambda x: aten.cat.default([x, x.new_empty(0)]),
}


@pytest.mark.parametrize("name", GONE)
def test_clean_drops_what_changes_nothing(name: str) -> None:
    graph = built(lambda x: [GONE[name](x) * 2], {"x": (Role.BATCH, X)})
    after = applied(clean, graph)
    assert targets(after) == ["mul.Tensor"]
    assert_same_values(graph, after, X)


STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a transpose": lambda x: aten.t.default(x),
    "two transposes of other dims": lambda x: aten.transpose.int(
        aten.transpose.int(aten.unsqueeze.default(x, 0), 0, 1), 1, 2
    ),
    "two views": lambda x: aten.view.default(aten.view.default(x, [4, 3]), [2, 6]),
    "a view of another shape": lambda x: aten.view.default(x, [4, 3]),
    "a part": lambda x: aten.slice.Tensor(x, 1, 1, 4),
    "every second": lambda x: aten.slice.Tensor(x, 0, 0, 3, 2),
    "a cast": lambda x: aten._to_copy.default(x, dtype=torch.float64),
    "another device": lambda x: aten._to_copy.default(x, device="meta"),
    "another order in memory": lambda x: aten._to_copy.default(x.t(), memory_format=torch.contiguous_format),
    "a clone": aten.clone.default,
    "a broadcast copy": lambda x: aten.copy.default(x, x.sum()),
    "a cat of two": lambda x: aten.cat.default([x, x]),
    "a cat whose dtype comes from nothing": lambda x: aten.cat.default(
        [x, x.new_empty(0, dtype=torch.float64)]
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_clean_keeps_what_changes_something(name: str) -> None:
    graph = built(lambda x: [STAYS[name](x)], {"x": (Role.BATCH, X)})
    after = applied(clean, graph)
    assert targets(after) == targets(graph)
    if name != "another device":
        assert_same_values(graph, after, X)


def test_clean_keeps_the_other_parts_of_a_cat() -> None:
    graph = built(lambda x: [aten.cat.default([x, x.new_empty(0), x])], {"x": (Role.BATCH, X)})
    after = applied(clean, graph)
    (cat,) = [node for node in after.calls() if node.target is aten.cat.default]
    assert [str(part) for part in cat.args[0]] == ["x", "x"]  # pyright: ignore
    assert_same_values(graph, after, X)


def test_clean_lets_an_input_be_a_result_beside_its_next_value() -> None:
    graph = built(
        lambda p: [p + 1, aten.detach.default(p), aten.alias.default(p + 1)],
        {"p": (Role.PARAM, X)},
        replaces=["p"],
    )
    after = applied(clean, graph)
    assert [str(node) for node in after.results] == ["add", "p", "add_1"]
    assert_same_values(graph, after, X)


def test_clean_calls_placeholders_after_their_inputs() -> None:
    inputs = {
        "h.0.weight": (Role.PARAM, X),
        "h.0.weight:exp_avg": (Role.STATE, X),
        "0.bias": (Role.PARAM, X),
        "add": (Role.BUFFER, X),  # the name of a call in the graph
        "a.b": (Role.BATCH, X),
        "a_b": (Role.BATCH, X),
    }
    graph = built(lambda a, b, c, d, e, f: [a + b, c * d, e - f], inputs)
    after = applied(clean, graph)
    names = [node.name for node in after.placeholders.values()]
    assert names == ["h_0_weight", "h_0_weight_exp_avg", "_0_bias", "add_1", "a_b", "a_b_1"]
    assert [node.name for node in after.calls()] == ["add", "mul", "sub"]
    assert_same_values(graph, after, *[X + number for number in range(6)])


# --- join-norms ------------------------------------------------------------------------------------


def norm_of_norms(order: float, inner_order: float | None = None) -> Callable[..., list[Tensor]]:
    def total(*grads: Tensor) -> list[Tensor]:
        norms = [torch.linalg.vector_norm(grad, inner_order or order) for grad in grads]
        return [torch.linalg.vector_norm(torch.stack(norms), order)]

    return total


def grads_of(*dtypes: torch.dtype) -> dict[str, tuple[Role, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"g{number}": (Role.BATCH, torch.randn(5, number + 1, generator=generator).to(dtype))
        for number, dtype in enumerate(dtypes)
    }


def num_roots(graph: StepGraph) -> int:
    return sum(one in ("sqrt", "linalg_vector_norm") for one in targets(graph))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_join_norms_takes_one_root(dtypes: Sequence[torch.dtype]) -> None:
    inputs = grads_of(*dtypes)
    tensors = [value for _, value in inputs.values()]
    graph = built(norm_of_norms(2.0), inputs)
    after = applied(join_norms, graph)
    assert num_roots(after) == 1 and "linalg_vector_norm" not in targets(after)
    (total,) = values(after, *tensors)
    exact = torch.cat([one.double().flatten() for one in tensors]).norm()
    assert total.dtype == values(graph, *tensors)[0].dtype
    assert total.item() == pytest.approx(exact.item(), rel=4e-3 if total.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("orders", [(1.0, 1.0), (3.0, 3.0), (float("inf"),) * 2, (2.0, 1.0), (1.0, 2.0)])
def test_join_norms_leaves_other_norms(orders: tuple[float, float]) -> None:
    graph = built(norm_of_norms(*orders), grads_of(torch.float32, torch.float32))
    assert targets(applied(join_norms, graph)) == targets(graph)


def rows(x: Tensor, y: Tensor) -> list[Tensor]:
    norms = [torch.linalg.vector_norm(one, 2.0, dim=0) for one in (x, y)]
    return [torch.linalg.vector_norm(torch.stack(norms), 2.0)]


def wider(x: Tensor, y: Tensor) -> list[Tensor]:
    norms = [torch.linalg.vector_norm(one, 2.0, dtype=torch.float64) for one in (x, y)]
    return [torch.linalg.vector_norm(torch.stack(norms), 2.0)]


@pytest.mark.parametrize("function", [rows, wider])
def test_join_norms_leaves_norms_of_rows_and_of_another_dtype(function: Callable) -> None:
    graph = built(function, dict.fromkeys("xy", (Role.BATCH, X)))
    assert targets(applied(join_norms, graph)) == targets(graph)


def test_join_norms_leaves_complex_tensors() -> None:
    value = torch.complex(X, X + 1)
    graph = built(norm_of_norms(2.0), dict.fromkeys("xy", (Role.BATCH, value)))
    after = applied(join_norms, graph)
    assert_same_values(graph, after, value, value)


def test_join_norms_keeps_a_norm_that_something_else_reads() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        norms = [torch.linalg.vector_norm(one) for one in (x, y)]
        return [torch.linalg.vector_norm(torch.stack(norms)), norms[0]]

    graph = built(function, dict.fromkeys("xy", (Role.BATCH, X)))
    after = applied(join_norms, graph)
    assert num_roots(after) == 2
    assert_same_values(graph, after, X, X + 1, tolerance=1e-6)


@pytest.mark.parametrize("foreach", [False, True])
def test_join_norms_finds_the_clipping_of_torch(foreach: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        model(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    graph = clean(trace(step, (model, optimizer), X).graph)
    after = applied(join_norms, graph)
    assert targets(graph).count("linalg_vector_norm") == 5
    assert num_roots(after) == 1
    added = [node for node in after.calls() if node.name not in {old.name for old in graph.calls()}]
    assert added and {info_of(node).phase for node in added} == {Phase.UPDATE}


# --- hoist-counts ----------------------------------------------------------------------------------


def prologue(graph: StepGraph) -> list[str]:
    """The ops in the prologue, which must be all that comes first."""
    phases = [info_of(node).phase is Phase.PROLOGUE for node in graph.calls()]
    count = sum(phases)
    assert all(phases[:count]), "the prologue comes first"
    return [str(node.target).removeprefix("aten.") for node in graph.calls()][:count]


def masked_mean(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(model(x), labels, reduction="none", ignore_index=-1)
        loss = losses.sum() / (labels != -1).sum()
        loss.backward()
        return loss

    return step


def test_hoist_counts_moves_the_count_of_a_masked_mean() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    captured = trace(masked_mean(model), (model,), X, torch.tensor([0, -1, 2]))
    graph = clean(captured.graph)
    after = applied(hoist_counts, graph)
    assert prologue(after) == ["ne.Scalar", "sum.default"]
    inputs = [torch.tensor(5), *(p.detach() for p in model.parameters()), X, torch.tensor([0, -1, 2])]
    inputs = inputs[-len(graph.inputs) :]
    assert_same_values(graph, after, *inputs)


def test_hoist_counts_takes_along_what_a_count_needs() -> None:
    def function(labels: Tensor, p: Tensor) -> list[Tensor]:
        early = p.sum()
        position = torch.arange(3, device=labels.device)
        count = ((labels > 0) & (position < 2)).sum()
        return [early / count]

    labels = torch.tensor([1, 1, 1])
    graph = built(function, {"labels": (Role.BATCH, labels), "p": (Role.PARAM, X)})
    after = applied(hoist_counts, graph)
    assert prologue(after) == [
        "arange.default",
        "gt.Scalar",
        "lt.Scalar",
        "bitwise_and.Tensor",
        "sum.default",
    ]
    assert_same_values(graph, after, labels, X)


@pytest.mark.parametrize("role", [Role.PARAM, Role.BUFFER, Role.STATE, Role.RANDOM, Role.HYPER])
def test_hoist_counts_leaves_what_depends_on_more_than_the_batch(role: Role) -> None:
    graph = built(
        lambda x, other: [(x * other > 0).sum(), (other > 0).sum(), x.sum(0)],
        {"x": (Role.BATCH, X), "other": (role, X)},
    )
    after = applied(hoist_counts, graph)
    assert prologue(after) == []
    assert targets(after) == targets(graph)


def test_hoist_counts_leaves_a_count_of_random_numbers() -> None:
    model = nn.Linear(4, 3)

    def step(x: Tensor) -> Tensor:
        kept = (torch.rand_like(x) < 0.5) & (x > 0)
        return model(x).sum() / kept.sum()

    graph = applied(hoist_counts, clean(trace(step, (model,), X).graph))
    assert prologue(graph) == []


def test_hoist_counts_leaves_sums_of_constants_and_of_nothing() -> None:
    graph = built(
        lambda x, c: [x + c.sum(), x + torch.ones(3, device=x.device).sum()],
        {"x": (Role.BATCH, X), "c": (Role.CONSTANT, X)},
    )
    assert prologue(applied(hoist_counts, graph)) == []


# --- drafts ----------------------------------------------------------------------------------------


def test_passes_edit_a_draft_in_place_and_copy_any_other_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        mask = y != -100
        loss = F.mse_loss(model(x)[mask.int()], x[:, :3][mask.int()], reduction="sum") / mask.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    captured = trace(step, (model, optimizer), X, torch.arange(3))
    cleaned = clean(captured.graph)
    passes = (guard(captured.losses), join_norms, hoist_counts, name_owners)
    text = cleaned.text()
    whole, draft = cleaned, replace(clean(captured.graph), draft=True)
    own = draft.graph
    for one in passes:
        whole, draft = verify(one(whole), "copy"), verify(one(draft), "draft")
        assert draft.graph is own and draft.draft
        assert draft.text() == whole.text()
        assert whole.graph is not cleaned.graph and cleaned.text() == text
    assert [node.name for node in draft.graph.nodes] == [node.name for node in whole.graph.nodes]


def test_a_captured_graph_is_no_draft() -> None:
    model = nn.Linear(4, 3)
    graph = compiler.trace(lambda x: model(x).sum(), compiler.subject_of([model]), (X,), {}).graph
    assert not graph.draft
    assert hoist_counts(graph).graph is not graph.graph
