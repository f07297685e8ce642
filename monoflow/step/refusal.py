"""Steps that change nothing, because their loss or gradients are not finite: what becomes of them.

A compiled step looks before it writes (see `graph.passes.guard`): all ranks see the same scalars, so they all
write or none does. What is decided here is what to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..compiler import GRADIENTS, Origin, Role
from ..errors import FlowError, NonFiniteError
from ..log import stage_logger

if TYPE_CHECKING:
    from .binding import Binding, Kept


class Refusals:
    """What a step does about them.

    Args:
        policy: "raise", "skip" or "rollback".

    Attributes:
        count: how many steps changed nothing.
        roll_back: loads the last snapshot; set by the step's checkpointer. Returns whether there was one.
    """

    def __init__(self, name: str, policy: str) -> None:
        self.name, self.policy = name, policy
        self.count = 0
        self.roll_back: Callable[[], bool] | None = None
        self._is_due = False

    @property
    def explains(self) -> bool:
        """Whether what a step was given is to be kept until it is over."""
        return self.policy == "raise"

    @property
    def lets_follow(self) -> bool:
        """Whether a step may begin before it is known what becomes of the one before."""
        return self.policy != "rollback"

    def met(self, binding: Binding, bad: Mapping[str, float], kept: Kept | None) -> None:
        """A step was not taken.

        Args:
            bad: the scalars that are not finite.
            kept: what it was given, if that is to be explained.

        Raises:
            NonFiniteError: that is the policy; it names the first op.
        """
        self.count += 1
        values = ", ".join(f"{_text(name)} is {value}" for name, value in bad.items())
        if self.policy == "raise":
            assert kept is not None, "what a refused step was given is gone"
            first = _first_origin(binding, kept)
            raise NonFiniteError(f"{self.name}: {values}. {_explained(binding, first)} {_ADVICE}")
        self._is_due = self.policy == "rollback"
        done = "skipped" if self.policy == "skip" else "left out; the last snapshot is loaded"
        stage_logger("runtime").warning(
            "%s: %s: the step is %s (%d so far)", self.name, values, done, self.count
        )

    def settle(self) -> None:
        """Before the next step, on all ranks: loads the last snapshot if that is due."""
        if not self._is_due:
            return
        self._is_due = False
        if self.roll_back is None:
            raise FlowError(
                f'{self.name} has on_nan="rollback", but there is no flow.checkpointer(path, {self.name}) to '
                'get a snapshot from; make one, or choose on_nan="skip"'
            )
        if not self.roll_back():
            stage_logger("runtime").warning("%s: there is no snapshot yet: its state stays", self.name)


_ADVICE = (
    'Parameters, buffers and optimizer state are as they were before this step. on_nan="skip" leaves such '
    'steps out, on_nan="rollback" goes back to the last snapshot.'
)


def _text(name: str) -> str:
    return "the norm of the gradients" if name == GRADIENTS else f"the loss ({name})"


def _first_origin(binding: Binding, kept: Kept) -> Origin | None:
    """Where it began, of all ranks; all of them call it."""
    origins: Sequence[Origin] = binding.compiled.engine.origins(binding.again(kept))
    world = binding.world
    if world.size > 1 and not world.simulated:
        found: list[list[Origin]] = [[] for _ in range(world.size)]
        dist.all_gather_object(found, list(origins))
        origins = [one for some in found for one in some]
    return min(origins, default=None)


def _explained(binding: Binding, first: Origin | None) -> str:
    if first is None:
        return "Run once more, op by op, the step was finite: it depends on chance or on the order of sums."
    what, graph = "NaN" if first.is_nan else "Inf", binding.compiled.plan.graph
    if first.is_input:
        name = next((key for key, node in graph.placeholders.items() if node.name == first.node), first.node)
        role = graph.input_of[name].role if name in graph.input_of else Role.BATCH
        if role in (Role.PARAM, Role.STATE, Role.BUFFER):
            return (
                f"{name} held {what} before this step: it was so from the start, or a gradient of an earlier "
                "step was, which is looked at before it is used only where the step clips, or under "
                '"skip" and "rollback".'
            )
        return f"{name}, which the step was given, holds {what}."
    place = binding.compiled.engine.firing.describe(first.node)
    given = f", from {first.given}" if first.given else ""
    return f"The first {what} was made on {first.where} by {place}{given}."
