"""What crosses ranks: moves by kind, count and bytes, against counts worked out here by hand.

Moves that go together are one collective, of as many bytes.
Bytes are what one rank sends: 2 (n-1)/n of a tensor for an all-reduce, (n-1)/n for an all-gather or a
reduce-scatter. The loss and its count of tokens are two scalars; clipping adds one where gradients are split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from monoflow.compiler import CommStats
from monoflow.runtime.program import Program
from monoflow.step import Step

from .harness import LAYOUTS, Case, Cases
from .models import KINDS, batch_of

SCALAR = 4
SAMPLES, TOKENS, WIDTH = 4, 8, 32
ACTIVATION = SAMPLES * TOKENS * WIDTH * 4
ROWS = SAMPLES * TOKENS * 4  # one number per token


@dataclass(frozen=True)
class Facts:
    """What follows from a model's definition alone.

    Attributes:
        layers: the number of transformer blocks.
        once: parameters that no gradient of another tensor needs, by the end of their names.
        unused: bytes of rows of position embeddings that the batch is too short for.
    """

    layers: int
    once: tuple[str, ...]
    unused: int


FACTS = {
    "gpt2": Facts(2, ("wpe.weight", "c_attn.bias", "c_proj.bias", "c_fc.bias"), (16 - TOKENS) * WIDTH * 4),
    "llama": Facts(1, ("embed_tokens.weight",), 0),
}


def num_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * 4 for parameter in parameters)


def needed_twice(model: nn.Module, facts: Facts) -> list[nn.Parameter]:
    """Parameters that the backward pass reads."""
    return [value for name, value in model.named_parameters() if not name.endswith(facts.once)]


def moves(step: Step, kind: str | None = None, axis: str | None = None) -> int:
    """Tensors that the first rank moves in a step, of one kind or along one axis or all."""
    program = program_of(step)
    found = [move for task in program.tasks if task.move for move in (task.move, *task.bundled)]
    axes = program.placement.axes
    return sum(kind in (None, move.kind) and axis in (None, axes[move.axis]) for move in found)


def ran(case: Case, layout: str, name: str) -> tuple[Step, CommStats]:
    with case.under(LAYOUTS[layout]) as step:
        step(batch_of(KINDS[name], SAMPLES))
        return step, step.stats()


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("layout", ["one", "data-2", "data-4"])
def test_data_reduces_every_gradient_once(cases: Cases, name: str, layout: str) -> None:
    case, n = cases(name, "sgd"), LAYOUTS[layout].num_ranks
    step, stats = ran(case, layout, name)
    parameters = list(case.model.parameters())
    if n == 1:
        assert stats.counts == {}
        return
    assert moves(step) == moves(step, "all_reduce") == len(parameters) + 2
    assert stats.calls() < len(parameters), "small gradients do not go together"
    gradients = num_bytes(parameters) - FACTS[name].unused
    assert stats.num_bytes() == 2 * (n - 1) * (gradients + 2 * SCALAR) // n


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("layout", ["zero-2", "zero-4"])
def test_zero_gathers_parameters_twice_and_scatters_gradients_once(
    cases: Cases, name: str, layout: str
) -> None:
    case, n = cases(name, "sgd"), LAYOUTS[layout].num_ranks
    step, stats = ran(case, layout, name)
    parameters, again = list(case.model.parameters()), needed_twice(case.model, FACTS[name])
    assert moves(step, "all_gather") == len(parameters) + len(again)
    assert stats.num_bytes("all_gather") == (n - 1) * (num_bytes(parameters) + num_bytes(again)) // n
    assert moves(step, "reduce_scatter") == len(parameters)
    assert stats.num_bytes("reduce_scatter") == (n - 1) * num_bytes(parameters) // n
    assert moves(step, "all_reduce") == 3
    assert stats.num_bytes("all_reduce") == 3 * 2 * (n - 1) * SCALAR // n
    assert moves(step) == moves(step, "all_gather") + moves(step, "reduce_scatter") + 3


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("layout", ["zero-2", "zero-4"])
def test_zero_stores_a_part_of_everything_that_is_trained(cases: Cases, name: str, layout: str) -> None:
    case, n = cases(name, "adamw"), LAYOUTS[layout].num_ranks
    step, _ = ran(case, layout, name)
    program = program_of(step)
    held = {port.name: program.registers[port.register] for port in program.inputs}
    for parameter, value in case.model.named_parameters():
        for key in (parameter, f"{parameter}:exp_avg", f"{parameter}:exp_avg_sq"):
            assert torch.Size(held[key].shape).numel() * n == value.numel(), key


def program_of(step: Step) -> Program:
    """The program of the first rank."""
    return next(iter(step._require().lowered.programs.values()))


@pytest.mark.parametrize(
    ("name", "layout"), [("gpt2", "tensor-2"), ("gpt2", "tensor-4"), ("llama", "tensor-2")]
)
def test_tensor_reduces_two_activations_a_layer_and_way(cases: Cases, name: str, layout: str) -> None:
    """Forward after attention and feed-forward, and after the look-up; backward before each and the head.

    The loss over a split vocabulary takes a maximum and a sum per token; loss and clipping a scalar each.
    """
    case, n = cases(name, "sgd"), LAYOUTS[layout].num_ranks
    step, stats = ran(case, layout, name)
    activations = 2 * (2 * FACTS[name].layers + 1)
    assert moves(step) == moves(step, "all_reduce") == activations + 4
    assert stats.num_bytes() == 2 * (n - 1) * (activations * ACTIVATION + 2 * ROWS + 2 * SCALAR) // n
    phases = [task.phase for task in program_of(step).tasks if task.move is not None]
    assert (phases.count("forward"), phases.count("backward")) == (activations // 2 + 3, activations // 2)


def test_tensor_splits_fused_projections_by_blocks_and_tables_by_rows(cases: Cases) -> None:
    step, _ = ran(cases("gpt2", "sgd"), "tensor-2", "gpt2")
    lines = {line.split()[1]: line.split(": ")[-1] for line in step.text("plan").splitlines()[1:30]}
    assert lines["transformer.wte.weight"] == "S(0)"
    for layer in (0, 1):
        block = f"transformer.h.{layer}"
        assert lines[f"{block}.attn.c_attn.weight"] == "S(1,3)"
        assert lines[f"{block}.attn.c_proj.weight"] == "S(0)"
        assert lines[f"{block}.mlp.c_fc.weight"] == "S(1)"
        assert lines[f"{block}.mlp.c_proj.weight"] == "S(0)"


def test_data_x_tensor_is_data_over_shards_and_tensor_over_half_the_batch(cases: Cases) -> None:
    case = cases("llama", "sgd")
    step, stats = ran(case, "data-x-tensor", "llama")
    outer, inner = step.plan.placement.axes
    norms = [value for name, value in case.model.named_parameters() if "norm" in name]
    parameters = list(case.model.parameters())
    gradients = (num_bytes(parameters) - num_bytes(norms)) // 2 + num_bytes(norms)
    assert moves(step, axis=outer) == moves(step, "all_reduce", outer) == len(parameters) + 2
    assert stats.num_bytes(axis=outer) == gradients + 2 * SCALAR
    assert moves(step, axis=inner) == moves(step, "all_reduce", inner) == 6 + 4
    assert stats.num_bytes(axis=inner) == (6 * ACTIVATION + 2 * ROWS) // 2 + 2 * SCALAR


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("layout", ["data-x-tensor", "zero-x-tensor"])
def test_two_axes_send_no_more_than_each_must(cases: Cases, name: str, layout: str) -> None:
    """Every trained byte crosses the outer axis as a shard, and activations cross the inner one halved."""
    case = cases(name, "sgd")
    step, stats = ran(case, layout, name)
    outer, inner = step.plan.placement.axes
    shards = num_bytes(case.model.parameters()) / 2
    least = shards - FACTS[name].unused / 2
    factor = 1.0 if layout == "data-x-tensor" else 1.5
    assert factor * least * 0.9 <= stats.num_bytes(axis=outer) <= factor * shards * 1.1
    activations = (2 * (2 * FACTS[name].layers + 1) * ACTIVATION + 2 * ROWS) / 2
    assert activations <= stats.num_bytes(axis=inner) <= activations * 1.1
