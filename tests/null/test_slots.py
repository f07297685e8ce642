"""One-forward-one-backward from slots alone: the micro-batches that stages keep, and how long steps take."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import monoflow as flow
from monoflow.graph.step_graph import Phase, info_of
from monoflow.lower.lower import lower
from monoflow.mesh import Placement, placement
from monoflow.plan.planner import plan_step
from monoflow.plan.time import micro_batched
from monoflow.runtime.network import Actor, Marking, Network
from monoflow.runtime.program import Program, Rate
from monoflow.sbp.sources import RuleBook

SECONDS: Mapping[Phase, float] = {Phase.FORWARD: 1.0, Phase.BACKWARD: 2.0}


def programs(stages: int, micro_batches: int) -> tuple[Mapping[int, Program], Mapping[str, Phase]]:
    """A chain of layers, one a stage; and the phase of every op by its name."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(stages)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @flow.graph(model, optimizer)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    graph, where = step.capture(torch.randn(16, 8)), placement("cpu", range(stages))
    pins = {str(stage): stage for stage in range(stages)}
    plan = micro_batched(plan_step(graph, where, "pipeline", stages=pins), micro_batches, RuleBook())
    phases = {node.name: info_of(node).phase for node in plan.graph.calls()}
    return lower(plan, range(stages), torch.device("cpu")).programs, phases


def kept(program: Program) -> dict[int, int]:
    """The slots of registers that forward fills and backward reads."""
    writers = {register: task for task in program.tasks for register in task.outputs}
    return {
        register.index: register.slots
        for register, readers in zip(program.registers, program.consumers, strict=True)
        if register.rate is Rate.MICRO
        and register.index in writers
        and writers[register.index].phase == "forward"
        and any(program.tasks[reader].phase == "backward" for reader in readers)
    }


class Clock:
    """Runs programs by the clock: sends take no time, a stage's forward 1 and its backward 2.

    Attributes:
        end: when all is done.
        most: per rank, the most micro-batches that had begun forward and had not ended backward.
    """

    def __init__(self, found: Mapping[int, Program], phases: Mapping[str, Phase], where: Placement) -> None:
        self.network = Network(found, where, one_order=False)
        self.marking = Marking(self.network)
        self.end = 0.0
        self.most = dict.fromkeys(found, 0)
        self.walked = {
            (rank, task.index): Counter(
                phases[node.name]
                for node in (task.compute.graph.nodes if task.compute is not None else ())
                if phases.get(node.name, Phase.UPDATE) in SECONDS and task.rate is Rate.MICRO
            )
            for rank, program in found.items()
            for task in program.tasks
        }
        self.total = {rank: Counter[Phase]() for rank in found}
        for (rank, _), count in self.walked.items():
            self.total[rank].update(count)

    def _lasts(self, actor: Actor) -> float:
        return self._seconds(actor.members[0].rank, actor.task.index)

    def _seconds(self, rank: int, index: int) -> float:
        count = self.walked[rank, index]
        return sum(SECONDS[phase] * ops / self.total[rank][phase] for phase, ops in count.items())

    def after_send(self, rank: int) -> float:
        """Of a stage's backward, what it does when it has sent."""
        tasks = self.network.programs[rank].tasks
        last = max(
            one.index for one in tasks if one.move is not None and one.move.kind == "send" and one.inputs
        )
        return sum(self._seconds(rank, index) for of, index in self.walked if of == rank and index > last)

    def run(self) -> Clock:
        """From the first to the last firing."""
        ready: list[Actor] = list(self.marking.ready())
        busy: list[tuple[float, int, Actor, int]] = []
        working: set[int] = set()
        live: dict[int, set[int]] = {rank: set() for rank in self.most}
        now, number = 0.0, 0
        while ready or busy:
            ready.sort(key=lambda one: (self.marking.fired[one.number], one.task.index))
            started = None
            for actor in ready:
                rank = actor.members[0].rank
                if self._lasts(actor) == 0.0 or rank not in working:
                    started = actor
                    break
            if started is None:
                now, _, actor, time = heapq.heappop(busy)
                rank = actor.members[0].rank
                working.discard(rank)
                if actor.task.index == max(
                    index
                    for (of, index), count in self.walked.items()
                    if of == rank and count[Phase.BACKWARD]
                ):
                    live[rank].discard(time)
                ready += self.marking.end(actor)
                continue
            ready.remove(started)
            rank = started.members[0].rank
            time = self.marking.begin(started)
            if self._lasts(started) == 0.0:
                ready += self.marking.end(started)
                continue
            if self.walked[rank, started.task.index][Phase.FORWARD]:
                live[rank].add(time)
                self.most[rank] = max(self.most[rank], len(live[rank]))
            working.add(rank)
            heapq.heappush(busy, (now + self._lasts(started), number, started, time))
            number += 1
        assert self.marking.is_done
        self.end = now
        return self


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 8), (4, 2), (4, 4), (4, 8)])
def test_one_forward_one_backward(stages: int, micro_batches: int) -> None:
    """The bubble is that of the theory: S - 1 of k + S - 1 turns (Narayanan et al., 2019).

    But for what each stage but the first computes when it has sent: the one before does not wait for that.
    """
    found, phases = programs(stages, micro_batches)
    for rank, program in found.items():
        depth = min(stages - rank, micro_batches)
        assert set(kept(program).values()) <= {depth}, program.text()
        assert kept(program) or rank == stages - 1
        assert {one.slots for one in program.registers if one.index not in kept(program)} == {1}
    clock = Clock(found, phases, placement("cpu", range(stages))).run()
    theory = (micro_batches + stages - 1) * sum(SECONDS.values())
    later = sum(clock.after_send(rank) for rank in found if rank)
    assert later > 0.6 * (stages - 1), "the gradients of weights, about half of backward's 2, are sent after"
    assert clock.end == pytest.approx(theory - later)
    assert clock.most == {rank: min(stages - rank, micro_batches) for rank in found}
