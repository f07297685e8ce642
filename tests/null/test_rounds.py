"""Schedules of pipelines from slots, turns and the cut alone: how long steps take against the theory of each.

Forward, the gradient of a layer's input and that of its weights take equally long, or as chance has it. With
p ranks of v stages each, in units of one stage's forward, a rank idles

    1F1B (Narayanan et al., 2019), interleaved (2021)     3 (p - 1)
    the same, sending before the gradients of weights     2 (p - 1)
    ZB-H1 (Qi et al., 2023)                               1 (p - 1)

of 3 v m + that. Stages of v chunks are v times as short: so is the bubble.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product

import pytest
import torch

from monoflow.plan.rounds import Kind, Rounds, Unit
from monoflow.plan.schedule import Op
from monoflow.plan.slots import kept
from monoflow.runtime.firing import Firing, Registers
from monoflow.runtime.liveness import verify_live
from monoflow.runtime.network import Marking, Network
from monoflow.runtime.program import Port, Program, Rate, Task
from monoflow.runtime.transport import SimTransport
from tests.null.pipeline_clock import Clock, chain, parts_of, pipeline, programs_of

GRAPHS = {size: chain(size, 16) for size in (2, 3, 4, 6, 8)}
HOPS = {False: 2, True: 1}  # units that a rank idles for each rank before or after it
SHAPES = [(2, 1), (4, 1), (2, 2), (4, 2)]


def clock(
    ranks: int, chunks: int, count: int, zero_bubble: bool, cost: Callable = lambda *_: 1.0, send: float = 0.0
) -> Clock:
    plan = pipeline(GRAPHS[ranks * chunks], ranks, chunks, count, zero_bubble)
    found = Clock(programs_of(plan), cost, send)
    verify_live(found.network)
    _no_register_overflows(found)
    return found


def _no_register_overflows(found: Clock) -> None:
    programs = found.network.programs
    assert len(found.live) >= 6 * len(programs)
    for (rank, register), most in found.live.items():
        one = programs[rank].registers[register]
        assert most <= one.slots, f"{one.name} of rank {rank} holds {most} in {one.slots} slots"


@pytest.mark.parametrize("zero_bubble", [False, True], ids=["1f1b", "zero-bubble"])
@pytest.mark.parametrize("count", [4, 8, 16])
@pytest.mark.parametrize(("ranks", "chunks"), SHAPES)
def test_the_bubble_is_that_of_the_theory(ranks: int, chunks: int, count: int, zero_bubble: bool) -> None:
    found = clock(ranks, chunks, count, zero_bubble)
    idle = HOPS[zero_bubble] * (ranks - 1)
    work = 3 * chunks * count
    assert found.end == work + idle
    assert found.bubble == pytest.approx(idle / (work + idle))
    assert found.bubble < 3 * (ranks - 1) / (work + 3 * (ranks - 1)), (
        "no less than with backward in one piece"
    )
    assert Counter(one.rank for one in found.fired) == dict.fromkeys(range(ranks), len(found.fired) // ranks)


@pytest.mark.parametrize("zero_bubble", [False, True], ids=["1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    ("ranks", "chunks", "count"), [(2, 2, 5), (4, 2, 6), (3, 2, 7), (4, 2, 3), (4, 1, 2)]
)
def test_any_number_of_micro_batches_goes(ranks: int, chunks: int, count: int, zero_bubble: bool) -> None:
    """The last round is shorter: what a rank then idles more is at most one round's missing micro-batches."""
    found = clock(ranks, chunks, count, zero_bubble)
    missing = -count % ranks * (chunks - 1) + max(0, ranks - count)
    assert 0 <= found.end - 3 * chunks * count - HOPS[zero_bubble] * (ranks - 1) <= missing


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("zero_bubble", [False, True], ids=["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "chunks"), SHAPES)
def test_costs_by_chance(ranks: int, chunks: int, zero_bubble: bool, seed: int) -> None:
    """Products take from 0.8 to 1.2: no rank ever waits for more than such a part of its work."""
    draw = random.Random(seed)
    costs: dict[tuple, float] = {}
    count = 8

    def cost(rank: int, phase: str, time: int) -> float:
        return costs.setdefault((rank, phase, time), draw.uniform(0.8, 1.2))

    found = clock(ranks, chunks, count, zero_bubble, cost)
    theory = HOPS[zero_bubble] * (ranks - 1)
    theory = theory / (3 * chunks * count + theory)
    assert theory - 0.1 < found.bubble < theory + 0.1


@pytest.mark.parametrize("zero_bubble", [False, True], ids=["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (2, 16), (4, 8), (4, 16)])
def test_what_sends_take_is_paid_once_and_not_for_every_micro_batch(
    ranks: int, count: int, zero_bubble: bool
) -> None:
    """A tensor comes while the rank does something else; gradients of weights let go first what will come."""
    late = 0.05
    idle = (HOPS[zero_bubble] + (4 if zero_bubble else 2) * late) * (ranks - 1)
    assert clock(ranks, 1, count, zero_bubble, send=late).end == pytest.approx(3 * count + idle)


def test_interleaving_keeps_more() -> None:
    slots = []
    for ranks, chunks in ((4, 1), (4, 2)):
        parts = parts_of(pipeline(GRAPHS[ranks * chunks], ranks, chunks, 8))
        made = [
            {value for item in part.items if isinstance(item, Op) for value in item.outputs} for part in parts
        ]
        found = [kept(part, rank) for rank, part in enumerate(parts)]
        slots.append([max(one.get(value, 1) for value in own) for one, own in zip(found, made, strict=True)])
    assert slots == [[4, 3, 2, 1], [8, 8, 7, 5]]


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 8)])
def test_zero_bubble_keeps_what_weights_read_as_long_on_every_rank(ranks: int, count: int) -> None:
    """Activations have p slots everywhere (1F1B: p - s), gradients of what a stage made s + 1.

    What is received has one more.
    """
    for rank, program in programs_of(pipeline(GRAPHS[ranks], ranks, 1, count, True)).items():
        found: dict[Kind, set[int]] = {}
        for task in program.tasks:
            for register in task.outputs if task.turns and task.rate is Rate.MICRO else ():
                readers = [program.tasks[at] for at in program.consumers[register]]
                kinds = [_kind(one) for one in readers if one.turns]
                if kinds and max(kinds) is Kind.WEIGHTS and _kind(task) is not Kind.WEIGHTS:
                    is_received = task.move is not None
                    slots = program.registers[register].slots - is_received
                    found.setdefault(_kind(task), set()).add(slots)
        assert found.pop(Kind.FORWARD) == {ranks}
        assert found == {Kind.BACKWARD: {rank + 1}}


def _kind(task: Task) -> Kind:
    return Kind(task.turns[0] % 3)


@pytest.mark.parametrize("zero_bubble", [False, True])
def test_all_finish(zero_bubble: bool) -> None:
    """Any ranks, stages and micro-batches, in any order of firing: together, and each rank by itself."""
    for (ranks, chunks), count in product([(2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (2, 4)], [2, 3, 4, 7]):
        programs = programs_of(pipeline(GRAPHS[ranks * chunks], ranks, chunks, count, zero_bubble))
        where = programs[0].placement
        for one_order in (False, True):
            verify_live(Network(programs, where, one_order))
        for rank, program in programs.items():
            verify_live(Network({rank: program}, where, one_order=False))


# --- the numbers -----------------------------------------------------------------------------------------


def run(programs: Mapping[int, Program], draw: random.Random | None) -> dict[str, torch.Tensor]:
    """What a step gives out; tasks begin and end in any order, as lanes do, or one after the other."""
    where = programs[0].placement
    network = Network(programs, where, one_order=draw is None)
    firing, marking, registers = (
        Firing(network, SimTransport(where), str),
        Marking(network),
        Registers(network),
    )
    for rank, program in programs.items():
        registers.fill(rank, [_input(program, port) for port in program.inputs])
    ready, running = marking.ready(), []
    while ready or running:
        if ready and (not running or draw is None or draw.random() < 0.6):
            actor = ready.pop(draw.randrange(len(ready)) if draw is not None else 0)
            time = marking.begin(actor)
            running.append((actor, time, firing.read(registers, actor, time)))
        if running and (draw is None or draw.random() < 0.5):
            actor, time, given = running.pop(draw.randrange(len(running)) if draw is not None else 0)
            firing.write(registers, actor, time, firing.work(actor, 0, time, given))
            ready += marking.end(actor)
    assert marking.is_done
    return {
        port.name: tensor
        for rank, program in programs.items()
        for port, tensor in zip(program.outputs, registers.take(rank), strict=True)
    }


def _input(program: Program, port: Port) -> torch.Tensor:
    shape = program.registers[port.register].shape
    if port.name.endswith("lr"):
        return torch.tensor(0.1)
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, port.name))))


@pytest.mark.parametrize("zero_bubble", [False, True], ids=["1f1b", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "chunks", "count"), [(3, 1, 5), (2, 2, 5), (3, 2, 4)])
def test_any_order_that_slots_allow_gives_the_same_bits(
    ranks: int, chunks: int, count: int, zero_bubble: bool
) -> None:
    plan = pipeline(GRAPHS[ranks * chunks], ranks, chunks, count, zero_bubble)
    programs = programs_of(plan)
    expected = run(programs, None)
    assert len(expected) == ranks * chunks + 2  # the loss, a weight a layer, and the shift
    for seed in range(15):
        found = run(programs, random.Random(seed))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one) for name, one in expected.items())


# --- the order that ranks would work in --------------------------------------------------------------------


def order_of(rounds: Rounds, rank: int) -> str:
    """A rank's units in their order: F, B or W, the chunk, the micro-batch."""
    units = [
        (rounds.turn(Unit(kind, stage), time), f"{'FBW'[kind]}{stage // rounds.ranks}{time}")
        for kind in Kind
        for stage in range(rank, rounds.stages, rounds.ranks)
        for time in range(rounds.micro_batches)
    ]
    assert len({turn for turn, _ in units}) == len(units) and max(units)[0] < rounds.end
    return " ".join(name for _, name in sorted(units))


def test_orders_by_hand() -> None:
    """As figures 4 of Narayanan et al. (2021) and 3 of Qi et al. (2023) have them."""
    assert order_of(Rounds(0, 2, 2, 4), 0) == "F00 F01 B00 W00 F02 B01 W01 F03 B02 W02 B03 W03"
    assert order_of(Rounds(0, 2, 2, 4), 1) == "F00 B00 W00 F01 B01 W01 F02 B02 W02 F03 B03 W03"
    assert order_of(Rounds(0, 2, 2, 4, True), 1) == "F00 B00 F01 B01 W00 F02 B02 W01 F03 B03 W02 W03"
    assert order_of(Rounds(0, 2, 4, 3), 1) == (
        "F00 F01 F10 B10 W10 F11 B11 W11 F02 B00 W00 F12 B01 W01 B12 W12 B02 W02"
    )


@pytest.mark.parametrize("zero_bubble", [False, True])
@pytest.mark.parametrize(
    ("ranks", "chunks", "count"), [(2, 1, 3), (4, 1, 8), (2, 2, 5), (3, 3, 7), (4, 2, 3)]
)
def test_live_counts_what_the_order_has(ranks: int, chunks: int, count: int, zero_bubble: bool) -> None:
    rounds = Rounds(0, ranks, ranks * chunks, count, zero_bubble)
    for rank in range(ranks):
        order = order_of(rounds, rank).split()
        stages = range(rank, rounds.stages, ranks)
        for first, last, kind in product(stages, stages, (Kind.BACKWARD, Kind.WEIGHTS)):
            held, most = 0, 0
            for name in order:
                held += name[:2] == f"F{first // ranks}"
                most = max(most, held)
                held -= name[:2] == f"{'FBW'[kind]}{last // ranks}"
            assert rounds.live(Unit(Kind.FORWARD, first), Unit(kind, last)) == most
