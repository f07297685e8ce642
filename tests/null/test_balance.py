"""Units of work that ranks pull: who gets them, what a rank adds up, and that every step ends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from monoflow.boxing.placed import add_part, neutral
from monoflow.boxing.route import Move
from monoflow.mesh import placement
from monoflow.runtime.actors import Engine
from monoflow.runtime.liveness import verify_live
from monoflow.runtime.messages import messages
from monoflow.runtime.network import Marking, Network
from monoflow.runtime.program import Program, Rate, Task, task_module, verify
from monoflow.runtime.pulled import Counter, StoreCounter, coordinate_of, folded
from monoflow.runtime.recorder import Fired
from monoflow.runtime.trace import Event
from monoflow.runtime.transport import SimTransport
from monoflow.runtime.wiring import Wiring
from monoflow.sbp.layout import B, P, Partial, S

from .hand_made import Hand

RANKS, MICRO = 2, 3
UNITS = RANKS * MICRO
MESH = (RANKS, MICRO)
TWO = placement("cpu", [0, 1], axes=("data",))


def test_units_go_through_the_ranks_of_the_first_micro_batch_first() -> None:
    assert [coordinate_of(unit, (2, 3)) for unit in range(6)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2),
    ]  # fmt: skip
    assert [coordinate_of(unit, (2, 2, 2)) for unit in (0, 1, 2, 3, 4, 7)] == [
        (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1),
    ]  # fmt: skip


def test_a_store_gives_every_unit_once_a_walk_and_forgets_walks_that_are_over() -> None:
    store = HashStore()
    ranks = [StoreCounter(store, "here", 3) for _ in range(3)]
    begin = store.num_keys()
    for walk in range(50):
        draw, given, waiting = random.Random(walk), [], [0, 1, 2]
        for rank in ranks:
            rank.start()
        while waiting:
            rank = draw.choice(waiting)
            unit = ranks[rank].pull(rank, 7)
            if unit is None:
                waiting.remove(rank)
            else:
                given.append(unit)
        assert given == list(range(7)) and store.num_keys() == begin


def test_a_walk_that_failed_leaves_nothing_to_the_next() -> None:
    count = Counter()
    count.start()
    assert [count.pull(0, 4), count.pull(1, 4)] == [0, 1]
    count.start()
    assert [count.pull(0, 4) for _ in range(5)] == [0, 1, 2, 3, None]


def test_parts_are_added_where_they_lie() -> None:
    move = Move(1, (S(0), S(0)), (P, B), (8, 1), MESH)  # ranks have four rows: two, two and none
    whole = None
    for unit in (3, 0):
        given = [] if whole is None else [whole]
        part = torch.full((2, 1), unit + 1.0)
        whole = folded(move, [*given, part], unit, whole is None)
    assert whole is not None
    assert whole.flatten().tolist() == [1, 1, 0, 0, 0, 0, 4, 4]
    mixed = Move(1, (P, S(1)), (P, B), (1, 3), MESH)  # columns are micro-batches, and ranks' sums
    assert add_part(mixed, torch.ones(1, 3), torch.tensor([[5.0]]), (1, 2)).tolist() == [[1, 1, 6]]


@pytest.mark.parametrize(
    ("op", "dtype", "value"),
    [("sum", torch.float32, 0), ("max", torch.float32, -torch.inf), ("min", torch.int64, 2**63 - 1)],
)
def test_who_did_nothing_changes_nothing(op: str, dtype: torch.dtype, value: float) -> None:
    move = Move(1, (Partial(op), Partial(op)), (Partial(op), B), (2,), MESH)
    assert neutral(move, dtype, torch.device("cpu")).tolist() == [value, value]


# --- a program by hand -------------------------------------------------------------------------------------


def program(rank: int) -> Program:
    """Sums a scaled batch and its squares, takes the maximum, and gives the rows: a rank's are two a unit."""
    made = Hand(rank, TWO, MICRO)
    made_of = Rate.MICRO
    batch, scale = made.given((2 * UNITS,)), made.given((1,))
    factor, unit = made.register((1,)), made.register((), made_of)
    made.compute("double", lambda x: 2 * x, [scale], factor)
    made.tasks.append(Task(1, "pull", "forward", (), (unit,), after=(0,), rate=made_of, pulls=True))
    rows, total, most = (made.register(shape, made_of) for shape in ((2,), (), ()))
    graph = fx.Graph()
    x, by, number = (graph.placeholder(name) for name in ("x", "by", "time"))
    result = graph.call_function(_unit, (x, by, number))
    graph.output([graph.call_function(lambda several, i=i: several[i], (result,)) for i in range(3)])
    made.tasks.append(
        Task(
            2, "work", "forward", (batch, factor, unit), (rows, total, most),
            compute=task_module(graph), rate=made_of,
        )
    )  # fmt: skip
    whole, summed, largest = made.register((2 * UNITS,)), made.register(()), made.register(())
    split, top = S(0), Partial("max")
    made.move("rows", Move(1, (split, split), (P, B), (2 * UNITS,), MESH), [rows, unit], [whole], 0)
    made.move("sum", Move(1, (P, P), (P, B), (), MESH), [total, unit], [summed], 1)
    made.move("most", Move(1, (top, top), (top, B), (), MESH), [most, unit], [largest], 2)
    after = [made.register(shape) for shape in ((UNITS,), (), ())]
    made.move("scatter", Move(0, (P, B), (split, B), (2 * UNITS,), MESH), [whole], [after[0]], 3)
    made.move("reduce", Move(0, (P, B), (B, B), (), MESH), [summed], [after[1]], 4)
    made.move("largest", Move(0, (top, B), (B, B), (), MESH), [largest], [after[2]], 5)
    for register in after:
        made.give(register)
    return verify(replace(made.program(checked=False), units=UNITS))


def _unit(batch: Tensor, factor: Tensor, unit: int) -> tuple[Tensor, Tensor, Tensor]:
    rank, time = coordinate_of(unit, MESH)
    first = rank * UNITS + 2 * time
    rows = batch[first : first + 2] * factor
    return rows, rows.square().sum(), rows.max()


PROGRAMS = {rank: program(rank) for rank in range(RANKS)}


class Piles:
    """Every rank gets its own units."""

    def __init__(self, piles: dict[int, list[int]]) -> None:
        self.piles = piles
        self.left: dict[int, list[int]] = {}

    def start(self) -> None:
        self.left = {rank: list(pile) for rank, pile in self.piles.items()}

    def pull(self, rank: int, total: int) -> int | None:
        assert total == UNITS
        return self.left[rank].pop(0) if self.left[rank] else None


BATCH = torch.tensor([3.0, -1, 4, 1, -5, 9, 2, 6, -5, 3, 5, 8])


def check(engine: Engine) -> None:
    found = engine.run({rank: [BATCH.clone(), torch.tensor([1.5])] for rank in range(RANKS)})
    for rank, (rows, total, most) in found.items():
        assert rows.tolist() == (3 * BATCH[rank * UNITS : (rank + 1) * UNITS]).tolist()
        assert total.item() == 9 * 296 and most.item() == 27


@given(st.lists(st.integers(0, RANKS - 1), min_size=UNITS, max_size=UNITS), st.randoms())
@settings(max_examples=40, deadline=None)
def test_whoever_does_what_the_sums_are_the_same(owners: list[int], order: random.Random) -> None:
    units = list(range(UNITS))
    order.shuffle(units)
    piles = {rank: [unit for unit in units if owners[unit] == rank] for rank in range(RANKS)}
    engine = Engine(PROGRAMS, TWO, SimTransport(TWO), str, units=Piles(piles))
    for _ in range(2):
        check(engine)
    assert engine.in_caller().firing.units is engine.firing.units


def test_ranks_of_one_process_take_turns() -> None:
    engine = Engine(PROGRAMS, TWO, SimTransport(TWO), str)
    for _ in range(3):
        check(engine)


@pytest.mark.parametrize("count", [1, 2, UNITS, 50])
def test_a_program_that_pulls_can_end_after_any_number_of_units(count: int) -> None:
    network = Network(PROGRAMS, TWO, micro_batches=count)
    verify_live(network)
    for some in range(min(count, 4) + 1):  # by the first rank; the second gets none
        marking = Marking(network)
        ready, left = marking.ready(), {0: some, 1: 0}
        while ready:
            actor = ready.pop()
            marking.begin(actor)
            rank = actor.members[0].rank
            if actor.task.pulls and not left[rank]:
                fired = {marking.fired[one.number] for one in network.pulled[rank]}
                assert fired == {some if rank == 0 else 0}, "all have done equally many units"
                ready += marking.close(actor)
                continue
            left[rank] -= actor.task.pulls
            ready += marking.end(actor)
        assert marking.is_done and not list(marking.waiting())


def test_what_the_walk_read_is_let_go_when_it_is_over() -> None:
    """What is read for every unit is not held until the end of the step."""
    engine = Engine(
        PROGRAMS, TWO, SimTransport(TWO), str,
        units=Piles({0: [0], 1: [3, 1]}),
    )  # fmt: skip
    firing, network, begun, after = engine.firing, engine.network, [], []
    end, cells = firing.end, [network.cells[network.bases[rank]].base for rank in range(RANKS)]

    def ending(registers, marking, actor, time, results):  # type: ignore[no-untyped-def]
        given = end(registers, marking, actor, time, results)
        seen = {"pull": begun, "scatter": after}.get(actor.task.name)
        if seen is not None:
            seen.append([registers.cells[cell] is not None for cell in cells])
        return given

    firing.end = ending  # pyright: ignore[reportAttributeAccessIssue]
    engine.run({rank: [BATCH.clone(), torch.tensor([1.5])] for rank in range(RANKS)})
    assert begun[0] == [True, True], "both hold the batch"
    assert after == [[False, False]]


def test_an_error_names_the_unit() -> None:
    engine = Engine(PROGRAMS, TWO, SimTransport(TWO), str, units=Piles({0: [4], 1: []}))
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        engine.run({rank: [BATCH.clone(), torch.ones(3)] for rank in range(RANKS)})
    assert any("task work (forward) of rank 0, unit 4" in note for note in caught.value.__notes__)


def test_messages_of_a_trace_are_those_of_as_many_units_as_were_pulled() -> None:
    class Recorder:
        events: list[Event] = []  # noqa: RUF012

        def record(self, fired: Fired) -> None:
            self.events.append(Event.of("hand", fired))

    piles = Piles({0: [0, 5, 1, 3], 1: [4, 2]})
    engine = Engine(PROGRAMS, TWO, SimTransport(TWO), str, units=piles)
    engine.recorder = Recorder()
    check(engine)
    wirings = [Wiring.from_data(Wiring.of("hand", PROGRAMS[rank]).as_data()) for rank in range(RANKS)]
    found = messages(Recorder.events, wirings)
    sums = {one.wiring.rank: one.writer.time for one in found if one.writer.name == "sum"}
    assert sums == {0: 3, 1: 1}, "a sum is there after a rank's last unit"
    (factor,) = [one for one in found if one.writer.name == "double" and one.wiring.rank == 0]
    last = max(one.end for one in Recorder.events if one.name == "work" and one.rank == 0)
    assert factor.emptied == last
