"""Which op first made a NaN or Inf: a step is fired once more, op by op, and every value is looked at.

A value that is not finite has an origin: the op that made a NaN from what held none, or an Inf from what was
finite, or the input of the step that it was in. Later values inherit the origin of what they are made from;
one that is finite again has none (a softmax over masked scores). So the origin of what a gate holds is the
one that matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from .firing import Firing
from .network import Actor, Member
from .program import TIME

Tensor = torch.Tensor


class Origin(NamedTuple):
    """Where a NaN or Inf came from; of two, the lesser is what to tell of.

    Attributes:
        from_elsewhere: whether it came with a move, from a rank that knows more.
        order: how many values were looked at before.
        is_nan: else it is an Inf.
        is_input: whether an input of the step held it, else an op made it.
        node: of the graph.
        where: rank and micro-batch.
        given: what the op was given, for people.
    """

    from_elsewhere: bool
    order: int
    is_nan: bool
    is_input: bool
    node: str
    where: str
    given: str


def _nan_inf(value: Any) -> tuple[bool, bool]:
    """Whether a value holds NaN, and Inf."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False, False
    return bool(torch.isnan(value).any()), bool(torch.isinf(value).any())


class Finding(Firing):
    """Fires as `Firing` does, but op by op, and lets no state change.

    Attributes:
        found: the origins of what gates held.
    """

    def __init__(self, like: Firing) -> None:
        super().__init__(like.network, like.transport, like.describe, units=like.units)
        self.found: list[Origin] = []
        self._origins = WeakTensorKeyDictionary()
        self._num_seen = 0

    def _is_open(self, actor: Actor, results: list[Sequence[Tensor]]) -> bool:
        gates = self.network.gates
        held = [
            tensor
            for member, made in zip(actor.members, results, strict=True)
            for register, tensor in zip(member.outputs, made, strict=True)
            if register in gates
        ]
        self.found += self._known(held)
        return not held

    def _done(self, actor: Actor, time: int, inputs: list[list[Tensor]]) -> list[Sequence[Tensor]]:
        if actor.task.compute is not None:
            return super()._done(actor, time, inputs)
        given = [one for own in inputs for one in own]  # after a move, every rank has what any of them had
        results = super()._done(actor, time, inputs)
        for member, made in zip(actor.members, results, strict=True):
            for value in made:
                self._note(value, given, member.task.name, f"rank {member.rank}", is_move=True)
        return results

    def _compute(self, actor: Actor, time: int, given: list[Tensor]) -> Sequence[Tensor]:
        graph: Any = actor.task.module(time).graph
        (member,) = actor.members
        where = f"rank {member.rank}"
        where += f", {'unit' if actor.is_pulled else 'micro-batch'} {time}" * (actor.fires > 1)
        self._note_inputs(member, given, where)
        left = iter(list(given))
        given.clear()
        env: dict[fx.Node, Any] = {}
        last = {one: node for node in graph.nodes for one in node.all_input_nodes}
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = time if node.target == TIME else next(left)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)  # type: ignore[misc]
            if node.op == "output":
                return args[0]
            assert node.op == "call_function", f"a task's graph has {node.op} {node.target}"
            env[node] = node.target(*args, **kwargs)
            inputs = pytree.tree_leaves((args, kwargs))
            for value in pytree.tree_leaves(env[node]):
                self._note(value, inputs, node.name, where)
            for one in node.all_input_nodes:
                if last[one] is node:
                    env.pop(one, None)
        raise AssertionError("a task's graph has no output")

    def _known(self, values: Iterable[Any]) -> list[Origin]:
        return [one for x in values if isinstance(x, Tensor) and (one := self._origins.get(x)) is not None]

    def _note_inputs(self, member: Member, given: Sequence[Tensor], where: str) -> None:
        """Inputs of the step that are not finite."""
        registers = self.network.programs[member.rank].registers
        for register, value in zip(member.task.inputs, given, strict=True):
            has_nan, has_inf = _nan_inf(value)
            if (has_nan or has_inf) and value not in self._origins:
                name = registers[register].name
                self._origins[value] = Origin(False, self._num_seen, has_nan, True, name, where, "")

    def _note(self, value: Any, inputs: Sequence[Any], name: str, where: str, is_move: bool = False) -> None:
        self._num_seen += 1
        has_nan, has_inf = _nan_inf(value)
        if not has_nan and not has_inf:
            return
        inherited = [one for one in self._known(inputs) if one.is_nan or not has_nan]
        if not inherited:
            given = ", ".join(_range(x) for x in inputs if isinstance(x, Tensor) and x.numel())
            inherited = [Origin(is_move, self._num_seen, has_nan, False, name, where, given)]
        self._origins[value] = min(inherited)


def _range(x: Tensor) -> str:
    if not x.is_floating_point():
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    low, high = x.detach().float().aminmax()
    return f"{list(x.shape)} from {low.item():.4g} to {high.item():.4g}"
