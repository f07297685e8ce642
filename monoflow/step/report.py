"""verify: the plan against the one-device reference, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..compiler import share_key
from ..sbp.random_mode import draw_key
from .reference import Reference, live_state
from .store import whole

if TYPE_CHECKING:
    from .decorator import Step


@dataclass(frozen=True)
class Deviation:
    """The largest deviation of one kind of tensor.

    Attributes:
        kind: "result", "gradient", "parameter", "buffer" or "optimizer state".
        largest: the largest absolute difference, relative to the scale of its kind (see `Report`).
        worst: the name of the tensor that has it.
        left_out: how many entries were not judged, because their gradient is rounding noise.
        judged: how many entries were.
    """

    kind: str
    largest: float
    worst: str
    left_out: int
    judged: int


@dataclass(frozen=True)
class Report:
    """How far a plan's run is from the one-device run, after `steps` steps from the same state.

    Results deviate relative to their own magnitude (at least 1), gradients relative to the largest gradient of the
    model, state relative to its magnitude (at least 1). Entries of parameters and state whose gradient was below
    `noise` times the largest gradient in some step are left out and counted: an optimizer that divides by the
    gradient's magnitude turns rounding noise there into full steps in any two correct runs.
    """

    steps: int
    noise: float
    deviations: tuple[Deviation, ...]

    def __getitem__(self, kind: str) -> Deviation:
        return next(one for one in self.deviations if one.kind == kind)

    @property
    def largest(self) -> float:
        """The largest deviation of all."""
        return max((one.largest for one in self.deviations), default=0.0)

    def text(self) -> str:
        """A line per kind."""
        lines = [f"after {self.steps} steps, plan against one device:"]
        for one in self.deviations:
            left = f", {one.left_out:,} of {one.judged + one.left_out:,} entries left out (gradient noise)"
            lines.append(f"  {one.kind:16} {one.largest:.2e}  {one.worst}{left * bool(one.left_out)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


_NOISE = 1e-5


def compare(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int) -> Report:
    """Runs `steps` steps both ways and compares; the state is restored afterwards."""
    step._compiled_for(args, kwargs)
    world = step._world()
    keys = [share_key(draw_key(), world, torch.device("cpu")) for _ in range(steps)]
    reference = Reference(step._subject, step._function)
    expected: list[tuple[list[torch.Tensor], dict[str, torch.Tensor]]] = []
    with reference.on_whole_state():
        for key in keys:
            result = reference.run(key, args, kwargs)
            expected.append((_tensors(result), dict(reference.grads)))
        final = reference.state()
    judge = _Judge()
    before = _snapshot(step)
    try:
        for key, (results, grads) in zip(keys, expected, strict=True):
            observed = step._observed_form(step._compiled_for(args, kwargs))
            got, seen = step._run(observed, args, kwargs, key)
            judge.results(_tensors(got), results)
            judge.grads({k.removesuffix(":observed_grad"): whole(v) for k, v in seen.items()}, grads)
        judge.state(step, reference.state(), final)
    finally:
        _restore(step, before)
    return Report(steps, _NOISE, judge.deviations())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [whole(x).detach().clone() for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _snapshot(step: Step) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in live_state(step._subject).items()}


def _restore(step: Step, before: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in live_state(step._subject).items():
            if name in before:
                value.copy_(before[name])


class _Judge:
    """Collects the largest deviation per kind."""

    def __init__(self) -> None:
        self.found: dict[str, Deviation] = {}
        self.quiet: dict[str, torch.Tensor] = {}

    def note(self, kind: str, name: str, difference: torch.Tensor, scale: float, left_out: int = 0) -> None:
        value = float(difference.abs().max()) / scale if difference.numel() else 0.0
        value = float("inf") if value != value else value
        now = self.found.get(kind, Deviation(kind, -1.0, "", 0, 0))
        largest, worst = max((now.largest, now.worst), (value, name), key=lambda one: one[0])
        self.found[kind] = Deviation(
            kind, largest, worst, now.left_out + left_out, now.judged + difference.numel()
        )

    def results(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        for number, (a, b) in enumerate(zip(got, expected, strict=True)):
            self.note("result", f"result {number}", _difference(a, b), max(1.0, _magnitude(b)))

    def grads(self, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
        scale = max((_magnitude(value) for value in expected.values()), default=1.0) or 1.0
        assert got.keys() == expected.keys(), f"gradients of {got.keys() ^ expected.keys()} are missing"
        for name, value in expected.items():
            self.note("gradient", name, _difference(got[name], value), scale)
            quiet = value.abs() < _NOISE * scale
            self.quiet[name] = self.quiet[name] | quiet if name in self.quiet else quiet

    def state(
        self, step: Step, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        subject = step._subject
        for name, value in expected.items():
            param = name if name in subject.params else name.rsplit(":", 1)[0]
            param = param if param in subject.params else param.partition(".")[2]
            if name in subject.params:
                kind = "parameter"
            elif ":" in name:
                kind = "optimizer state"
            else:
                kind = "buffer"
            difference = _difference(got[name], value)
            quiet = self.quiet.get(param)
            left_out = 0
            if quiet is not None and quiet.shape == difference.shape:
                left_out = int(quiet.sum())
                difference = difference[~quiet]
            self.note(kind, name, difference, max(1.0, _magnitude(value)), left_out)

    def deviations(self) -> tuple[Deviation, ...]:
        order = ("result", "gradient", "parameter", "buffer", "optimizer state")
        return tuple(self.found[kind] for kind in order if kind in self.found)


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    return a.detach().double() - b.detach().double()


def _magnitude(value: torch.Tensor) -> float:
    return float(value.detach().double().abs().max()) if value.numel() else 0.0
