"""What can deadlock is refused before it runs; what cannot finishes in every order, with the same numbers."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from monoflow.boxing.route import Move
from monoflow.mesh import placement
from monoflow.runtime.actors import Engine
from monoflow.runtime.channels import Channel
from monoflow.runtime.firing import Firing, Registers
from monoflow.runtime.liveness import needed_bytes, verify_live
from monoflow.runtime.network import Actor, Marking, Network
from monoflow.runtime.program import Rate
from monoflow.runtime.transport import SimTransport
from monoflow.sbp.layout import B, P, S
from tests.null.hand_made import Hand, pipeline, pipeline_expected, pipeline_inputs

TWO = placement("cpu", [0, 1], axes=("data",))


def two_sums(orders: tuple[int, int], rank: int = 0) -> Hand:
    """Two all-reduces one after the other, with these numbers among all moves."""
    made = Hand(rank, TWO)
    first, middle, last = made.given((2,)), made.register((2,)), made.register((2,))
    move = Move(0, (P,), (B,), (2,), (2,))
    made.move("first", move, [first], [middle], orders[0])
    made.move("second", move, [middle], [last], orders[1])
    made.give(last)
    return made


def test_an_order_of_moves_that_contradicts_the_data_is_refused() -> None:
    verify_live(Network({0: two_sums((0, 1)).program()}, TWO))
    with pytest.raises(AssertionError) as caught:
        verify_live(Network({0: two_sums((1, 0)).program()}, TWO))
    assert str(caught.value).splitlines() == [
        "the program can deadlock, each of these waits for the next:",
        "task first (forward) of rank 0 waits for its turn after task second (forward) of rank 0",
        "task second (forward) of rank 0 waits for register r1 (x1) from task first (forward) of rank 0",
    ]


def test_too_few_slots_are_refused_with_the_register() -> None:
    """A step reads a micro-batch only when all of them have been added up: one slot does not hold three."""
    made = Hand(0, placement("cpu", [0], axes=("data",)), 3)
    micro = Rate.MICRO
    batch, part, total, again = (
        made.given((3, 2)),
        made.register((1, 2), micro),
        made.register((1, 2)),
        made.register((1, 2), micro),
    )
    made.compute("cut", lambda x, time: x[time : time + 1], [batch], part, with_time=True)
    made.move("total", Move(1, (B, P), (B, B), (1, 2), (1, 3)), [part], [total], 0)
    made.compute("share", torch.div, [part, total], again)
    sums = made.register((1, 2))
    made.move("shares", Move(1, (B, P), (B, B), (1, 2), (1, 3)), [again], [sums], 1)
    made.give(sums)
    with pytest.raises(AssertionError) as caught:
        Engine({0: made.program()}, made.place, SimTransport(made.place), str)
    text = str(caught.value)
    assert "task cut (forward) of rank 0, micro-batch 1 waits until task share (forward) of rank 0" in text
    assert "hands back one of 1 slots of register r1 (x1)" in text
    made.registers[part] = made.registers[part].__class__(part, "x1", (1, 2), torch.float32, 3, micro)
    engine = Engine({0: made.program()}, made.place, SimTransport(made.place), str)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [4.0, 2.0]])
    assert engine.run({0: [x]})[0][0].tolist() == [[1.0, 1.0]]


def test_the_bytes_of_a_step_in_any_timing() -> None:
    programs = pipeline(2, 4)
    network = Network(programs, programs[0].placement)
    # By hand, in floats: the weight and the batch, as inputs; then all that is walked: kept (2 slots)
    # product, gradient, two gradients, their sum; two sends work with a copy each of what they read or make.
    # The next weight too: nothing of this rank that it needs waits for the send. On the last rank it does.
    first = (2 + 8) + (2 * 2 + 2 + 2 + 2 + 2 + 2) + 2 * 2 + 2
    last = 2 + (2 + 2 + 1 + 2 + 1 + 2 + 2 + 2) + 2 * 2
    assert needed_bytes(network) == {0: 4 * first, 1: 4 * last}


def filled(network: Network, inputs: Mapping[int, Sequence[Tensor]]) -> Registers:
    registers = Registers(network)
    for rank, tensors in inputs.items():
        registers.fill(rank, tensors)
    return registers


def at_random(
    firing: Firing, registers: Registers, draw: random.Random
) -> Iterator[list[tuple[Actor, list[list[Tensor]]]]]:
    """Begins and ends actors in any order, as lanes do. Yields each time what works, and what it read."""
    marking = Marking(registers.network)
    ready, running = marking.ready(), []
    while ready or running:
        if ready and (not running or draw.random() < 0.6):
            actor = ready.pop(draw.randrange(len(ready)))
            time = marking.begin(actor)
            running.append((actor, time, firing.read(registers, actor, time)))
        else:
            actor, time, reads = running.pop(draw.randrange(len(running)))
            firing.write(registers, actor, time, firing.work(actor, 0, time, reads))
            ready += marking.end(actor)
        yield [(actor, reads) for actor, _, reads in running]
    assert marking.is_done


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), stages=st.integers(2, 4), count=st.integers(1, 5), ones=st.booleans())
def test_no_timing_holds_more_than_is_said(seed: int, stages: int, count: int, ones: bool) -> None:
    programs = pipeline(stages, count)
    network = Network(programs, programs[0].placement, one_order=ones)
    said, draw = needed_bytes(network), random.Random(seed)
    firing = Firing(network, SimTransport(programs[0].placement), str)
    inputs = pipeline_inputs(stages, count)
    registers = filled(network, inputs)
    fixed = {rank: sum(one.nbytes for one in tensors) for rank, tensors in inputs.items()}
    given_ = {one.data_ptr() for tensors in inputs.values() for one in tensors}
    for running in at_random(firing, registers, draw):
        for rank in programs:
            base, end = network.bases[rank], network.bases[rank] + len(programs[rank].registers)
            first = network.cells[base].base
            last = network.cells[end].base if end < len(network.cells) else len(network.reads)
            held = {one.data_ptr(): one.nbytes for one in registers.cells[first:last] if one is not None}
            for member, tensors in (
                pair for actor, own in running for pair in zip(actor.members, own, strict=True)
            ):
                if member.rank == rank:
                    held |= {one.data_ptr(): one.nbytes for one in tensors}
            held = {pointer: size for pointer, size in held.items() if pointer not in given_}
            assert fixed[rank] + sum(held.values()) <= said[rank]


def test_slots_bound_how_far_a_stage_runs_ahead() -> None:
    """The channels' order alone lets the first stage send on; its slots do not."""
    programs = pipeline(3, 8)
    network = Network(programs, programs[0].placement, one_order=False)
    marking, ahead = Marking(network), {0: 0, 1: 0, 2: 0}
    ready = marking.ready()
    fired = {rank: [0, 0] for rank in programs}
    while ready:
        actor = max(ready, key=lambda one: -one.task.index)  # forward as far as it goes
        ready.remove(actor)
        marking.begin(actor)
        ready += marking.end(actor)
        for member in actor.members:
            if member.task.name == "multiply":
                fired[member.rank][0] += 1
            if member.task.name == "backward":
                fired[member.rank][1] += 1
            ahead[member.rank] = max(ahead[member.rank], fired[member.rank][0] - fired[member.rank][1])
    assert marking.is_done
    assert ahead == {0: 3, 1: 2, 2: 1}


def test_lanes_gather_as_far_ahead_as_the_program_says() -> None:
    """Four gathers that could all go at once: each waits for the computation before it in program order."""
    made = Hand(0, TWO)
    x, weights, wholes = made.given((2,)), [made.given((1,)) for _ in range(4)], []

    def gather(number: int) -> None:
        wholes.append(made.register((2,)))
        move = Move(0, (S(0),), (B,), (2,), (2,))
        made.move(f"gather {number + 1}", move, [weights[number]], [wholes[number]], len(made.tasks))

    gather(0)
    for layer in range(4):
        if layer < 3:
            gather(layer + 1)
        after = made.register((2,))
        made.compute(f"layer {layer + 1}", torch.mul, [x, wholes[layer]], after)
        x = after
    made.give(x)
    network = Network({0: made.program()}, TWO, one_order=False)
    marking, order = Marking(network), []
    ready = marking.ready()
    while ready:
        actor = max(ready, key=lambda one: (one.task.move is not None, -one.task.index))  # moves first
        ready.remove(actor)
        marking.begin(actor)
        ready += marking.end(actor)
        order.append(actor.task.name)
    assert order == [
        "gather 1", "gather 2", "layer 1", "gather 3", "layer 2", "gather 4", "layer 3", "layer 4",
    ]  # fmt: skip


def test_compute_runs_two_tasks_ahead_of_moves_that_nobody_reads() -> None:
    """What a reduction reads is held for two more computations, not for all that follow."""
    made = Hand(0, TWO)
    x = made.given((2,))
    for layer in range(4):
        after, total = made.register((2,)), made.register((2,))
        made.compute(f"layer {layer}", torch.mul, [x, x], after)
        made.move(f"sum {layer}", Move(0, (P,), (B,), (2,), (2,)), [after], [total], len(made.tasks))
        made.give(total)
        x = after
    network = verify_live(Network({0: made.program()}, TWO, one_order=False))
    marking, order = Marking(network), []
    ready = marking.ready()
    while ready:
        actor = min(ready, key=lambda one: (one.task.move is not None, one.task.index))  # moves last
        ready.remove(actor)
        marking.begin(actor)
        ready += marking.end(actor)
        order.append(actor.task.name)
    assert order == [
        "layer 0", "layer 1", "layer 2", "sum 0", "layer 3", "sum 1", "sum 2", "sum 3",
    ]  # fmt: skip


def test_moves_of_a_stage_go_one_forward_one_backward() -> None:
    """By hand: with two slots, forward of micro-batch t + 1 comes with backward of t, if turns say so."""
    made = Hand(0, TWO, 4)
    micro = Rate.MICRO
    batch, cut, kept = made.given((4, 2)), made.register((1, 2), micro), made.register((1, 2), micro, 2)
    back, total = made.register((1, 2), micro), made.register((1, 2))
    move = Move(0, (P, S(0)), (B, S(0)), (4, 2), (2, 4))
    made.compute("cut", lambda x, time: x[time : time + 1], [batch], cut, with_time=True)
    made.move("forth", move, [cut], [kept], 0, turns=range(4))
    made.move("back", move, [kept], [back], 1, phase="backward", turns=range(1, 5))
    made.move("total", Move(1, (B, P), (B, B), (1, 2), (2, 4)), [back], [total], 2, phase="backward")
    made.move("last", Move(0, (P, B), (B, B), (1, 2), (2, 4)), [total], [made.register((1, 2))], 3)
    network = verify_live(Network({0: made.program()}, TWO, one_order=False))
    ((channel, turns),) = network.turns.items()
    assert channel == Channel("collectives", 0)
    names = [actor.task.name for actor in turns]
    assert names == ["forth", "forth", "back", "forth", "back", "forth", "back", "back", "last"]


def test_a_task_lets_another_go_some_micro_batches_on() -> None:
    """Where both could go, the one behind waits for so many of the other, or for its last."""
    made = Hand(0, placement("cpu", [0], axes=("data",)), 5)
    micro = Rate.MICRO
    batch, cut, total = made.given((5, 2)), made.register((1, 2), micro, 4), made.register((1, 2))
    made.compute("cut", lambda x, time: x[time : time + 1], [batch], cut, with_time=True)
    made.compute("later", torch.neg, [cut], made.register((1, 2), micro))
    made.move("total", Move(1, (B, P), (B, B), (1, 2), (1, 5)), [cut], [total], 0)
    made.give(total)
    made.tasks[1] = replace(made.tasks[1], behind=(0, 2))
    for one_order, expected in ((True, "cl" * 5), (False, "ccclclclll")):
        network = verify_live(Network({0: made.program()}, made.place, one_order))
        marking, order = Marking(network), []
        ready = marking.ready()
        while ready:
            actor = max(ready, key=lambda one: one.task.index)  # what is later in the program first
            ready.remove(actor)
            marking.begin(actor)
            ready += marking.end(actor)
            order.append(actor.task.name[0])
        assert marking.is_done
        assert "".join(order).replace("t", "") == expected


def test_every_direction_between_two_ranks_has_an_order_of_its_own() -> None:
    programs = pipeline(2, 3)
    network = Network(programs, programs[0].placement, one_order=False)
    there, back = Channel("send", 0, (0, 1)), Channel("send", 0, (1, 0))
    assert set(network.channels) == {there, back}
    assert dict(Network(programs, programs[0].placement).channels).keys() == {Channel("compute")}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    stages=st.integers(2, 4),
    count=st.integers(1, 5),
    more=st.integers(0, 2),
    one_order=st.booleans(),
)
def test_every_order_of_firing_gives_the_same_numbers(
    seed: int, stages: int, count: int, more: int, one_order: bool
) -> None:
    programs = pipeline(stages, count, [1 + more * (stage % 2) for stage in range(stages)])
    place = programs[0].placement
    network = verify_live(Network(programs, place, one_order))
    firing = Firing(network, SimTransport(place), str)
    inputs, expected = pipeline_inputs(stages, count), None
    draw = random.Random(seed)
    for _ in range(25):
        registers = filled(network, inputs)
        collections.deque(at_random(firing, registers, draw), 0)
        found = {rank: registers.take(rank) for rank in programs}
        expected = expected or found
        for rank, tensors in found.items():
            for one, other in zip(tensors, expected[rank], strict=True):
                assert torch.equal(one, other)
    for rank, tensors in pipeline_expected(inputs).items():
        for one, other in zip(expected[rank] if expected else (), tensors, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
