"""A step begins while the one before runs: same numbers, nothing reordered, no more memory than one step."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from monoflow.boxing.route import Move
from monoflow.errors import RunError
from monoflow.mesh import placement
from monoflow.runtime.firing import Firing, Registers
from monoflow.runtime.following import Following, Progress
from monoflow.runtime.lanes import Crew, Ticket
from monoflow.runtime.network import Actor, Marking, Network
from monoflow.runtime.openings import openings
from monoflow.runtime.program import Program
from monoflow.runtime.recorder import Fired
from monoflow.runtime.transport import SimTransport
from monoflow.sbp.layout import B, P, S
from tests.null.hand_made import Hand

TWO = placement("cpu", [0, 1], axes=("data",))
RANKS = (0, 1)
Delay = Callable[[str], None]


def sharded(
    rank: int, layers: int = 3, in_place: bool = True, delay: Delay = lambda name: None, follows: bool = True
) -> Program:
    """Layers whose weights lie in shards: gathered, multiplied by, and each updated as soon as it can be.

    A count of steps is kept too, which is not updated in place.

    Args:
        delay: called in every computation but the loss, with its kind.
    """
    made = Hand(rank, TWO)
    x, shards = made.given((4,), fresh=True), []
    count = made.given((1,))
    gather, reduce = Move(0, (S(0),), (B,), (4,), (2,)), Move(0, (P,), (S(0),), (4,), (2,))

    def op(name: str, function: Callable) -> Callable:
        def run(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            delay(name)
            return function(*tensors)

        return run

    shards = [made.given((2,), donated=in_place) for _ in range(layers)]
    wholes = [made.register((4,)) for _ in shards]
    kept: list[tuple[int, int]] = []
    out = made.register((4,))
    made.move("gather 0", gather, [shards[0]], [wholes[0]], 0)
    made.compute("prologue", op("prologue", lambda x: x * 1), [x], out)
    for layer, whole in enumerate(wholes):
        if layer + 1 < layers:
            ahead = [shards[layer + 1]], [wholes[layer + 1]]
            made.move(f"gather {layer + 1}", gather, *ahead, len(made.tasks))
        after = made.register((4,))
        made.compute(f"forward {layer}", op("forward", torch.mul), [out, whole], after)
        kept.append((out, whole))
        out = after
    loss, total = made.register((1,)), made.register((1,))
    made.compute("loss", lambda y: y.square().sum()[None], [out], loss)
    made.move("total", Move(0, (P,), (B,), (1,), (2,)), [loss], [total], len(made.tasks))
    made.give(total)
    gradient = made.register((4,))
    made.compute("begin", lambda y: 2 * y, [out], gradient, phase="backward")
    for layer in reversed(range(layers)):
        before, whole = kept[layer]
        part, back, mine = made.register((4,)), made.register((4,)), made.register((2,))
        made.compute(
            f"backward {layer}",
            op("backward", lambda g, i, w: (g * i, g * w)),
            [gradient, before, whole],
            part,
            back,
            phase="backward",
        )
        made.move(f"reduce {layer}", reduce, [part], [mine], len(made.tasks), phase="backward")
        updated, shard = made.register((2,)), shards[layer]
        update = (lambda w, g: w.sub_(0.01 * g)) if in_place else (lambda w, g: w - 0.01 * g)
        readers = [task.index for task in made.tasks if shard in task.inputs]
        made.compute(
            f"update {layer}", op("update", update), [shard, mine], updated, phase="update", after=readers
        )
        made.give(updated, replaces=shard)
        gradient = back
    counted = made.register((1,))
    made.compute("count", op("count", lambda c, g: c + 1), [count, mine], counted, phase="update")  # the last
    made.give(counted, replaces=count)
    return made.program(follows=follows)


class Trainer:
    """Two simulated ranks with state of their own, driven as a compiled step drives its engine."""

    def __init__(self, programs: dict[int, Program], transport: SimTransport | None = None) -> None:
        self.programs = programs
        self.rows: list[Fired] = []
        network = Network(programs, TWO, one_order=False)
        transport = transport or SimTransport(TWO)
        firing = Firing(network, transport, lambda name: f"op {name}, train.py:7", self)
        self.crew = Crew(network, firing, None, patience=0)
        generator = torch.Generator().manual_seed(0)
        self.state = {
            rank: [
                torch.zeros(1) if shape == (1,) else 0.5 + torch.rand(*shape, generator=generator)
                for shape in (one.registers[port.register].shape for port in one.inputs[1:])
            ]
            for rank, one in programs.items()
        }

    def record(self, fired: Fired) -> None:
        self.rows.append(fired)

    def start(self, batch: Tensor, follows: bool = True) -> Ticket:
        self.crew.admit(follows)
        registers = Registers(self.crew.network)
        for rank in RANKS:
            registers.fill(rank, [batch.clone(), *self.state[rank]])
        return self.crew.start(registers, {rank: self._homes(rank) for rank in RANKS})

    def _homes(self, rank: int) -> list[Tensor | None]:
        program = self.programs[rank]
        names = {port.name: tensor for port, tensor in zip(program.inputs[1:], self.state[rank], strict=True)}
        return [names.get(port.replaces) for port in program.outputs]


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 4, generator=torch.Generator().manual_seed(1)))


def trained(trainer: Trainer, steps: int, follows: bool) -> tuple[list[list[float]], list[list[float]]]:
    """Losses of both ranks, and all state in the end."""
    tickets = []
    for batch in batches(steps):
        tickets.append(trainer.start(batch, follows))
    losses = [[float(one.result()[rank][0]) for rank in RANKS] for one in tickets]
    state = [tensor.tolist() for rank in RANKS for tensor in trainer.state[rank]]
    trainer.crew.stop()
    return losses, state


def test_when_a_next_step_may_do_what() -> None:
    program = sharded(0, layers=2)
    names = [task.name for task in program.tasks]
    assert names == [
        "gather 0", "prologue", "gather 1", "forward 0", "forward 1", "loss", "total", "begin",
        "backward 1", "reduce 1", "update 1", "backward 0", "reduce 0", "update 0", "count",
    ]  # fmt: skip
    found = openings(program)
    over = len(names) + 1
    # By hand, in bytes: most is held in "backward 1", 116, of which a batch takes 16. In "backward 0" the
    # step before holds 84: what that reads, 48, and makes, 32, and the loss. Until "update 1" is done,
    # it may hold what "reduce 0" makes and works with besides, 24, and two sums more, 12.
    assert found.inputs == names.index("backward 0")
    # The first weight is updated last; what is computed with weights comes when the step before is over.
    gathers = names.index("update 0") + 1
    assert found.tasks == (gathers, gathers, gathers, *[over] * (len(names) - 3))


def test_what_is_not_updated_in_place_opens_when_the_step_is_over() -> None:
    found = openings(sharded(0, layers=2, in_place=False))
    assert set(found.tasks) == {len(found.tasks) + 1}
    alone = openings(sharded(0, layers=2, follows=False))
    assert {alone.inputs, *alone.tasks} == {len(found.tasks) + 1}


class Steps:
    """Two steps at a time without threads: actors begin and end in any order that tokens allow."""

    def __init__(self, programs: dict[int, Program], draw: random.Random | None) -> None:
        self.trainer, self.draw = Trainer(programs), draw
        self.network = self.trainer.crew.network
        self.following, self.firing = Following(self.network), self.trainer.crew.firing
        self.flights: list[tuple[int, Marking, Registers, Progress]] = []
        self.ready: list[tuple[int, Actor]] = []
        self.running: list[tuple[int, Actor, int, list[list[Tensor]]]] = []
        self.outside = {one.data_ptr() for own in self.trainer.state.values() for one in own}
        self.most, self.most_of_two, self.num_early = 0, 0, 0  # of one step in program order, of two
        self.losses: list[list[float]] = []

    def run(self, given: Sequence[Tensor]) -> list[list[float]]:
        """The losses of all steps."""
        todo = list(enumerate(given))
        while todo or self.flights:
            may_start = not self.flights or (
                self.draw is not None and len(self.flights) == 1 and self.flights[0][3].takes_inputs
            )
            if todo and may_start and (not self.flights or self._chance()):
                self._start(*todo.pop(0))
            elif self.ready and (not self.running or (self.draw is not None and self._chance())):
                self._begin()
            else:
                self._end()
            held = max(map(self._held, RANKS))
            if len(self.flights) > 1:
                self.most_of_two = max(self.most_of_two, held)
            elif self.draw is None:
                self.most = max(self.most, held)
        return self.losses

    def _chance(self) -> bool:
        return self.draw is None or self.draw.random() < 0.5

    def _pick(self, entries: list) -> int:
        if self.draw is not None:
            return self.draw.randrange(len(entries))
        return min(range(len(entries)), key=lambda at: entries[at][1].task.index)

    def _start(self, number: int, batch: Tensor) -> None:
        marking, registers = Marking(self.network), Registers(self.network)
        for rank in RANKS:
            registers.fill(rank, [batch.clone(), *self.trainer.state[rank]])
        if self.flights:
            marking.shut(self.following.closed(self.flights[0][3].places))
        self.flights.append((number, marking, registers, Progress(self.following)))
        self.ready += [(number, actor) for actor in marking.ready()]

    def _flight(self, number: int) -> tuple[int, Marking, Registers, Progress]:
        return next(one for one in self.flights if one[0] == number)

    def _begin(self) -> None:
        number, actor = self.ready.pop(self._pick(self.ready))
        self.num_early += number != self.flights[0][0]
        _, marking, registers, _ = self._flight(number)
        moment = marking.begin(actor)
        self.running.append((number, actor, moment, self.firing.read(registers, actor, moment)))

    def _end(self) -> None:
        number, actor, moment, given = self.running.pop(self._pick(self.running))
        _, marking, registers, progress = self._flight(number)
        results = self.firing.work(actor, number, moment, given)
        self.firing.write(registers, actor, moment, results)
        self.ready += [(number, one) for one in marking.end(actor)]
        opened = progress.note(actor)
        if number == self.flights[0][0]:
            self._open(opened)
        while self.flights and self.flights[0][1].is_done:
            _, _, registers, progress = self.flights[0]
            registers.settle({rank: self.trainer._homes(rank) for rank in RANKS})
            self._open(progress.end())
            self.losses.append([float(registers.take(rank)[0]) for rank in RANKS])
            self.flights.pop(0)

    def _open(self, actors: Sequence[int]) -> None:
        if len(self.flights) > 1:
            number, marking, *_ = self.flights[1]
            self.ready += [(number, actor) for actor in marking.open(actors)]

    def _held(self, rank: int) -> int:
        """Bytes of a rank's registers, of what runs, and of what moves work with."""
        network, found, working = self.network, {}, 0
        registers = range(network.bases[rank], network.bases[rank] + len(network.programs[rank].registers))
        for _, _, held, _ in self.flights:
            for tensor in (held.cells[network.cells[register].base] for register in registers):
                if tensor is not None:
                    found[tensor.data_ptr()] = tensor.nbytes
        for _, actor, _, reads in self.running:
            for member, tensors in zip(actor.members, reads, strict=True):
                if member.rank == rank:
                    found |= {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
                    made = sum(4 * torch.Size(self._register(rank, one)).numel() for one in member.outputs)
                    found[-actor.number - 1] = made  # where it writes to
                    if actor.task.move is not None:
                        working += max(made, sum(tensor.nbytes for tensor in tensors))
        return working + sum(size for pointer, size in found.items() if pointer not in self.outside)

    def _register(self, rank: int, register: int) -> tuple[int, ...]:
        return self.network.programs[rank].registers[register - self.network.bases[rank]].shape


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), layers=st.integers(1, 6), in_place=st.booleans())
def test_in_any_order_two_steps_give_the_numbers_of_one_after_the_other(
    seed: int, layers: int, in_place: bool
) -> None:
    programs = {rank: sharded(rank, layers, in_place) for rank in RANKS}
    alone, raced = Steps(programs, None), Steps(programs, random.Random(seed))
    expected = alone.run(batches(5))
    assert raced.run(batches(5)) == expected
    for rank in RANKS:
        assert all(map(torch.equal, raced.trainer.state[rank], alone.trainer.state[rank]))
    assert alone.num_early == 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), layers=st.integers(1, 6))
def test_two_steps_hold_no_more_than_one_does(seed: int, layers: int) -> None:
    programs = {rank: sharded(rank, layers) for rank in RANKS}
    alone, raced = Steps(programs, None), Steps(programs, random.Random(seed))
    alone.run(batches(1))
    raced.run(batches(6))
    assert 0 < raced.most_of_two <= alone.most


# --- on lanes ------------------------------------------------------------------------------------------


def slow(seed: int) -> Delay:
    """Delays of computations at random, the same in every run."""
    draw = random.Random(seed)
    return lambda name: time.sleep(draw.random() * 2e-3 if draw.random() < 0.3 else 0)


def test_lanes_begin_a_step_before_the_one_before_is_over() -> None:
    may_end = threading.Event()

    def delay(name: str) -> None:
        if name == "count":
            assert may_end.wait(20)

    trainer = Trainer({rank: sharded(rank, delay=delay) for rank in RANKS})
    tickets = [trainer.start(batch) for batch in batches(2)]
    deadline = time.monotonic() + 20
    while not any(row.step == 1 and row.name == "gather 0" for row in trainer.rows):
        assert time.monotonic() < deadline, "the first gather of the next step waits for the end of this one"
        time.sleep(1e-3)
    may_end.set()
    losses = [[float(one.result()[rank][0]) for rank in RANKS] for one in tickets]
    last = max(row.end for row in trainer.rows if row.step == 0)
    assert {row.name for row in trainer.rows if row.step == 1 and row.start < last} == {"gather 0"}
    assert losses == trained(Trainer({rank: sharded(rank) for rank in RANKS}), 2, follows=False)[0]
    trainer.crew.stop()


@pytest.mark.parametrize("in_place", [True, False])
def test_steps_on_lanes_give_the_numbers_of_one_after_the_other(in_place: bool) -> None:
    expected = trained(Trainer({rank: sharded(rank, 3, in_place) for rank in RANKS}), 12, follows=False)
    for seed in range(5):
        programs = {rank: sharded(rank, 3, in_place, slow(seed)) for rank in RANKS}
        assert trained(Trainer(programs), 12, follows=True) == expected


def test_steps_that_nobody_looks_at_keep_nothing() -> None:
    trainer, kept, most = Trainer({rank: sharded(rank) for rank in RANKS}), [], 0
    for batch in batches(5) * 200:
        kept = [one for one in kept if one() is not None]
        kept.append(weakref.ref(trainer.start(batch)._flight.registers))
        most = max(most, len(kept))
    trainer.crew.admit(follows=False)
    assert most <= 4  # two on their way, and one that a lane is on its way back from
    trainer.crew.stop()


class Failing:
    """Fails in one computation of one step."""

    def __init__(self, name: str, step: int) -> None:
        self.name, self.step, self.seen = name, step, 0
        self.may_fail = threading.Event()

    def __call__(self, name: str) -> None:
        if name == self.name:
            self.seen += 1
            if self.seen == self.step + 1:
                assert self.may_fail.wait(20)
                raise ValueError("no such luck")


def test_a_step_that_fails_takes_the_next_one_with_it() -> None:
    failing = Failing("count", 0)
    trainer = Trainer({0: sharded(0, delay=failing), 1: sharded(1)})
    first, second = (trainer.start(batch) for batch in batches(2))
    failing.may_fail.set()
    with pytest.raises(ValueError, match="no such luck") as caught:
        second.result()
    with pytest.raises(ValueError, match="no such luck") as again:
        first.result()
    assert caught.value is again.value
    assert caught.value.__notes__ == ["in task count (update) of rank 0: op count, train.py:7"]
    with pytest.raises(RunError, match=r"a step failed before.*no such luck"):
        trainer.start(batches(1)[0])
    trainer.crew.stop()


def test_a_step_whose_next_one_fails_ends_as_if_it_were_alone() -> None:
    """The next step fails in its first gather, while this one still computes."""
    raised, may_end = threading.Event(), threading.Event()

    class Breaking(SimTransport):
        gathers = 0

        def all_gather(self, tensors, group):  # type: ignore[no-untyped-def]
            self.gathers += 1
            if self.gathers == 4:  # of three a step
                raised.set()
                raise ValueError("the link broke")
            return super().all_gather(tensors, group)

    def delay(name: str) -> None:
        if name == "count":
            assert may_end.wait(20)

    trainer = Trainer({rank: sharded(rank, delay=delay) for rank in RANKS}, transport=Breaking(TWO))
    first, second = (trainer.start(batch) for batch in batches(2))
    assert raised.wait(20)
    may_end.set()
    with pytest.raises(ValueError, match="the link broke"):
        second.result()
    losses = [float(first.result()[rank][0]) for rank in RANKS]
    alone = Trainer({rank: sharded(rank) for rank in RANKS})
    assert [losses] == trained(alone, 1, follows=False)[0]
    for rank in RANKS:
        assert all(map(torch.equal, trainer.state[rank], alone.state[rank]))
    trainer.crew.stop()


def test_the_wait_for_graph_says_what_waits_for_the_step_before() -> None:
    network = Network({rank: sharded(rank) for rank in RANKS}, TWO, one_order=False)
    marking = Marking(network)
    marking.shut(Following(network).closed({0: 0, 1: 0}))
    texts = [text for _, text in marking.wait_for_graph()]
    assert texts[:2] == [
        "task gather 0 (forward) of rank 0 waits for the step before",
        "task prologue (forward) of rank 0 waits for the step before",
    ]
    assert not marking.ready()
