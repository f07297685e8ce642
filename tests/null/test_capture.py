"""Captured steps equal eager ones: results, parameters, buffers, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from monoflow.graph.step_graph import Phase, Role, StepGraph, info_of

from .graph_run import GraphStep, Things, assert_close, compare, state_of, trace

Make = Callable[[], tuple[Callable, Things]]
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def data(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


BATCHES = [(data(i, 6, 4), LABELS) for i in range(3)]


class Blocks(nn.Module):
    """Two blocks with dropout, checkpointed or not."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.4), nn.Linear(4, 4), nn.Dropout(0.2))
            for _ in range(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.head.weight[0]
        for block in self.blocks:
            if self.use_reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def training(
    model_of: Callable[[], nn.Module],
    *,
    before_step: Callable[[nn.Module], Any] = lambda model: None,
    clear: str = "end",
) -> Make:
    def make() -> tuple[Callable, Things]:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            if clear == "start":
                optimizer.zero_grad()
            elif clear == "module":
                model.zero_grad()
            elif clear == "by hand":
                for param in model.parameters():
                    param.grad = None
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            extra = before_step(model)
            optimizer.step()
            if clear in ("end", "zeros"):
                optimizer.zero_grad(set_to_none=clear == "end")
            return loss if extra is None else (loss, extra)

        return step, (model, optimizer)

    return make


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


# --- gradients -------------------------------------------------------------------------------------


def test_clip_grad_norm() -> None:
    compare(
        training(small_model, before_step=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)), BATCHES
    )


def test_clip_grad_value() -> None:
    compare(
        training(small_model, before_step=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)), BATCHES
    )


def test_references_to_parameters_from_before_the_step() -> None:
    def make() -> tuple[Callable, Things]:
        model = small_model()
        params, weight = list(model.parameters()), model.get_parameter("0.weight")
        optimizer = torch.optim.SGD(params, lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = F.cross_entropy(model(x), y) + (weight * weight).sum()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(params, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        return step, (model, optimizer)

    compare(make, BATCHES)


@pytest.mark.parametrize(
    ("clear", "num_captures", "clears"),
    [
        ("start", 1, True),
        ("module", 1, True),
        ("by hand", 1, True),
        ("end", 1, False),
        ("zeros", 2, False),
        ("never", 2, False),
    ],
)
def test_when_gradients_are_cleared(clear: str, num_captures: int, clears: bool) -> None:
    step = compare(training(small_model, clear=clear), BATCHES, num_captures=num_captures)
    assert step.captures[0][1].clears_grads == clears
    grads = [one.name for one in step.captures[0][1].graph.outputs if one.replaces.endswith(":grad")]
    assert len(grads) == (0 if clear == "end" else 4)


def test_gradients_found_by_a_step_that_clears_at_its_end() -> None:
    torch.manual_seed(0)
    function, things = training(small_model)()
    torch.manual_seed(0)
    eager_function, eager_things = training(small_model)()
    for found in (things, eager_things):
        found[0](BATCHES[0][0]).sum().backward()
    step = GraphStep(function, things)
    for batch in BATCHES:
        step(torch.tensor(0), *batch)
        eager_function(*batch)
        assert_close(state_of(things), state_of(eager_things), 1e-6, "state")
    assert len(step.captures) == 2 and len(step.captures[0][1].cleared_grads) == 4


def test_accumulation_by_hand() -> None:
    def make() -> tuple[Callable, Things]:
        model = nn.Sequential(
            nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for part, label in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = F.cross_entropy(model(part), label) / 2
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step, (model, optimizer)

    step = compare(make, BATCHES, tolerance=3e-6)
    masks = [n for n in step.captures[0][1].graph.calls() if n.target is torch.ops.monoflow.uniform.default]
    assert len(masks) == 2 and len({str(n.args[1]) for n in masks}) == 2


def test_gradient_penalty() -> None:
    def make() -> tuple[Callable, Things]:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            loss = F.cross_entropy(model(x), y)
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + (grad.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, (model, optimizer)

    compare(make, BATCHES)


# --- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_draws_the_same_masks_again(use_reentrant: bool) -> None:
    step = compare(training(lambda: Blocks(use_reentrant)), BATCHES)
    draws = [n for n in step.captures[0][1].graph.calls() if n.target is torch.ops.monoflow.uniform.default]
    assert len(draws) == 8 and len({str(n.args[1]) for n in draws}) == 4
    again = [n for n in draws if info_of(n).phase is Phase.BACKWARD]
    assert {info_of(n).module for n in again} == {f"blocks.{i}.{j}" for i in (0, 1) for j in (2, 4)}
    compare(training(Blocks), BATCHES)


def test_autocast() -> None:
    class Half(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    step = compare(training(Half), BATCHES, tolerance=1e-2)
    dtypes = {
        n.meta["val"].dtype
        for n in step.captures[0][1].graph.calls()
        if n.target is torch.ops.aten.addmm.default
    }
    assert dtypes == {torch.bfloat16}


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    step = compare(training(Tied), BATCHES)
    assert [one.name for one in step.captures[0][1].graph.inputs if one.role is Role.PARAM] == ["a.weight"]


def test_batch_norm_and_buffers() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = (
                nn.Conv1d(1, 3, 2, bias=False),
                nn.BatchNorm1d(3),
                nn.Linear(9, 3),
            )
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("mean", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.norm(self.conv(x[:, None])))  # twice: the statistics move twice
            self.count = self.count + 1
            assert isinstance(self.mean, torch.Tensor)
            self.mean.mul_(0.5).add_(x.detach().square().mean((0, 2)))
            return self.head(x.flatten(1))

    step = compare(training(Buffers), BATCHES, tolerance=1e-5)
    outputs = {one.replaces for one in step.captures[0][1].graph.outputs}
    assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "count", "mean"} <= outputs
    model = step.things[0]
    assert model.count == 3 and model.norm.num_batches_tracked == 6


def test_evaluation_leaves_everything_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))

    def evaluate(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        model.eval()
        with torch.no_grad():
            logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "right": (logits.argmax(-1) == y).sum()}

    captured = trace(evaluate, (model,), *BATCHES[0])
    assert model.training
    assert all(not one.replaces for one in captured.graph.outputs) and captured.clears_grads
    assert not any(one.role is Role.RANDOM for one in captured.graph.inputs)
    expected = evaluate(*BATCHES[0])
    assert_close(GraphStep(evaluate, (model,))(torch.tensor(0), *BATCHES[0]), expected, 1e-6, "evaluation")


def test_recurrent_layers_use_the_lifted_weights() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x.view(-1, 2, 2))[0][:, -1])

    compare(training(Recurrent), BATCHES, tolerance=1e-5)


def test_lstm_with_dropout() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(2, 3, 2, batch_first=True, dropout=0.3, bidirectional=True)
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x.view(-1, 2, 2))[0][:, -1])

    compare(training(Recurrent), BATCHES, tolerance=1e-5)


def test_hooks_on_modules_and_parameters() -> None:
    def hooked() -> nn.Module:
        model = small_model()
        model.get_submodule("2").register_forward_hook(lambda module, args, out: 2 * out)  # pyright: ignore
        model.get_submodule("1").register_full_backward_hook(lambda module, inputs, outputs: None)
        model.get_parameter("0.weight").register_hook(lambda grad: grad * 0.5)
        return model

    compare(training(hooked), BATCHES)


@pytest.mark.parametrize("kind", ["weight norm", "spectral norm"])
def test_parametrized_weights(kind: str) -> None:
    form = {"weight norm": parametrizations.weight_norm, "spectral norm": parametrizations.spectral_norm}[
        kind
    ]
    make = training(lambda: nn.Sequential(form(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)))
    compare(make, BATCHES, tolerance=1e-4)


def test_attention_inside_torchs_own_layer_stays_one_op() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = layer(x.view(2, 3, 4)).square().sum()
        loss.backward()
        return loss

    targets = [node.target for node in trace(step, (layer,), *BATCHES[0]).graph.calls()]
    assert targets.count(torch.ops.monoflow.attention.default) == 1
    assert targets.count(torch.ops.monoflow.attention_backward.default) == 1


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context: Any) -> None:
    model = nn.Linear(4, 3)

    @context()
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    found = GraphStep(step, (model,))(torch.tensor(0), *BATCHES[0])
    assert_close(found, step(*BATCHES[0]).clone(), 1e-6, "loss")


def test_two_models_and_two_optimizers() -> None:
    def make() -> tuple[Callable, Things]:
        generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
        c_optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.02)

        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            noise = torch.randn(6, 2)
            ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
            loss = F.binary_cross_entropy_with_logits
            c_optimizer.zero_grad()
            c_loss = loss(critic(x), ones) + loss(critic(generator(noise).detach()), zeros)
            c_loss.backward()
            c_optimizer.step()
            g_optimizer.zero_grad()
            g_loss = loss(critic(generator(noise)), ones)
            g_loss.backward()
            g_optimizer.step()
            return {"critic": c_loss, "generator": g_loss}

        return step, (generator, critic, g_optimizer, c_optimizer)

    step = compare(make, BATCHES, num_captures=None)
    graph = step.captures[0][1].graph
    assert {"0.weight", "1.0.weight", "0.group0:lr", "1.group0:lr", "0.0.weight:exp_avg"} <= set(
        graph.input_of
    )
    # The generator's forward pass comes after the critic's update, and is a forward pass all the same.
    last = [n for n in graph.calls() if n.target is torch.ops.aten.addmm.default][-1]
    assert info_of(last).phase is Phase.FORWARD
    assert all(
        n.target is not torch.ops.aten.add.Tensor or info_of(n).phase is not None for n in graph.calls()
    )


# --- arguments and results -------------------------------------------------------------------------


@dataclass
class Pair:
    """A dataclass as an argument and as a result."""

    left: torch.Tensor
    right: torch.Tensor


def test_arguments_and_results_in_any_nesting() -> None:
    model = nn.Linear(4, 3)

    def step(batch: dict[str, Any], pair: Pair, scale: float, mode: str, *, nothing: None, more: list) -> Any:
        out = model(batch["x"] * scale + batch["deep"][0]["x"]) + pair.left - pair.right
        return {"out": out, "pair": Pair(out.sum(), more[0] + 1), "none": nothing, "list": [(out[0],)]}

    batch = {"x": data(0, 6, 4), "deep": [{"x": data(1, 6, 4)}, 3], "unused": data(2, 5)}
    args = (batch, Pair(data(3, 3), data(4, 3)), 2.5, "mean")
    kwargs = {"nothing": None, "more": [data(5, 2)]}
    found = GraphStep(step, (model,))(torch.tensor(0), *args, **kwargs)
    expected = step(*args, **kwargs)
    assert type(found["pair"]) is Pair and found["none"] is None
    assert_close(found, {**expected, "out": expected["out"].detach()}, 1e-6, "result")
    captured = trace(step, (model,), *args, **kwargs)
    names = [one.name for one in captured.graph.inputs if one.role is Role.BATCH]
    assert names == ["batch.0.x", "batch.0.deep.0.x", "batch.1.left", "batch.1.right", "batch.more.0"]
    assert captured.batch_names == (*names[:2], "batch.0.unused", *names[2:])


def test_closed_over_tensors_are_read_by_reference() -> None:
    model, weights = nn.Linear(4, 3), torch.tensor([1.0, 2.0, 3.0])

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, weight=weights) * torch.tensor(3.0)

    graph_step = GraphStep(step, (model,))
    for _ in range(2):
        assert_close(graph_step(torch.tensor(0), *BATCHES[0]), step(*BATCHES[0]).detach(), 1e-6, "loss")
        weights.mul_(torch.tensor([3.0, 1.0, 0.5]))
    (captured,) = (one for _, one in graph_step.captures)
    assert [x is weights for x in captured.graph.constants.values()].count(True) == 1


# --- what a capture leaves behind, and what it costs -----------------------------------------------


def attributes(things: Things) -> list[Any]:
    modules = [m for thing in things if isinstance(thing, nn.Module) for m in thing.modules()]
    held = [dict(one.__dict__) for one in [*modules, *things]]
    inner = [{k: dict(v) for k, v in one.items() if isinstance(v, dict)} for one in held]
    return [held, inner]


def test_capture_leaves_model_optimizer_and_generator_as_they_were() -> None:
    function, things = training(lambda: Blocks(use_reentrant=False))()
    model, optimizer = things
    model.blocks[1].eval()
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # which puts a step of its own on the optimizer
    before, values = attributes(things), {k: v.clone() for k, v in state_of(things).items()}
    groups, rng = optimizer.param_groups, torch.get_rng_state()
    trace(function, things, *BATCHES[0])
    with pytest.raises(RuntimeError, match="broadcast") as error:
        trace(function, things, data(0, 6, 5), LABELS)
    assert any("while monoflow captured the step" in note for note in error.value.__notes__)
    after = attributes(things)
    assert all(a.keys() == b.keys() for a, b in zip(before[0], after[0], strict=True))
    assert all(
        a[k] is b[k] for a, b in zip(before[0], after[0], strict=True) for k in a if k != "_opt_called"
    )
    assert before[1] == after[1]
    assert optimizer.param_groups is groups and not optimizer.state
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())
    assert_close(state_of(things), values, 0, "values")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_model_of_200_gb_is_captured_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(5)))
        x = torch.empty(8, 100_000)
    assert sum(p.numel() * 4 for p in model.parameters()) == 200e9
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    small = nn.Linear(2, 2)
    trace(lambda x: small(x).sum(), (small,), torch.ones(1, 2))  # what is loaded once does not count
    before = resident_bytes()
    captured = trace(step, (model, optimizer), x)
    assert resident_bytes() - before < 200e6
    assert len(captured.initial) == 15 and not optimizer.state


# --- where nodes come from -------------------------------------------------------------------------


def line_of(text: str, nth: int = 0) -> str:
    lines = [i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip() == text]
    return f"{__file__}:{lines[nth]}"


class Annotated(nn.Module):
    """A model whose ops are one a line."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner["first"](x)
        mask = x > 100
        x = torch.sigmoid(x)
        return self.inner["second"](x.masked_fill(mask, 0.0))


def nodes(graph: StepGraph, op: Any) -> list[Any]:
    return [info_of(node) for node in graph.calls() if node.target is op]


def test_nodes_know_phase_module_line_and_their_forward() -> None:
    make = training(Annotated, before_step=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0))
    graph = trace(*make(), *BATCHES[0]).graph
    aten = torch.ops.aten
    first, second = nodes(graph, aten.addmm.default)
    assert (first.phase, first.module, second.module) == (Phase.FORWARD, "inner.first", "inner.second")
    assert first.source == line_of('x = self.inner["first"](x)')
    (sigmoid,) = nodes(graph, aten.sigmoid.default)
    (backward,) = nodes(graph, aten.sigmoid_backward.default)
    assert sigmoid.module == "" and sigmoid.source == line_of("x = torch.sigmoid(x)")
    assert backward.phase is Phase.BACKWARD and backward.sequence == sigmoid.sequence >= 0
    assert (backward.module, backward.source) == (sigmoid.module, sigmoid.source)
    products = nodes(graph, aten.mm.default)
    assert {(one.phase, one.module) for one in products} == {
        (Phase.BACKWARD, "inner.first"),
        (Phase.BACKWARD, "inner.second"),
    }
    assert all(one.phase is Phase.UPDATE for one in nodes(graph, aten._fused_adamw.tensor_lr))
    assert all(one.phase is Phase.UPDATE for one in nodes(graph, aten.linalg_vector_norm.default))
    assert nodes(graph, aten._fused_adamw.tensor_lr)[0].source == line_of("optimizer.step()")
