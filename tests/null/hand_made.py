"""Programs made by hand: tasks of one function, and a pipeline whose numbers can be worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from monoflow.boxing.route import Move
from monoflow.mesh import Placement, placement
from monoflow.runtime.program import Kind, Port, Program, Rate, Register, Task, task_module, verify
from monoflow.sbp.layout import At, B, P, S


class Hand:
    """Builds the program of one rank, task by task."""

    def __init__(self, rank: int, place: Placement, micro_batches: int = 1) -> None:
        self.rank, self.place, self.micro_batches = rank, place, micro_batches
        self.tasks: list[Task] = []
        self.registers: list[Register] = []
        self.inputs: list[Port] = []
        self.outputs: list[Port] = []

    def register(self, shape: Sequence[int], rate: Rate = Rate.STEP, slots: int = 1) -> int:
        number = len(self.registers)
        self.registers.append(Register(number, f"x{number}", tuple(shape), torch.float32, slots, rate))
        return number

    def given(self, shape: Sequence[int], fresh: bool = False, donated: bool = False) -> int:
        """An input of the program."""
        register = self.register(shape)
        self.inputs.append(Port(f"in{register}", register, fresh=fresh, donated=donated))
        return register

    def give(self, register: int, replaces: int | None = None) -> None:
        """An output of the program: a result, or the next value of an input."""
        name = "" if replaces is None else f"in{replaces}"
        self.outputs.append(Port(f"out{register}", register, name))

    def compute(
        self,
        name: str,
        function: Callable,
        inputs: Sequence[int],
        *outputs: int,
        phase: str = "forward",
        with_time: bool = False,
        role: Kind | None = None,
        after: Sequence[int] = (),
    ) -> int:
        """A task of one function; as often as what it fills is filled."""
        graph = fx.Graph()
        arguments = [graph.placeholder(f"r{register}") for register in inputs]
        if with_time:
            arguments.append(graph.placeholder("time"))
        result = graph.call_function(function, tuple(arguments), name=name)
        several = [graph.call_function(lambda x, i=i: x[i], (result,)) for i in range(len(outputs))]
        graph.output(several if len(outputs) > 1 else [result] if outputs else [])
        rates = {self.registers[register].rate for register in (*inputs, *outputs)}
        rate = Rate.MICRO if Rate.MICRO in rates or with_time else Rate.STEP
        return self._add(
            name, phase, inputs, outputs, compute=task_module(graph), rate=rate, role=role, after=tuple(after)
        )

    def move(
        self,
        name: str,
        move: Move,
        inputs: Sequence[int],
        outputs: Sequence[int],
        order: int,
        phase: str = "forward",
        turns: Sequence[int] = (),
    ) -> int:
        rates = {self.registers[register].rate for register in (*inputs, *outputs)}
        rate = Rate.MICRO if Rate.MICRO in rates else Rate.STEP
        turned = tuple(turns)
        return self._add(name, phase, inputs, outputs, move=move, order=order, rate=rate, turns=turned)

    def _add(self, name, phase, inputs, outputs, **others) -> int:  # type: ignore[no-untyped-def]
        index = len(self.tasks)
        self.tasks.append(Task(index, name, phase, tuple(inputs), tuple(outputs), **others))
        return index

    def program(self, checked: bool = True, follows: bool = False) -> Program:
        made = Program(
            self.rank,
            self.place,
            tuple(self.tasks),
            tuple(self.registers),
            tuple(self.inputs),
            tuple(self.outputs),
            self.micro_batches,
            follows=follows,
        )
        return verify(made) if checked else made


Delay = Callable[[], None]


def pipeline(
    num_stages: int, micro_batches: int, slots: Sequence[int] | None = None, delay: Delay = lambda: None
) -> dict[int, Program]:
    """Stage s multiplies by its weight; the loss is the sum of squares; weights go down by 0.1 gradients.

    Args:
        slots: of what each stage keeps from forward to backward; as 1F1B has them when left out.
        delay: called in every computation.
    """
    slots = slots or [num_stages - stage for stage in range(num_stages)]
    place = placement("cpu", list(range(num_stages)), axes=("stage",))
    return {
        stage: _stage(stage, num_stages, micro_batches, slots[stage], place, delay)
        for stage in range(num_stages)
    }


def _stage(stage: int, stages: int, count: int, slots: int, place: Placement, delay: Delay) -> Program:
    made = Hand(stage, place, count)
    last, mesh, micro = stages - 1, (stages, count), Rate.MICRO

    def send(source: int, target: int) -> Move:
        return Move(0, (At(source), S(0)), (At(target), S(0)), (count, 2), mesh)

    def total(shape: tuple[int, ...]) -> Move:
        return Move(1, (At(stage), P), (At(stage), B), shape, mesh)

    def later(function: Callable) -> Callable:
        def op(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            delay()
            return function(*tensors)

        return op

    weight, kept = made.given((2,)), made.register((1, 2), micro, slots)
    if stage == 0:
        batch = made.given((count, 2))
        made.compute("slice", lambda x, time: x[time : time + 1].clone(), [batch], kept, with_time=True)
    else:
        made.move("receive", send(stage - 1, stage), [], [kept], stage - 1)
    out, gradient = made.register((1, 2), micro), made.register((1, 2), micro)
    made.compute("multiply", later(torch.mul), [kept, weight], out)
    if stage == last:
        part, loss = made.register((), micro), made.register(())
        made.compute("square", lambda y: (y.square().sum(), 2 * y), [out], part, gradient)
        made.move("loss", total(()), [part], [loss], 50)
    else:
        made.move("send", send(stage, stage + 1), [out], [], stage)
        made.move("receive back", send(stage + 1, stage), [], [gradient], 100 + last - stage - 1, "backward")
    to_weight, to_input = made.register((2,), micro), made.register((1, 2), micro)
    made.compute(
        "backward",
        later(lambda g, x, w: ((g * x).sum(0), g * w)),
        [gradient, kept, weight],
        to_weight,
        to_input,
        phase="backward",
    )
    if stage > 0:
        made.move("send back", send(stage, stage - 1), [to_input], [], 100 + last - stage, "backward")
    summed, after = made.register((2,)), made.register((2,))
    made.move("accumulate", total((2,)), [to_weight], [summed], 200 + stage, "backward")
    made.compute("update", lambda w, g: w - 0.1 * g, [weight, summed], after, phase="update")
    made.give(after)
    if stage == last:
        made.give(loss)  # pyright: ignore[reportPossiblyUnboundVariable]
    return made.program()


def pipeline_inputs(num_stages: int, micro_batches: int) -> dict[int, list[Tensor]]:
    """Weights of every stage, and the batch."""
    generator = torch.Generator().manual_seed(7)
    weights = [0.5 + torch.rand(2, generator=generator) for _ in range(num_stages)]
    batch = torch.randn(micro_batches, 2, generator=generator)
    return {stage: [weights[stage], batch][: 2 if stage == 0 else 1] for stage in range(num_stages)}


def pipeline_expected(inputs: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
    """The same by autograd, on the whole batch."""
    weights = [tensors[0].clone().requires_grad_() for _, tensors in sorted(inputs.items())]
    y = inputs[0][1]
    for weight in weights:
        y = y * weight
    loss = y.square().sum()
    loss.backward()
    found = {
        stage: [(weight - 0.1 * weight.grad).detach()]
        for stage, weight in enumerate(weights)
        if weight.grad is not None
    }
    found[len(weights) - 1].append(loss.detach())
    return found
