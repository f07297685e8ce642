"""Lowering: tasks cut at collectives, local shapes, updates in place and what must come before them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import monoflow as flow
from monoflow.runtime.program import Program
from monoflow.runtime.world import simulate
from monoflow.step import Step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def trained(plan: str = "data", loss_of: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Step:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer, plan=plan)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum() if loss_of is None else loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def programs(step: Step, num_ranks: int, x: Tensor) -> dict[int, Program]:
    with simulate(num_ranks):
        step(x)
        return dict(step._require().lowered.programs)


def collectives(program: Program) -> list[str]:
    return [task.move.kind for task in program.tasks if task.move is not None]


def code(program: Program) -> str:
    return "\n".join(task.compute.code for task in program.tasks if task.compute is not None)


def test_one_rank_is_a_task_up_to_the_gate_and_one_behind_it() -> None:
    made = programs(trained(), 1, torch.ones(4, 6))
    task, behind = made[0].tasks
    assert task.compute is not None and task.after == () and not task.gated
    assert set(made[0].gates) <= set(task.outputs) and len(made[0].gates) == 1
    assert behind.compute is not None and behind.after == (0,) and behind.gated
    assert code(made[0]).count("aten._fused_adamw_.") == 4
    donated = {port.name for port in made[0].inputs if port.donated}
    params = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert donated == params | {f"{name}:{key}" for name in params for key in ("exp_avg", "exp_avg_sq")}


def test_tasks_are_cut_at_collectives_that_all_ranks_share() -> None:
    made = programs(trained(), 2, torch.ones(5, 6))
    kinds = collectives(made[0])
    together = [1 + len(task.bundled) for task in made[0].tasks if task.move is not None]
    assert kinds == ["all_reduce"] * len(kinds) and sum(together) == 5  # four gradients and the loss
    for rank in (0, 1):
        assert collectives(made[rank]) == kinds
        for before, after in zip(made[rank].tasks, made[rank].tasks[1:], strict=False):
            assert before.move is not None or after.move is not None, "two compute tasks side by side"
    moves = [[task.index for task in one.tasks if task.move is not None] for one in made.values()]
    assert moves[0] == moves[1]


def test_every_rank_has_its_own_shapes() -> None:
    made = programs(trained(), 2, torch.ones(5, 6))
    rows = [next(r.shape for r in one.registers if r.name == "batch_0") for one in made.values()]
    assert rows == [(3, 6), (2, 6)]
    split = programs(trained("tensor"), 2, torch.ones(5, 6))
    shapes = {port.name: split[1].registers[port.register].shape for port in split[1].inputs}
    assert shapes["up.weight"] == (5, 6) and shapes["down.weight"] == (3, 5)
    assert shapes["up.weight:exp_avg"] == (5, 6)


@pytest.mark.parametrize("plan", ["data", "zero", "tensor"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_updates_come_after_all_reads_of_what_they_write(plan: str, num_ranks: int) -> None:
    """Recomputed from the code of the tasks: who reads a donated register is before the one who writes it."""
    for program in programs(trained(plan), num_ranks, torch.ones(6, 6)).values():
        donated = {port.register for port in program.inputs if port.donated}
        assert donated
        writers = {}
        for task in program.tasks:
            if task.compute is not None:
                for line in task.compute.code.splitlines():
                    if "aten._fused_adamw_." in line:
                        written = {r for r in donated if f"[r{r}]" in line}
                        writers |= dict.fromkeys(written, task)
        assert writers.keys() == donated
        for register, writer in writers.items():
            readers = set(program.consumers[register]) - {writer.index}
            assert readers <= set(writer.after)


def test_copies_from_before_an_update_keep_their_values() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Net)
        return model(x).square().sum() + model.down.bias.detach().sum()

    made = programs(trained(loss_of=loss_of), 1, torch.ones(4, 6))
    assert code(made[0]).count("aten._fused_adamw_.") == 4

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: Tensor) -> Tensor:
        before = model.up.weight.detach().clone()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return before

    weight = model.up.weight.detach().clone()
    torch.testing.assert_close(step(torch.ones(2, 6)), weight)
    assert not torch.equal(model.up.weight, weight)


def test_observed_gradients_are_computed_only_when_asked_for() -> None:
    with simulate(2):
        step = trained("zero")
        step(torch.ones(4, 6))
        compiled = step._require()
        observed = step._form(compiled, observe=True)
    names = [port.name for port in compiled.lowered.programs[0].outputs]
    more = [port.name for port in observed.lowered.programs[0].outputs]
    assert not any("observed" in name for name in names)
    assert set(more) - set(names) == {
        f"{name}:observed_grad" for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    }


def test_a_gathered_parameter_is_gathered_again_for_backward() -> None:
    made = programs(trained("zero"), 2, torch.ones(4, 6))
    gathered = [
        made[0].registers[register].name
        for task in made[0].tasks
        if task.move is not None and task.move.kind == "all_gather"
        for register in task.inputs
    ]
    assert gathered.count("down_weight") == 2  # for the forward pass and for the gradient of its input
    assert gathered.count("up_weight") == 1  # nobody wants the gradient of the batch
