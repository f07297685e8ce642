"""Lanes: threads that fire actors. They bound, overlap, fail and end as they should."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from monoflow.boxing.route import Move
from monoflow.errors import RunError
from monoflow.mesh import placement
from monoflow.runtime.actors import Engine
from monoflow.runtime.firing import Firing, Registers
from monoflow.runtime.lanes import Crew
from monoflow.runtime.network import Network
from monoflow.runtime.program import Kind, Program, Rate
from monoflow.runtime.recorder import Fired
from monoflow.runtime.transport import SimTransport
from monoflow.sbp.layout import B, P
from tests.null.hand_made import Hand, pipeline, pipeline_inputs

ONE = placement("cpu", [0], axes=("data",))
TWO = placement("cpu", [0, 1], axes=("data",))


def crew_of(programs: dict[int, Program], transport: SimTransport, patience: float = 0) -> Crew:
    network = Network(programs, transport.placement, one_order=False)
    return Crew(network, Firing(network, transport, lambda name: f"described {name}"), None, patience)


def begun(crew: Crew, inputs: dict[int, list[Tensor]]):  # type: ignore[no-untyped-def]
    registers = Registers(crew.network)
    for rank, tensors in inputs.items():
        registers.fill(rank, tensors)
    return crew.start(registers)


def stream(count: int, source, work, sink, slots: int = 2) -> Engine:  # type: ignore[no-untyped-def]
    """A source and a sink on the host, and work between them."""
    made, micro = Hand(0, ONE, count), Rate.MICRO
    start = made.given((1,))
    raw, cooked, total = (
        made.register((1,), micro, slots),
        made.register((1,), micro, slots),
        made.register((1,)),
    )
    seen = made.register((1,), micro)
    made.compute("load", source, [start], raw, with_time=True, role=Kind.SOURCE)
    made.compute("cook", work, [raw], cooked)
    made.compute("look", sink, [cooked], seen, role=Kind.SINK)
    made.move("sum", Move(1, (B, P), (B, B), (1,), (1, count)), [seen], [total], 0)
    made.give(total)
    return Engine({0: made.program()}, ONE, SimTransport(ONE), str, lanes=True)


def test_ten_thousand_micro_batches_past_a_slow_sink_hold_few_tensors() -> None:
    count, alive, most = 10_000, set(), 0

    def source(start: Tensor, time: int) -> Tensor:
        nonlocal most
        tensor = start + time
        alive.add(time)
        weakref.finalize(tensor, alive.discard, time)
        most = max(most, len(alive))
        return tensor

    def sink(x: Tensor) -> Tensor:
        if int(x) % 1000 == 0:
            time.sleep(0.01)  # everybody else could run far ahead
        return x * 2

    engine = stream(count, source, lambda x: x + 1, sink)
    (total,) = engine.run({0: [torch.zeros(1, dtype=torch.float64)]})[0]
    assert total.item() == sum(2 * (time + 1) for time in range(count))
    assert most <= 2 + 1 + 1  # its slots, the one that is read, the one that is made
    assert not alive


def test_the_host_waits_while_compute_goes_on() -> None:
    """The source of a later micro-batch waits until an earlier one is computed: only threads can do that."""
    cooked = threading.Event()

    def source(start: Tensor, time: int) -> Tensor:
        if time == 1:
            assert cooked.wait(20)
        return start + time

    def work(x: Tensor) -> Tensor:
        cooked.set()
        return x * 1

    engine = stream(2, source, work, lambda x: x * 1)
    assert engine.run({0: [torch.ones(1)]})[0][0].tolist() == [3]


def test_a_started_step_goes_on_while_its_caller_does_something_else() -> None:
    may_go = threading.Event()

    def source(start: Tensor, time: int) -> Tensor:
        assert may_go.wait(20)
        return start + time

    engine = stream(3, source, lambda x: x * 1, lambda x: x * 1)
    ticket = engine.start({0: [torch.zeros(1)]})
    assert (engine.num_steps, engine.num_over) == (1, 0)
    may_go.set()
    assert ticket.result()[0][0].tolist() == [3]
    assert (engine.num_steps, engine.num_over) == (1, 1)
    again = engine.start({0: [torch.ones(1)]})
    last = engine.start({0: [torch.ones(1)]})  # waits for the one before
    assert again.result()[0][0].tolist() == last.result()[0][0].tolist() == [6]


@pytest.mark.parametrize("lanes", [True, None])
def test_steps_are_over_when_they_went_well(lanes: bool | None) -> None:
    """A job tells a rank that dies before its first step is over from one that dies later."""
    seen: list[int] = []

    def work(x: Tensor) -> Tensor:
        seen.append(engine.num_over)
        if x.item() < 0:
            raise ValueError("a bug")
        return x * 1

    made = Hand(0, ONE, 1)
    start, end = made.given((1,)), made.register((1,))
    made.compute("work", work, [start], end)
    made.give(end)
    engine = Engine({0: made.program()}, ONE, SimTransport(ONE), str, lanes=lanes)
    if lanes:  # as among other ranks
        engine._crew = Crew(engine.network, engine.firing, None, 0)
    engine.run({0: [torch.ones(1)]})
    with pytest.raises(ValueError, match="a bug"):
        engine.run({0: [-torch.ones(1)]})
    assert seen == [0, 1] and engine.num_over == 1


def test_lanes_give_the_numbers_of_one_thread() -> None:
    programs, inputs = pipeline(3, 6), pipeline_inputs(3, 6)
    place = programs[0].placement
    expected = Engine(programs, place, SimTransport(place), str).run(inputs)
    crew = crew_of(programs, SimTransport(place))
    assert crew.num_lanes == 1 + 2 * 2  # compute, and two directions at two borders
    for _ in range(30):
        found = begun(crew, inputs).result()
        for rank, tensors in found.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, expected[rank], strict=True))
    crew.stop()


def test_one_device_and_simulations_have_no_thread() -> None:
    programs, inputs = pipeline(2, 2), pipeline_inputs(2, 2)
    before = threading.active_count()
    engine = Engine(programs, programs[0].placement, SimTransport(programs[0].placement), str, lanes=True)
    engine.run(inputs)
    assert threading.active_count() == before


def test_threads_end_with_their_engine() -> None:
    engine = stream(2, lambda x, time: x + time, lambda x: x * 1, lambda x: x * 1)
    before = set(threading.enumerate())
    engine.run({0: [torch.zeros(1)]})
    mine = set(threading.enumerate()) - before
    assert {thread.name for thread in mine} == {"monoflow compute", "monoflow host"}
    del engine
    gc.collect()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()


def test_threads_are_gone_before_the_interpreter_is() -> None:
    """Whoever dismisses a crew, in the middle of anything, waits for its threads."""
    programs, inputs = pipeline(2, 2), pipeline_inputs(2, 2)
    crew = crew_of(programs, SimTransport(programs[0].placement))
    begun(crew, inputs).result()
    assert all(thread.is_alive() for thread in crew._threads) and len(crew._threads) > 1
    with crew._lock:  # a collection of garbage may come there
        crew.stop()
    crew.dismiss()
    assert not any(thread.is_alive() for thread in crew._threads)


def test_lanes_keep_no_tensor_between_steps() -> None:
    engine = stream(2, lambda x, time: x + time, lambda x: x * 1, lambda x: x * 1)
    given = torch.zeros(1)
    kept = [weakref.ref(given), weakref.ref(engine.run({0: [given]})[0][0])]
    del given
    deadline = time.monotonic() + 10
    while any(one() is not None for one in kept) and time.monotonic() < deadline:
        gc.collect()  # a lane may still be on its way back from its last actor
    assert [one() for one in kept] == [None, None]


def test_a_failure_on_a_lane_comes_out_where_the_step_is_waited_for() -> None:
    def fail(x: Tensor) -> Tensor:
        if int(x) == 2:
            raise ValueError("no such luck")
        return x * 1

    engine = stream(5, lambda x, time: x + time, fail, lambda x: x * 1)
    with pytest.raises(ValueError, match="no such luck") as caught:
        engine.run({0: [torch.zeros(1)]})
    assert caught.value.__notes__ == ["in task cook (forward) of rank 0, micro-batch 2: cook"]
    assert "in fail" in "".join(str(entry) for entry in caught.traceback)
    with pytest.raises(RunError, match=r"a step failed before.*no such luck"):
        engine.run({0: [torch.zeros(1)]})


def test_the_watchdog_says_who_waits_for_whom() -> None:
    """A transport that never comes back, as when another rank is gone."""
    never = threading.Event()

    class Silent(SimTransport):
        def all_reduce(self, tensors, op, group):  # type: ignore[no-untyped-def]
            never.wait(20)
            return super().all_reduce(tensors, op, group)

    programs = {}
    for rank in (0, 1):
        made = Hand(rank, TWO)
        start, total, last = made.given((2,)), made.register((2,)), made.register((2,))
        made.move("gather", Move(0, (P,), (B,), (2,), (2,)), [start], [total], 0)
        made.compute("use", torch.neg, [total], last)
        made.give(last)
        programs[rank] = made.program()
    crew = crew_of(programs, Silent(TWO), patience=0.2)
    with pytest.raises(RunError) as caught:
        begun(crew, {rank: [torch.ones(2)] for rank in (0, 1)}).result()
    never.set()
    assert str(caught.value).splitlines()[1:] == [
        "task gather (forward) of rank 0 runs",
        "task use (forward) of rank 0 waits for register r1 (x1) from task gather (forward) of rank 0"
        "  [described use]",
        "task use (forward) of rank 1 waits for register r1 (x1) from task gather (forward) of rank 0"
        "  [described use]",
    ]
    crew.stop()


def test_a_recorder_hears_of_every_firing() -> None:
    class Recording:
        def __init__(self) -> None:
            self.rows: list[tuple] = []

        def record(self, fired: Fired) -> None:
            self.rows.append(fired)

    engine = stream(2, lambda x, time: x + time, lambda x: x * 1, lambda x: x * 1)
    recorder = engine.recorder = Recording()
    for _ in range(2):
        engine.run({0: [torch.zeros(1)]})
    assert sorted(row[:6] for row in recorder.rows) == sorted(
        row
        for step in (0, 1)
        for moment in (0, 1)
        for row in (
            ("host", "source", "load", 0, step, moment),
            ("compute", "compute", "cook", 0, step, moment),
            ("host", "sink", "look", 0, step, moment),
            ("compute", "accumulate", "sum", 0, step, moment),
        )
    )
    assert all(start <= end and num_bytes == 4 for *_, start, end, num_bytes in recorder.rows)
    engine.recorder = None
    engine.run({0: [torch.zeros(1)]})
    assert len(recorder.rows) == 16
