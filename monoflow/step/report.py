"""verify: the plan against the one-device reference, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..compiler import Compiled, share_key
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
        left_out_of: the tensors that have left-out entries and how many, the most first.
    """

    kind: str
    largest: float
    worst: str
    left_out: int
    judged: int
    left_out_of: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Report:
    """How far a plan's run is from the one-device run, after `steps` steps from the same state.

    Results deviate relative to their own magnitude (at least 1), gradients relative to the largest gradient
    of the model, parameters and buffers relative to their magnitude (at least 1), optimizer state relative to
    the largest entry of its kind (all momenta, say). Entries of parameters and state whose gradient was below
    `noise` times the largest gradient in some step, and not exactly zero both ways, are left out and counted:
    an optimizer that divides by the gradient's magnitude turns rounding noise there into full steps in any
    two correct runs.
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
        """A line per kind, and one on what was left out of it, and why."""
        lines = [f"after {self.steps} steps, plan against one device:"]
        for one in self.deviations:
            lines.append(f"  {one.kind:16} {one.largest:.2e}  {one.worst}")
            if one.left_out:
                most = ", ".join(f"{name} ({count:,})" for name, count in one.left_out_of[:3])
                more = ", ..." * (len(one.left_out_of) > 3)
                count = f"{one.left_out:,} of {one.judged + one.left_out:,} entries"
                why = f"whose gradient is below {self.noise:g} of the largest"
                lines.append(f"    left out: {count}, {why}: {most}{more}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


_NOISE = 1e-5


def compare(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int) -> Report:
    """Runs `steps` steps both ways and compares; state and random generator are restored afterwards."""
    random = torch.get_rng_state()
    compiled = step._compiled_for(args, kwargs, observe=True)
    step._last = step._last or compiled
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
    before = _Before(step, compiled)
    try:
        for key, (results, grads) in zip(keys, expected, strict=True):
            observed = step._compiled_for(args, kwargs, observe=True)
            got, seen = step._run(observed, args, kwargs, key)
            judge.results(_tensors(got), results)
            judge.grads({k.removesuffix(":observed_grad"): whole(v) for k, v in seen.items()}, grads)
        judge.state(step, reference.state(), final)
    finally:
        before.restore()
        torch.set_rng_state(random)
    return Report(steps, _NOISE, judge.deviations())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [whole(x).detach().clone() for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


class _Before:
    """The live state before a comparison: values, gradients, and which states do not exist yet."""

    def __init__(self, step: Step, compiled: Compiled) -> None:
        self.subject, self.slots = step._subject, compiled.captured.slots
        self.values = {name: value.detach().clone() for name, value in live_state(step._subject).items()}
        self.grads = [
            (param, param.grad, None if param.grad is None else param.grad.detach().clone())
            for param in step._subject.params.values()
        ]
        self.absent = [name for name in compiled.captured.begins if self.slots[name].get() is None]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        for name in self.absent:
            self.slots[name].put(None)
        for name, value in live_state(self.subject).items():
            if name in self.values:
                value.copy_(self.values[name])
        for param, grad, value in self.grads:
            param.grad = grad
            if grad is not None and value is not None:
                grad.copy_(value)


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
        of = sorted([*now.left_out_of, *([(name, left_out)] * bool(left_out))], key=lambda one: -one[1])
        self.found[kind] = Deviation(
            kind, largest, worst, now.left_out + left_out, now.judged + difference.numel(), tuple(of)
        )

    def results(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        for number, (a, b) in enumerate(zip(got, expected, strict=True)):
            self.note("result", f"result {number}", _difference(a, b), max(1.0, _magnitude(b)))

    def grads(self, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
        scale = max((_magnitude(value) for value in expected.values()), default=1.0) or 1.0
        assert got.keys() == expected.keys(), f"gradients of {got.keys() ^ expected.keys()} are missing"
        for name, value in expected.items():
            self.note("gradient", name, _difference(got[name], value), scale)
            a, b = _exact(got[name]), _exact(value)
            quiet = (b.abs() < _NOISE * scale) & ((b != 0) | (a != 0))
            self.quiet[name] = self.quiet[name] | quiet if name in self.quiet else quiet

    def state(
        self, step: Step, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        params = step._subject.params
        assert got.keys() == expected.keys(), f"states {got.keys() ^ expected.keys()} exist one way only"
        scales: dict[str, float] = {}
        for name, value in expected.items():
            key = _state_key(name)
            scales[key] = max(scales.get(key, 0.0), _magnitude(value))
        for name, value in expected.items():
            param, key = name, _state_key(name)
            if key:
                param = name.rsplit(":", 1)[0]
                param = param if param in params else param.partition(".")[2]
            difference = _difference(got[name], value)
            quiet = self.quiet.get(param)
            left_out = 0
            if quiet is not None and quiet.shape == difference.shape:
                left_out = int(quiet.sum())
                difference = difference[~quiet]
            kind = "optimizer state" if key else "parameter" if name in params else "buffer"
            scale = (scales[key] or 1.0) if key else max(1.0, _magnitude(value))
            self.note(kind, name, difference, scale, left_out)

    def deviations(self) -> tuple[Deviation, ...]:
        order = ("result", "gradient", "parameter", "buffer", "optimizer state")
        return tuple(self.found[kind] for kind in order if kind in self.found)


def _state_key(name: str) -> str:
    """Which state of a parameter this is ("exp_avg"); empty for parameters and buffers."""
    return name.rsplit(":", 1)[1] if ":" in name else ""


def _exact(value: torch.Tensor) -> torch.Tensor:
    """In float64; a complex number is two entries, as it is to an optimizer."""
    value = value.detach()
    return (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).double()


def _difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b; zero where both are the same infinity, or both are no number."""
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    a, b = _exact(a), _exact(b)
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)


def _magnitude(value: torch.Tensor) -> float:
    finite = _exact(value).nan_to_num(0.0, 0.0, 0.0)
    return float(finite.abs().max()) if value.numel() else 0.0
