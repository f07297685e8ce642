"""Streams as lanes: on a device whose kernels run in any order, tokens alone make the numbers right."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from monoflow.boxing.route import Move
from monoflow.runtime.actors import Engine
from monoflow.runtime.firing import Firing
from monoflow.runtime.liveness import verify_live
from monoflow.runtime.network import Edge, Network, Waits
from monoflow.runtime.program import Program
from monoflow.runtime.streams import Streams
from monoflow.runtime.transport import SimTransport
from monoflow.sbp.layout import B, P, S
from tests.null.fake_device import FakeDevice
from tests.null.hand_made import Hand, pipeline, pipeline_inputs
from tests.null.test_following import RANKS, TWO, batches, sharded

Numbers = list[list[float]]


def engine_of(programs: dict[int, Program], device: FakeDevice | None) -> Engine:
    """An engine; on a device, moves have one stream, or each channel has one."""
    place = programs[min(programs)].placement
    engine = Engine(programs, place, SimTransport(place), str, lanes=None, device=device)
    if device is not None and device.draw.random() < 0.5:
        network = engine.network = verify_live(Network(programs, place, one_order=False))
        engine.firing = Firing(network, SimTransport(place), str)
        engine._streams = Streams(network, device)
    return engine


def trained(programs: dict[int, Program], device: FakeDevice | None, steps: int = 3) -> Numbers:
    """Losses of a few steps of `sharded`, and the state in the end: read once the caller's stream is done."""
    generator = torch.Generator().manual_seed(0)
    state = {
        rank: [
            torch.zeros(1) if shape == (1,) else 0.5 + torch.rand(*shape, generator=generator)
            for shape in (one.registers[port.register].shape for port in one.inputs[1:])
        ]
        for rank, one in programs.items()
    }
    engine, losses = engine_of(programs, device), []
    for batch in batches(steps):
        inputs = {rank: [batch * 1, *state[rank]] for rank in RANKS}  # a batch that is made on the device
        results = engine.run(inputs)
        del inputs
        losses.append([results[rank][0] + 0 for rank in RANKS])  # which outlives what the step gave out
        for rank, program in programs.items():
            ports = [port.name for port in program.inputs[1:]]
            for port, value in zip(program.outputs, results[rank], strict=True):
                if port.replaces:
                    state[rank][ports.index(port.replaces)] = value
        del results, value
    if device is not None:
        device.current().synchronize()
    return [[float(one) for one in own] for own in losses] + [
        one.tolist() for s in state.values() for one in s
    ]


def piped(programs: dict[int, Program], device: FakeDevice | None, count: int) -> Numbers:
    """What a step of a pipeline gives out, twice."""
    engine, found = engine_of(programs, device), []
    for _ in range(2):
        results = engine.run(pipeline_inputs(len(programs), count))
        found += [one + 0 for own in results.values() for one in own]
        del results
    if device is not None:
        device.current().synchronize()
    return [one.tolist() for one in found]


def raced(run: Callable[[FakeDevice], Numbers], seed: int, waits: bool = True) -> Numbers:
    with FakeDevice(random.Random(seed), waits) as device:
        return run(device)


def layered(layers: int, in_place: bool = True) -> dict[int, Program]:
    return {rank: sharded(rank, layers, in_place) for rank in RANKS}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), layers=st.integers(1, 4), in_place=st.booleans())
def test_any_order_of_kernels_gives_the_same_numbers(seed: int, layers: int, in_place: bool) -> None:
    programs = layered(layers, in_place)
    expected = trained(programs, None)
    for number in range(4):
        assert raced(partial(trained, programs), seed + number) == expected


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), stages=st.integers(2, 3), count=st.integers(1, 5), more=st.integers(0, 2))
def test_any_order_of_kernels_gives_the_same_numbers_of_a_pipeline(
    seed: int, stages: int, count: int, more: int
) -> None:
    programs = pipeline(stages, count, [1 + more * (stage % 2) for stage in range(stages)])
    expected = piped(programs, None, count)
    for number in range(4):
        assert raced(partial(piped, programs, count=count), seed + number) == expected


def test_without_events_numbers_are_wrong() -> None:
    """The device would show it."""
    programs = layered(2)
    expected = trained(programs, None)
    found = [raced(partial(trained, programs), seed, waits=False) for seed in range(10)]
    assert sum(one != expected for one in found) > 3


# --- what each thing is for ---------------------------------------------------------------------------


def beside(rank: int) -> Program:
    """A sum over ranks beside compute of the same size, and an update of what is gathered."""
    made = Hand(rank, TWO)
    x, state = made.given((4,), fresh=True), made.given((2,), donated=True)
    mine, total, whole = made.register((4,)), made.register((4,)), made.register((4,))
    made.compute("mine", lambda x: x * 2, [x], mine)
    made.move("sum", Move(0, (P,), (B,), (4,), (2,)), [mine], [total], 1)
    gather = made.move("gather", Move(0, (S(0),), (B,), (4,), (2,)), [state], [whole], 2)
    first, second, new = made.register((4,)), made.register((4,)), made.register((2,))
    made.compute("beside", lambda x: x * 3, [x], first)
    made.compute("update", lambda w: w.sub_(1), [state], new, phase="update", after=[gather])
    made.compute("end", lambda a, b, c: a + b + c, [first, total, whole], second)
    made.give(second)
    made.give(new, replaces=state)
    return made.program()


def beside_found(device: FakeDevice | None) -> Numbers:
    """By hand: 3 x + 2 x of both ranks + what the state was."""
    engine = engine_of({rank: beside(rank) for rank in RANKS}, device)
    state = {rank: torch.full((2,), float(10 * rank)) for rank in RANKS}
    found = []
    for number in (1.0, 2.0):
        given = {rank: [torch.arange(4.0) * number, state[rank]] for rank in RANKS}
        results = engine.run(given)
        del given
        found += [results[rank][0] + 0 for rank in RANKS]
        del results
    if device is not None:
        device.current().synchronize()
    return [one.tolist() for one in found]


EXPECTED = [[0, 7, 24, 31], [0, 7, 24, 31], [-1, 13, 37, 51], [-1, 13, 37, 51]]


def how_often_wrong() -> int:
    return sum(raced(beside_found, seed) != EXPECTED for seed in range(30))


def test_what_runs_beside_something_of_its_size_is_right() -> None:
    assert beside_found(None) == EXPECTED
    assert how_often_wrong() == 0


@pytest.mark.parametrize("waits", [{Waits.REGISTER, Waits.PACE}, {Waits.TASK}])
def test_without_tokens_of_a_kind_numbers_are_wrong(
    waits: set[Waits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A register before it is read (a pace may see to that); what is updated after it was gathered."""
    crosses = Streams._crosses

    def others(self: Streams, edge: int) -> bool:
        found: Edge = self._network.edges[edge]
        return found.waits not in waits and crosses(self, edge)

    monkeypatch.setattr(Streams, "_crosses", others)
    assert how_often_wrong() > 3


def test_memory_that_another_stream_reads_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(list):
        def append(self, entry: object) -> None:
            pass

    begin = Streams._meet

    def meet(self: Streams, *lanes) -> None:  # type: ignore[no-untyped-def]
        begin(self, *lanes)
        self._used = [Forgetful() for _ in self._used]

    monkeypatch.setattr(Streams, "_meet", meet)
    assert how_often_wrong() > 3


@pytest.mark.parametrize("stages", [2, 3])
def test_memory_does_not_grow_with_micro_batches(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots bound it, though the host runs ahead of the device, which has done nothing yet."""

    def num_bytes(count: int) -> int:
        with FakeDevice(random.Random(0)) as device:
            device.eagerness = 0.0
            piped(pipeline(stages, count, [2] * stages), device, count)
        return device.num_bytes - 2 * 4 * 2 * count  # without the batches

    few, many = num_bytes(4), num_bytes(24)
    assert many <= 1.2 * few
    crosses = Streams._crosses
    monkeypatch.setattr(
        Streams,
        "_crosses",
        lambda self, edge: self._network.edges[edge].waits is not Waits.SLOT and crosses(self, edge),
    )
    assert num_bytes(24) > 1.5 * many


def test_after_a_failure_nothing_is_under_way_that_the_caller_could_meet() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("no such luck")

    made = {rank: Hand(rank, TWO) for rank in RANKS}
    for one in made.values():
        x, part, total, last = one.given((2,)), one.register((2,)), one.register((2,)), one.register((2,))
        one.compute("part", lambda x: x * 1, [x], part)
        one.move("sum", Move(0, (P,), (B,), (2,), (2,)), [part], [total], 1)
        one.compute("fail", fail, [total], last)
        one.give(last)
    with FakeDevice(random.Random(0)) as device:
        device.eagerness = 0.0
        engine = engine_of({rank: one.program() for rank, one in made.items()}, device)
        with pytest.raises(ValueError, match="no such luck"):
            engine.run({rank: [torch.ones(2)] for rank in RANKS})
        device.current().synchronize()
        assert not any(len(one.queue) > 1 for one in device.streams)  # but that lanes wait for the caller
