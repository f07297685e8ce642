"""Pipelines by the clock: programs of a chain of equal layers, gone through in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

import monoflow as flow
from monoflow.graph.step_graph import StepGraph
from monoflow.lower.lower import lower
from monoflow.mesh import placement
from monoflow.plan.parts import Parts
from monoflow.plan.plan import Plan
from monoflow.plan.planner import plan_step
from monoflow.plan.schedule import Schedule, schedule
from monoflow.plan.time import micro_batched
from monoflow.runtime.network import Actor, Marking, Network
from monoflow.runtime.program import Program, Rate
from monoflow.sbp.sources import RuleBook

RULES = RuleBook()
PRODUCT = torch.ops.aten.mm.default


class Layer(nn.Module):
    """A product; the first one's input has a gradient, too, so that all layers do the same."""

    def __init__(self, width: int, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.shift = nn.Parameter(torch.zeros(width)) if is_first else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if self.shift is None else x + self.shift).tanh()


def chain(layers: int, rows: int) -> StepGraph:
    """The captured step of a chain of layers."""
    model = nn.Sequential(*(Layer(4, layer == 0) for layer in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step.capture(torch.randn(rows, 4))


def pipeline(
    graph: StepGraph, ranks: int, chunks: int, micro_batches: int, zero_bubble: bool = False
) -> Plan:
    """The chain in stages of one layer."""
    plan = plan_step(
        graph, placement("cpu", range(ranks)), "pipeline",
        stages={str(stage): stage for stage in range(ranks * chunks)},
        num_stages=ranks * chunks, zero_bubble=zero_bubble,
    )  # fmt: skip
    return micro_batched(plan, micro_batches, RULES)


def programs_of(plan: Plan) -> Mapping[int, Program]:
    return lower(plan, plan.placement.ranks, torch.device("cpu")).programs


def parts_of(plan: Plan) -> list[Schedule]:
    """What every rank does."""
    parts = Parts(schedule(plan))
    return [parts.of((rank,)) for rank in plan.placement.ranks]


#: Of a compute task: how long a product of it takes in a micro-batch.
Cost = Callable[[int, str, int], float]


class Fired(NamedTuple):
    """A firing of a compute task with products; sends take no time unless told to."""

    rank: int
    task: int
    time: int
    start: float
    end: float


class Clock:
    """Goes through programs in the order of time: each rank computes one thing at a time, channels send one.

    Args:
        cost: of a product, by rank, phase and micro-batch.
        send: how long one takes.

    Attributes:
        end: when all is done.
        fired: all firings with products.
        live: per rank and register, the most tensors in it, from its writer's to its last reader's end.
    """

    def __init__(
        self, programs: Mapping[int, Program], cost: Cost = lambda *_: 1.0, send: float = 0.0
    ) -> None:
        where = next(iter(programs.values())).placement
        self.network = Network(programs, where, one_order=False)
        self.marking, self.cost, self.send = Marking(self.network), cost, send
        self.fired: list[Fired] = []
        self.end = 0.0
        self.live: dict[tuple[int, int], int] = {}
        self._now: dict[tuple[int, int], int] = {}
        self._left: dict[tuple[int, int, int], int] = {}
        self._run()

    def idle(self) -> float:
        """Of all ranks together, when they compute no product."""
        busy = sum(one.end - one.start for one in self.fired)
        return len(self.network.programs) * self.end - busy

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they are idle."""
        return self.idle() / (len(self.network.programs) * self.end)

    def _lasts(self, actor: Actor, time: int) -> float:
        task, rank = actor.task, actor.members[0].rank
        if task.move is not None:
            return self.send if task.move.kind == "send" and task.rate is Rate.MICRO else 0.0
        count = products(task.module(time).graph.nodes) if task.rate is Rate.MICRO else 0
        return count * self.cost(rank, task.phase, time) if count else 0.0

    def _run(self) -> None:
        ready = list(self.marking.ready())
        busy: list[tuple[float, int, Actor, int, float]] = []
        working: set[object] = set()
        now = 0.0
        while ready or busy:
            ready.sort(key=self._place)
            for actor in ready:
                time = self.marking.fired[actor.number]
                lasts, where = self._lasts(actor, time), self._where(actor)
                if lasts == 0.0 or where not in working:
                    break
            else:
                now = busy[0][0]
                while busy and busy[0][0] - now < 1e-9:  # of what ends together, nothing is first
                    _, _, actor, time, start = heapq.heappop(busy)
                    working.discard(self._where(actor))
                    ready += self._done(actor, time, start, now)
                continue
            ready.remove(actor)
            self.marking.begin(actor)
            if lasts == 0.0:
                ready += self._done(actor, time, now, now)
            else:
                working.add(where)
                heapq.heappush(busy, (now + lasts, actor.number, actor, time, now))
        assert self.marking.is_done, list(self.marking.wait_for_graph())
        self.end = now

    def _place(self, actor: Actor) -> tuple[bool, int, int]:
        """What takes no time first: then it is clear whose turn it is."""
        time = self.marking.fired[actor.number]
        return self._lasts(actor, time) > 0, actor.task.turn(time), actor.task.index

    def _where(self, actor: Actor) -> object:
        return actor.members[0].rank if actor.task.move is None else actor.channel

    def _done(self, actor: Actor, time: int, start: float, now: float) -> Sequence[Actor]:
        if now > start and actor.task.move is None:
            self.fired.append(Fired(actor.members[0].rank, actor.task.index, time, start, now))
        for member in actor.members:
            program = self.network.programs[member.rank]
            for register in member.task.outputs if member.task.rate is Rate.MICRO else ():
                if program.registers[register].rate is Rate.MICRO:
                    key = member.rank, register
                    self._now[key] = self._now.get(key, 0) + 1
                    self.live[key] = max(self.live.get(key, 0), self._now[key])
                    self._left[*key, time] = len(program.consumers[register])
            for register in dict.fromkeys(member.task.inputs):
                key = member.rank, register, time
                if key in self._left:
                    self._left[key] -= 1
                    self._now[key[:2]] -= not self._left[key]
        return self.marking.end(actor)


def products(nodes: Iterable[torch.fx.Node]) -> int:
    """How many there are."""
    return sum(node.target is PRODUCT for node in nodes)
