"""What events say of a run, on timelines made by hand."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monoflow.runtime.actors import Engine
from monoflow.runtime.messages import crossings, fills, held, messages, most_live, waits, without_waiting
from monoflow.runtime.recorder import Fired
from monoflow.runtime.ring import Ring, read_part
from monoflow.runtime.signs import EVENTS, NAMES
from monoflow.runtime.trace import (
    Breakdown,
    Event,
    Interval,
    ahead,
    bottleneck,
    breakdown,
    bubble,
    exposed_communication,
    length,
    minus,
    time_by_kind,
    union,
)
from monoflow.runtime.transport import SimTransport
from monoflow.runtime.wiring import ActorInfo, RegisterInfo, Wiring
from tests.null.hand_made import pipeline as pipeline_programs
from tests.null.hand_made import pipeline_inputs


def event(
    start: int,
    end: int,
    name: str = "mm",
    *,
    rank: int = 0,
    kind: str = "compute",
    step: int = 0,
    time: int = 0,
    lane: str = "",
    program: str = "train",
) -> Event:
    own = {"boxing": "data", "source": "host", "copy": "host", "sink": "host"}.get(kind, "compute")
    return Event(program, rank, lane or own, kind, name, step, time, start, end, 0)


# --- sets of moments -----------------------------------------------------------------------------------

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def moments(intervals) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(spans, spans)
def test_sets_of_moments(left, right) -> None:
    one, two = union(left), union(right)
    assert moments(one) == moments(left)
    assert length(one) == len(moments(left))
    assert all(a.end < b.start for a, b in pairwise(one))
    assert moments(minus(one, two)) == moments(left) - moments(right)
    assert length(minus(one, two)) == len(moments(left) - moments(right))


# --- figures -------------------------------------------------------------------------------------------


def pipeline(stages: int, count: int, forward: int, backward: int) -> list[Event]:
    """1F1B, each actor as early as what it needs and its rank's order allow."""
    order = {}
    for stage in range(stages):
        ahead = min(count, stages - stage)
        turns = [("f", t) for t in range(ahead)]
        for t in range(count):
            turns.append(("b", t))
            if t + ahead < count:
                turns.append(("f", t + ahead))
        order[stage] = turns
    done: dict[tuple[int, str, int], int] = {}
    free = dict.fromkeys(range(stages), 0)
    found = []
    while any(order.values()):
        for stage in range(stages):
            if not order[stage]:
                continue
            what, t = order[stage][0]
            before = (stage - 1, "f", t) if what == "f" else (stage + 1, "b", t)
            if 0 <= before[0] < stages and before not in done:
                continue
            start = max(free[stage], done.get(before, 0))
            end = start + (forward if what == "f" else backward)
            done[stage, what, t] = free[stage] = end
            order[stage].pop(0)
            found.append(event(start, end, what, rank=stage, time=t))
    return found


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 4), (4, 8), (4, 2)])
def test_bubble_of_1f1b_is_the_theory(stages: int, count: int) -> None:
    events = pipeline(stages, count, forward=10, backward=20)
    assert bubble(events) == pytest.approx((stages - 1) / (count + stages - 1))


def test_bubble_of_several_steps_and_kinds() -> None:
    events = [
        event(0, 10, step=0),
        event(15, 20, "adamw", kind="optimizer", step=0),
        event(100, 140, step=1),
        event(90, 100, kind="boxing", step=1),  # before the first compute of its step: no bubble
        event(0, 20, kind="boxing", step=0),  # hides nothing
    ]
    assert bubble(events) == pytest.approx(5 / (20 + 40))
    assert bubble([]) == bubble([event(0, 5, kind="boxing")]) == 0.0


def test_exposed_communication() -> None:
    events = [
        event(0, 10),
        event(5, 25, "all_reduce:a", kind="boxing"),
        event(20, 30, "all_reduce:b", kind="boxing", lane="tensor"),  # two at once count once
        event(22, 24, "add", kind="accumulate"),
        event(0, 40, rank=1),
        event(10, 20, kind="boxing", rank=1),
    ]
    found = exposed_communication(events)
    assert found == (15 - 2 + 5, 25 + 10)
    assert found.share == pytest.approx(18 / 35)
    assert exposed_communication([event(0, 1)]).share == 0.0


def test_every_moment_of_a_rank_is_counted_once() -> None:
    events = [
        event(0, 4, "read", kind="source"),
        event(3, 10),
        event(8, 15, "all_reduce:a", kind="boxing"),
        event(14, 18, "print", kind="sink"),
        event(30, 40, step=1),
        event(2, 20, rank=1),  # rank 0 idles from 18 to 20, and rank 1 from 30 on
    ]
    parts = breakdown(events)
    assert parts[0] == Breakdown(compute=17, communication=5, data=3, host=3, idle=2, outside=10)
    assert parts[1] == Breakdown(compute=18, communication=0, data=0, host=0, idle=12, outside=10)
    assert parts[0].total == parts[1].total == 40
    assert time_by_kind(events)[0] == {"source": 4, "compute": 17, "boxing": 7, "sink": 4}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "Nothing fired."),
        ({0: Breakdown(80, 20, 0, 0, 0, 0)}, "Compute is the bottleneck: the ranks compute 80% of the time."),
        (
            {0: Breakdown(50, 40, 0, 0, 0, 10), 1: Breakdown(50, 30, 10, 0, 0, 10)},
            "Communication that no compute hides is the bottleneck (35% of the time; compute has 50%).",
        ),
        ({0: Breakdown(40, 10, 50, 0, 0, 0)}, "Data is the bottleneck: compute waits for sources and copies"),
        (
            {0: Breakdown(40, 0, 0, 0, 0, 60)},
            "What the script does between the steps, such as fetching a batch, is the bottleneck",
        ),
        (
            {0: Breakdown(30, 70, 0, 0, 0, 0), 1: Breakdown(90, 10, 0, 0, 0, 0)},
            "Rank 1 is the bottleneck: it computes 1.50 times as long as the mean rank",
        ),
    ],
)
def test_the_bottleneck_is_named(parts: dict[int, Breakdown], said: str) -> None:
    assert bottleneck(parts).startswith(said)


# --- messages ------------------------------------------------------------------------------------------


def accumulating(rank: int = 0) -> Wiring:
    """forward -> backward for each of two micro-batches, gradients added up, then sent and used once."""
    both = (0, 1)
    return Wiring(
        "train",
        rank,
        2,
        (
            ActorInfo("forward", "forward", (0,), (1,), True),
            ActorInfo("backward", "backward", (0, 1), (2,), True),
            ActorInfo("add", "backward", (2,), (3,), True, order=0),
            ActorInfo("all_reduce:grad", "update", (3,), (4,), False, order=1, group=both),
            ActorInfo("update", "update", (0, 4), (5,), False),
        ),
        (
            RegisterInfo("weight", 100, 1, False),
            RegisterInfo("activation", 10, 1, True),
            RegisterInfo("grad_t", 20, 1, True),
            RegisterInfo("grad", 30, 1, False),
            RegisterInfo("grad_all", 40, 1, False),
            RegisterInfo("new", 100, 1, False),
        ),
    )


def accumulated(rank: int = 0, shift: int = 0) -> list[Event]:
    rows = [
        ("forward", "compute", 0, 0, 10),
        ("backward", "compute", 0, 10, 30),
        ("add", "accumulate", 0, 30, 32),
        ("forward", "compute", 1, 32, 42),
        ("backward", "compute", 1, 42, 60),
        ("add", "accumulate", 1, 60, 62),
        ("all_reduce:grad", "boxing", 0, 62, 80),
        ("update", "optimizer", 0, 80, 90),
    ]
    return [
        event(start + shift, end + shift, name, kind=kind, time=time, rank=rank)
        for name, kind, time, start, end in rows
    ]


def test_messages_are_who_filled_and_who_read() -> None:
    wiring = accumulating()
    events = accumulated()
    found = messages(events, [wiring])
    told = [
        (wiring.registers[one.register].name, one.writer.time, [e.name for e in one.reads], one.emptied)
        for one in found
    ]
    assert told == [
        ("activation", 0, ["backward"], 30),
        ("grad_t", 0, ["add"], 32),
        ("activation", 1, ["backward"], 60),
        ("grad_t", 1, ["add"], 62),
        ("grad", 1, ["all_reduce:grad"], 80),  # when the last micro-batch is in it, and once
        ("grad_all", 0, ["update"], 90),
        ("new", 0, [], 90),  # a result: until the step is done
    ]
    assert set(most_live(found).values()) == {1}
    assert fills(found)[0, "forward -> backward"] == [(10, 1), (30, 0), (42, 1), (60, 0)]
    assert held(found)[0, "registers"] == [
        (10, 10), (30, 20), (32, 0), (42, 10), (60, 20), (62, 30), (80, 40), (90, 0),
    ]  # fmt: skip


def test_more_messages_than_slots_are_seen() -> None:
    wiring = accumulating()
    events = [one for one in accumulated() if one.name == "forward"]
    assert most_live(messages(events, [wiring]))["train", 0, 1] == 2  # none was read
    assert messages(accumulated()[3:], [wiring])[0].writer.time == 1  # the beginning was dropped
    assert messages(accumulated(rank=1), [wiring]) == []


def test_actors_of_one_name_are_told_apart_by_their_order() -> None:
    actors = (
        ActorInfo("mm", "forward", (), (0,), False),
        ActorInfo("mm", "forward", (0,), (1,), False),
    )
    registers = (RegisterInfo("a", 1, 1, False), RegisterInfo("b", 1, 1, False))
    found = messages([event(5, 9), event(0, 4)], [Wiring("train", 0, 1, actors, registers)])
    assert [(one.register, one.writer.end, len(one.reads)) for one in found] == [(0, 4, 1), (1, 9, 0)]


def test_collectives_wait_for_the_rank_that_comes_last() -> None:
    events = [*accumulated(0), *accumulated(1, shift=5)]
    wirings = [accumulating(0), accumulating(1)]
    (one,) = crossings(events, wirings)
    assert (one.source.rank, one.source.start, one.target.rank) == (1, 67, 0)
    changed = [
        (new.rank, new.name, new.start, new.end)
        for old, new in zip(events, without_waiting(events, wirings), strict=True)
        if old != new
    ]
    assert changed == [(0, "all_reduce:grad", 67, 80)]


def test_a_receiver_waits_for_its_sender() -> None:
    group = (0, 1)
    register = (RegisterInfo("x", 8, 1, True),)
    sender = Wiring("train", 0, 1, (ActorInfo("send", "forward", (0,), (), True, 3, group),), register)
    receiver = Wiring("train", 1, 1, (ActorInfo("receive", "forward", (), (0,), True, 3, group),), register)
    events = [
        event(10, 12, "send", kind="boxing"),
        event(0, 13, "receive", kind="boxing", rank=1),
        event(30, 32, "send", kind="boxing", step=1),  # its receiver was not recorded
    ]
    (one,) = crossings(events, [sender, receiver])
    assert (one.source.name, one.target.name, one.target.step) == ("send", "receive", 0)
    assert [one.start for one in without_waiting(events, [sender, receiver])] == [10, 10, 30]


def test_steps_that_begin_before_the_one_before_is_over() -> None:
    events = [
        event(0, 10),
        event(10, 30, "update"),
        event(25, 28, "gather", kind="boxing", step=1),  # for five beside the update
        event(30, 50, step=1),
        event(50, 60, step=2),
        event(0, 90, rank=1),
        event(95, 99, rank=1, step=1),
        event(20, 99, program="other", step=1),
    ]
    assert ahead(events) == {0: 5, 1: 0}


def test_what_compute_waited_for() -> None:
    events = accumulated()
    found = waits(events, messages(events, [accumulating()]))
    assert [tuple(one) for one in found] == [(0, "update", "grad_all", "all_reduce:grad", 18)]


class Recording:
    """Keeps what an engine tells it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.running: list[tuple[Event, list[tuple[int, str, str, int]]]] = []
        self.engine: Engine | None = None

    def record(self, fired: Fired) -> None:
        self.events.append(Event.of("train", fired))
        if self.engine is not None:  # it still fires: its results are not written yet
            self.running.append((self.events[-1], self.engine.running()))


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (3, 2)])
def test_a_pipelines_messages_never_exceed_its_slots(stages: int, count: int) -> None:
    programs = pipeline_programs(stages, count)
    place = programs[0].placement
    engine = Engine(programs, place, SimTransport(place), str)
    engine.recorder = recording = Recording()
    recording.engine = engine
    for _ in range(2):
        engine.run(pipeline_inputs(stages, count))
    wirings = [Wiring.of("train", one) for one in programs.values()]
    events = recording.events
    fired = sum(count if actor.micro else 1 for wiring in wirings for actor in wiring.actors)
    assert len(events) == 2 * fired
    assert {one.step for one in events} == {0, 1}
    assert all((e.rank, e.lane, e.name, e.time) in now for e, now in recording.running)
    assert engine.running() == []
    found = messages(events, wirings)
    assert all(one.emptied is not None for one in found)
    for (_, rank, register), most in most_live(found).items():
        info = wirings[rank].registers[register]
        assert most <= info.slots, f"{most} messages in {info} of rank {rank}"
    sends = {(one.source.rank, one.target.rank) for one in crossings(events, wirings)}
    assert sends == {pair for stage in range(stages - 1) for pair in ((stage, stage + 1), (stage + 1, stage))}
    per_step = count * 2 * (stages - 1)  # activations there, gradients back
    assert len(crossings(events, wirings)) == 2 * per_step


# --- the ring ------------------------------------------------------------------------------------------


def test_a_ring_keeps_the_last_events(tmp_path: Path) -> None:
    whole = [event(10 * i, 10 * i + 5, f"op{i % 2}", step=i, time=i) for i in range(1, 8)]
    ring = Ring(tmp_path / "part", 4, {"host": "here"})
    ring.add_wiring(accumulating())
    ring.tell({"clock_offset": 5})
    for one in whole[:3]:
        ring.add(one[:5], *one[5:])
    part = read_part(tmp_path / "part")
    assert (part.about, part.wirings) == ({"host": "here", "clock_offset": 5}, (accumulating(),))
    assert (part.events, part.num_dropped) == (tuple(whole[:3]), 0)
    size = (tmp_path / f"part{EVENTS}").stat().st_size
    for one in whole[3:]:
        ring.add(one[:5], *one[5:])
    part = read_part(tmp_path / "part")
    assert (part.events, part.num_dropped) == (tuple(whole[3:]), 3)
    assert read_part(tmp_path / "part", 2).events == tuple(whole[5:])
    assert (tmp_path / f"part{EVENTS}").stat().st_size == size


def test_threads_share_a_ring(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "part", 4000, {})

    def record(rank: int) -> None:
        for i in range(1000):
            ring.add(("train", rank, "compute", "compute", f"op{i % 50}"), i, 0, i + 1, i + 2, rank)

    threads = [threading.Thread(target=record, args=(rank,)) for rank in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    part = read_part(tmp_path / "part")
    expected = {(rank, f"op{i % 50}", i, i + 1, rank) for rank in range(4) for i in range(1000)}
    assert {(e.rank, e.name, e.step, e.start, e.num_bytes) for e in part.events} == expected
    assert len(part.events) == 4000


def test_what_a_killed_process_left_is_read(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "part", 4, {})
    ring.add(("train", 0, "compute", "compute", "mm"), 0, 0, 5, 9, 1)
    names = tmp_path / f"part{NAMES}"
    names.write_text(names.read_text() + json.dumps({"who": ["half"]})[:7])
    assert [one.name for one in read_part(tmp_path / "part").events] == ["mm"]


def test_wirings_are_data() -> None:
    wiring = accumulating()
    assert Wiring.from_data(json.loads(json.dumps(wiring.as_data()))) == wiring
    assert Interval(1, 2) == (1, 2)
