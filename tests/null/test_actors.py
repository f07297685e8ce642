"""The engine: what fires when, what a register holds for how long, and what an error says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx

from monoflow.boxing.route import route
from monoflow.mesh import Placement, placement
from monoflow.runtime import actors
from monoflow.runtime.actors import Engine
from monoflow.runtime.program import Port, Program, Register, Task, task_module, verify
from monoflow.runtime.ready import Entry
from monoflow.runtime.transport import SimTransport
from monoflow.sbp.layout import B, P

ONE = placement("cpu", [0], axes=("data",))
TWO = placement("cpu", [0, 1], axes=("data",))
GRID = placement("cpu", [[0, 1], [2, 3]], axes=("a", "b"))


def compute(
    index: int,
    function: Callable[..., Tensor],
    inputs: Sequence[int],
    output: int,
    after: Sequence[int] = (),
) -> Task:
    """A task of one op."""
    graph = fx.Graph()
    arguments = [graph.placeholder(f"r{register}") for register in inputs]
    graph.output([graph.call_function(function, tuple(arguments), name=f"op{index}")])
    module = task_module(graph)
    return Task(index, f"task{index}", "forward", tuple(inputs), (output,), module, after=tuple(after))


def all_reduce(index: int, source: int, target: int, place: Placement = TWO, axis: int = 0) -> Task:
    """A task that sums along one axis."""
    before = tuple(P if one == axis else B for one in range(place.num_axes))
    (move,) = route(before, (B,) * place.num_axes, (2,), torch.float32, place.shape).steps
    return Task(index, f"sum{index}", "forward", (source,), (target,), move=move, order=index)


def program(
    tasks: Sequence[Task],
    inputs: Sequence[int],
    outputs: Sequence[int],
    rank: int = 0,
    place: Placement = ONE,
) -> Program:
    registers = [r for task in tasks for r in (*task.inputs, *task.outputs)] + [*inputs, *outputs]
    return verify(
        Program(
            rank,
            place,
            tuple(tasks),
            tuple(Register(index, f"x{index}", (2,), torch.float32) for index in range(max(registers) + 1)),
            tuple(Port(f"in{register}", register) for register in inputs),
            tuple(Port(f"out{register}", register) for register in outputs),
        )
    )


def engine(*programs: Program) -> Engine:
    place = programs[0].placement
    by_rank = {one.rank: one for one in programs}
    return Engine(by_rank, place, SimTransport(place), lambda name: f"described {name}")


def run(made: Engine, *inputs: Tensor) -> list[Tensor]:
    return made.run({0: list(inputs)})[0]


def noting(order: list[int], number: int) -> Callable[..., Tensor]:
    """An op that notes that it ran."""

    def op(*tensors: Tensor) -> Tensor:
        order.append(number)
        return torch.stack(tensors).sum(0) if tensors else torch.zeros(2)

    return op


def test_actors_fire_when_their_inputs_are_full() -> None:
    order: list[int] = []
    tasks = [
        compute(0, noting(order, 0), [0], 1),
        compute(1, noting(order, 1), [1], 2),
        compute(2, noting(order, 2), [0], 3),  # ready at once, but later in program order than task 1
        compute(3, noting(order, 3), [2, 3, 3], 4),
    ]
    made = engine(program(tasks, [0], [4, 1]))
    total, first = run(made, torch.ones(2))
    assert order == [0, 1, 2, 3]
    assert (total.tolist(), first.tolist()) == ([3, 3], [1, 1])
    order.clear()
    assert run(made, 2 * torch.ones(2))[0].tolist() == [6, 6]  # nothing is left from the step before
    assert order == [0, 1, 2, 3]


def test_a_task_without_inputs_fires_and_an_input_passes_through() -> None:
    made = engine(program([compute(0, lambda: torch.ones(2), [], 1)], [0], [0, 1]))
    given = torch.zeros(2)
    passed, constant = run(made, given)
    assert passed is given and constant.tolist() == [1, 1]


class Backwards(actors.Ready):
    """Ready actors, of which the last in program order is handed out."""

    def pop(self) -> Entry:
        return self.heap.pop(self.heap.index(max(self.heap)))


@pytest.mark.parametrize("queue", [actors.Ready, Backwards])
def test_writes_come_after_reads(queue: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "Ready", queue)
    order: list[int] = []

    def overwrite(x: Tensor, by: Tensor) -> Tensor:
        order.append(2)
        return x.copy_(by)

    tasks = [
        compute(0, noting(order, 0), [1], 2),
        compute(1, noting(order, 1), [0, 2], 3),  # reads register 0, and is ready later than task 2 would be
        compute(2, overwrite, [0, 1], 4, after=[1]),
    ]
    state = torch.ones(2)
    before, now = run(engine(program(tasks, [0, 1], [3, 4])), state, 5 * torch.ones(2))
    assert order == [0, 1, 2]
    assert before.tolist() == [6, 6] and now is state and state.tolist() == [5, 5]


def test_of_several_ready_actors_the_first_in_program_order_fires() -> None:
    """Whatever became ready first: gathers that are all ready at once wait until they are near their use."""
    order: list[int] = []
    tasks = [
        compute(0, noting(order, 0), [0], 2),
        compute(1, noting(order, 1), [2], 3),
        compute(2, noting(order, 2), [1], 4),
        compute(3, noting(order, 3), [3, 4], 5),
        compute(4, noting(order, 4), [1], 6),
        compute(5, noting(order, 5), [5, 6], 7),
    ]
    run(engine(program(tasks, [0, 1], [7])), torch.ones(2), torch.ones(2))
    assert order == [0, 1, 2, 3, 4, 5]


def test_an_input_that_the_caller_gave_away_is_free_after_its_last_reader() -> None:
    seen: list[weakref.ref] = []
    alive: list[bool] = []

    def first(x: Tensor) -> Tensor:
        seen.append(weakref.ref(x))
        return x * 1

    def later(x: Tensor) -> Tensor:
        alive.append(seen[0]() is not None)
        return x * 1

    made = engine(program([compute(0, first, [0], 1), compute(1, later, [1], 2)], [0], [2]))
    made.run({0: [torch.ones(2)]})
    assert alive == [False]


def test_registers_are_free_after_their_last_reader_took_them() -> None:
    alive: dict[str, list[bool]] = {}
    made: list[weakref.ref] = []

    def produce(x: Tensor) -> Tensor:
        value = x + 1
        made.append(weakref.ref(value))
        return value

    def look(name: str) -> Callable[[Tensor], Tensor]:
        def op(x: Tensor) -> Tensor:
            gc.collect()
            alive[name] = [one() is not None for one in made]
            return x * 1

        return op

    graph = fx.Graph()  # the last reader: drops its argument after its first op
    argument = graph.placeholder("r1")
    half = graph.call_function(torch.mul, (argument, 0.5))
    graph.output([graph.call_function(look("inside the last reader"), (half,))])
    tasks = [
        compute(0, produce, [0], 1),
        compute(1, look("in the first reader"), [1], 2),
        Task(2, "task2", "forward", (1,), (3,), task_module(graph), after=(1,)),
        compute(3, look("after"), [3], 4),
    ]
    run(engine(program(tasks, [0], [4])), torch.ones(2))
    assert alive == {
        "in the first reader": [True],
        "inside the last reader": [False],
        "after": [False],
    }


def test_the_engine_keeps_no_tensor_between_steps() -> None:
    made = engine(program([compute(0, torch.neg, [0], 1), compute(1, torch.neg, [0], 2)], [0], [1]))
    given = torch.ones(2)
    result = weakref.ref(run(made, given)[0])
    given_ref = weakref.ref(given)
    del given
    gc.collect()
    assert result() is None and given_ref() is None


# --- collectives -------------------------------------------------------------------------------------


class Recording(SimTransport):
    """Notes which axis each collective went along, and that all ranks of a group took part."""

    def __init__(self, place: Placement) -> None:
        super().__init__(place)
        self.axes: list[int] = []

    def all_reduce(self, tensors, op, group):  # type: ignore[no-untyped-def]
        self.axes.append(group.axis)
        return super().all_reduce(tensors, op, group)


def test_collectives_fire_in_program_order_though_ranks_are_uneven() -> None:
    """Rank 1 has the second collective's input first; rank 0 the first's."""
    order: list[int] = []

    def of(rank: int) -> Program:
        slow, fast = (3, 1) if rank == 0 else (1, 3)
        tasks = [
            compute(0, noting(order, 10 * rank), [0], 1),
            compute(1, noting(order, 10 * rank + 1), [1], 2),
            compute(2, noting(order, 10 * rank + 2), [0], 3),
            all_reduce(3, slow, 4),
            all_reduce(4, fast, 5),
        ]
        return program(tasks, [0], [4, 5], rank, TWO)

    place = TWO
    transport = Recording(place)
    made = Engine({rank: of(rank) for rank in (0, 1)}, place, transport, str)
    found = made.run({0: [torch.ones(2)], 1: [10 * torch.ones(2)]})
    assert [x.tolist() for x in found[0]] == [[11, 11], [11, 11]]
    assert len(transport.axes) == 2
    assert transport.stats(0).counts == transport.stats(1).counts


def test_collectives_of_all_axes_have_one_order() -> None:
    """Two axes: the first collective waits for a longer chain, and the second for it all the same."""

    def of(rank: int) -> Program:
        tasks = [
            compute(0, torch.neg, [0], 1),
            compute(1, torch.neg, [1], 2),
            all_reduce(2, 2, 3, GRID, axis=0),
            all_reduce(3, 0, 4, GRID, axis=1),
        ]
        return program(tasks, [0], [3, 4], rank, GRID)

    transport = Recording(GRID)
    made = Engine({rank: of(rank) for rank in range(4)}, GRID, transport, str)
    found = made.run({rank: [torch.full((2,), 10.0**rank)] for rank in range(4)})
    assert transport.axes == [0, 0, 1, 1]  # two groups each
    assert [found[rank][0][0].item() for rank in range(4)] == [101, 1010, 101, 1010]
    assert [found[rank][1][0].item() for rank in range(4)] == [11, 11, 1100, 1100]


def test_ranks_with_different_collectives_are_refused() -> None:
    one = program([all_reduce(0, 0, 1)], [0], [1], 0, TWO)
    other = program([compute(0, torch.neg, [0], 1)], [0], [1], 1, TWO)
    with pytest.raises(AssertionError, match=r"task sum0 .*, move 0, is not run by ranks \[1\]"):
        engine(one, other)


# --- what went wrong ---------------------------------------------------------------------------------


def test_a_failing_op_is_named() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("the op's own words")

    graph = fx.Graph()
    first, second = graph.placeholder("r0"), graph.placeholder("r1")
    total = graph.call_function(torch.add, (first, second), name="total")
    failed = graph.call_function(fail, (total,), name="culprit")
    graph.output([graph.call_function(torch.neg, (failed,), name="later")])
    task = Task(0, "forward_0", "forward", (0, 1), (2,), task_module(graph))
    with pytest.raises(ValueError, match="own words") as caught:
        run(engine(program([task], [0, 1], [2])), torch.ones(2), torch.ones(2))
    assert caught.value.__notes__ == ["in task forward_0 (forward) of rank 0: described culprit"]


def test_a_failing_collective_is_named() -> None:
    class Broken(SimTransport):
        def all_reduce(self, tensors, op, group):  # type: ignore[no-untyped-def]
            raise RuntimeError("connection closed")

    programs = {rank: program([all_reduce(0, 0, 1)], [0], [1], rank, TWO) for rank in (0, 1)}
    made = Engine(programs, TWO, Broken(TWO), str)
    with pytest.raises(RuntimeError, match="connection closed") as caught:
        made.run({rank: [torch.ones(2)] for rank in (0, 1)})
    assert caught.value.__notes__ == ["in task sum0 (forward) of rank 0, P(sum) -> B by all_reduce on axis 0"]


def test_a_program_that_cannot_finish_says_who_waits_for_what() -> None:
    """Not reachable through `verify`: a task that comes after one which waits for it."""
    tasks = (
        compute(0, torch.neg, [0], 1, after=[1]),
        compute(1, torch.neg, [1], 2),
    )
    registers = tuple(Register(index, f"x{index}", (2,), torch.float32) for index in range(3))
    stuck = Program(0, ONE, tasks, registers, (Port("x", 0),), (Port("y", 2),))
    with pytest.raises(AssertionError) as caught:
        engine(stuck)
    assert str(caught.value).splitlines() == [
        "the program can deadlock, each of these waits for the next:",
        "task task0 (forward) of rank 0 waits until task task1 (forward) of rank 0 is done",
        "task task1 (forward) of rank 0 waits for register r1 (x1) from task task0 (forward) of rank 0",
    ]
