"""Real arguments for the trial of an op: small tensors in place of the call's, with the call's structure.

Equal extents shrink to equal extents and different ones to different ones, so that what the op checks still
holds and no two dims agree by chance. Extents that the op does not let shrink stay as they are.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .signature import OpCall, TensorMeta

#: Small extents by name, in the order in which they are given out: sizes that do not divide by 2, sizes that
#: leave a rest by 3, and sizes that divide by 2, 4 and 8.
SIZES: Mapping[str, range] = {"odd": range(5, 999, 2), "mixed": range(7, 999, 3), "even": range(8, 999, 16)}
_KEPT = 4  # extents up to this one are never changed: kernels, channels, coordinates
_MOST_ELEMENTS = 1 << 22  # of all arguments of a trial together
_MOST_RATIO = 8  # extents that are up to so many times another may have to stay so

_NARROW = (torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float64, *_NARROW, torch.complex64, torch.complex128)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Shrink:
    """How extents shrink: some are kept, the others are multiples of the extent of their family."""

    kept: frozenset[int]
    family: Mapping[int, tuple[int, int]]  # extent -> (family, multiple)

    def extents(self, sizes: Iterable[int], real: Iterable[int] = ()) -> dict[int, int]:
        """The trial's extent for every extent; the families of `real` ones are kept too."""
        whole = {self.family[one][0] for one in real if one in self.family}
        kept = self.kept | {one for one, (family, _) in self.family.items() if family in whole}
        found = {one: one for one in kept}
        given: dict[int, int] = {}
        taken = set(kept)
        source = iter(sizes)
        for one, (family, _) in sorted(self.family.items()):
            if one in kept or family in given:
                continue
            multiples = [times for other, times in self.family.values() if other == family]
            given[family] = next(size for size in source if not taken & {size * k for k in multiples})
            taken |= {given[family] * k for k in multiples}
        return found | {
            one: given[family] * times for one, (family, times) in self.family.items() if one not in kept
        }


@dataclass(frozen=True)
class Domain:
    """Which values tensors take.

    Attributes:
        floats: "normal" (of both signs), "positive", or "unit" (between 0 and 1).
        integers: "dims" (an index into any dim of any tensor) or "two" (0 and 1).
        widen: compute 16-bit floats in float32.
    """

    floats: str
    integers: str
    widen: bool


class TrialArguments:
    """Makes arguments on which an op runs, in several sizes."""

    def __init__(self, call: OpCall, shrink: Shrink, domain: Domain) -> None:
        self.call, self.shrink, self.domain = call, shrink, domain

    def make(
        self,
        sizes: str,
        seed: int,
        scales: Sequence[float] = (1.0,),
        real: Iterable[int] = (),
        double: bool = False,
    ) -> Arguments | None:
        """Arguments of the call's structure; None if they would be too large.

        Args:
            sizes: a key of SIZES.
            seed: picks the values.
            scales: what floats are multiplied by, tensors taking turns.
            real: extents of the call that stay as they are.
            double: compute in float64.
        """
        extents = self.shrink.extents(SIZES[sizes], real)
        shapes = [tuple(extents.get(n, n) for n in meta.shape) for meta in self.call.inputs]
        if sum(map(math.prod, shapes)) > _MOST_ELEMENTS:
            return None
        lowest = min((n for shape in shapes for n in shape if n > 1), default=2)
        high = lowest if self.domain.integers == "dims" else 2
        with on_cpu():
            made = iter(
                [
                    self._tensor(meta, shape, high, scales[i % len(scales)], 1009 * seed + i, double)
                    for i, (meta, shape) in enumerate(zip(self.call.inputs, shapes, strict=True))
                ]
            )

        def put(leaf: Any) -> Any:
            if isinstance(leaf, TensorMeta):
                return next(made)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        args, kwargs = pytree.tree_map(put, (self.call.args, dict(self.call.kwargs)))
        return args, kwargs

    def _tensor(
        self, meta: TensorMeta, shape: Sequence[int], high: int, scale: float, seed: int, double: bool
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if meta.dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.6
        if meta.dtype in _INTEGERS:
            return torch.randint(0, high, tuple(shape), generator=generator).to(meta.dtype)
        value = _values(shape, self.domain.floats, generator)
        if meta.dtype.is_complex:
            value = torch.complex(value, _values(shape, self.domain.floats, generator))
        return (value * scale).to(self._dtype(meta.dtype, double))

    def _dtype(self, dtype: torch.dtype, double: bool) -> torch.dtype:
        if double:
            return torch.complex128 if dtype.is_complex else torch.float64
        return torch.float32 if self.domain.widen and dtype in _NARROW else dtype


def find_arguments(call: OpCall) -> TrialArguments | str:
    """What makes arguments for a call, or why the op cannot be tried."""
    unknown = {meta.dtype for meta in call.inputs} - {torch.bool, *_INTEGERS, *_FLOATS}
    if unknown:
        return f"no values are known for {sorted(map(str, unknown))}"
    problem = "its arguments are too large to try"
    domains = list(_domains(call))
    with quiet():
        for shrink, sizes in _tries(call):
            for domain in domains:
                candidate = TrialArguments(call, shrink, domain)
                given = candidate.make(sizes, seed=0)
                failure = "" if given is None else runs(call, given)
                if given is not None and failure is None:
                    return candidate
                problem = failure or problem
    return f"no arguments were found on which it runs; the last try: {problem}"


def runs(call: OpCall, given: Arguments) -> str | None:
    """Why the op does not run there with finite results of the call's structure; None if it does."""
    try:
        with quiet():
            results = outputs_of(call.op(*given[0], **given[1]))
    except Exception as error:  # whatever a user's op raises on arguments that it does not like
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    shapes = [None if one is None else one.ndim for one in results]
    expected = [None if one is None else len(one.shape) for one in call.outputs]
    if shapes != expected:
        return f"it gives outputs with {shapes} dims, its fake form with {expected}"
    if not all(one is None or _is_finite(one) for one in results):
        return "its results are not finite"
    return None


def outputs_of(result: Any) -> tuple[torch.Tensor | None, ...]:
    """The tensors (and Nones) of a result, flattened."""
    return tuple(x for x in pytree.tree_leaves(result) if x is None or isinstance(x, torch.Tensor))


def tensors_of(given: Arguments) -> list[torch.Tensor]:
    """The tensors among the arguments, flattened."""
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def with_tensors(given: Arguments, tensors: Iterable[torch.Tensor]) -> Arguments:
    """The arguments with other tensors in place of theirs, in flattened order."""
    arriving = iter(tensors)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(arriving), given)
    return args, kwargs


def on_cpu() -> AbstractContextManager:
    """Within: tensors are made on the CPU, whatever the user's default is. Free where that is the CPU."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def quiet() -> Iterator[None]:
    """Within: ops run on the CPU as outside of any user's context, and leave no trace."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(on_cpu())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _values(shape: Sequence[int], domain: str, generator: torch.Generator) -> torch.Tensor:
    """Values without symmetry: along every dim they grow, so that no part of a tensor is like another."""
    if domain == "normal":
        value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) + 1 / 3
    else:
        value = 0.1 + 0.8 * torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
    for dim, extent in enumerate(shape):
        ramp = torch.linspace(0.6, 1.0 if domain == "unit" else 1.8, max(extent, 1), dtype=torch.float64)
        value = value * ramp[:extent].reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return value


def _domains(call: OpCall) -> Iterator[Domain]:
    dtypes = {meta.dtype for meta in call.inputs}
    for widen in (True, False) if dtypes & set(_NARROW) else (False,):
        for integers in ("dims", "two") if dtypes & set(_INTEGERS) else ("dims",):
            for floats in ("normal", "positive", "unit") if dtypes & set(_FLOATS) else ("normal",):
                yield Domain(floats, integers, widen)


def _tries(call: OpCall) -> Iterator[tuple[Shrink, str]]:
    """How to shrink and to which sizes. Before an extent is kept, sizes that divide are tried."""
    ways = list(_shrinks(call))
    yield from ((way, sizes) for sizes in ("odd", "even") for way in ways[:2])
    yield from ((way, sizes) for way in ways[2:] for sizes in ("odd", "even"))


def _shrinks(call: OpCall) -> Iterator[Shrink]:
    """Ways to shrink the call's extents, those that shrink most first."""
    extents = sorted({n for meta in call.inputs for n in meta.shape if n > 1})
    plain = {x for x in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(x, int)}
    always = {n for n in extents if n <= _KEPT or n in plain}
    rest = [n for n in extents if n not in always]
    alone = {n: (n, 1) for n in rest}
    tied = _families(rest)
    ways: list[tuple[set[int], Mapping[int, tuple[int, int]]]] = [(set(), alone), (set(), tied)]
    ways += [(set(some), alone) for count in (1, 2) for some in itertools.combinations(rest, count)]
    ways += [({n for n in rest if n <= most}, alone) for most in (64, 512)]
    ways += [(set(rest), alone)]
    seen: list[Shrink] = []
    for some, family in ways:
        shrink = Shrink(frozenset(always | some), family)
        if shrink not in seen:
            seen.append(shrink)
            yield shrink


def _families(extents: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Each extent as a small multiple of another one, where it is one."""
    found: dict[int, tuple[int, int]] = {}
    for one in extents:
        bases = [base for base in found if one % base == 0 and one // base <= _MOST_RATIO]
        family, times = found[bases[-1]] if bases else (one, 1)
        found[one] = (family, times * (one // bases[-1])) if bases else (one, 1)
    return found


def _is_finite(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(tensor.isfinite().all())


def impurity(op: Callable, given: Arguments) -> str | None:
    """Why the op cannot be tried: it is random, writes to its arguments, or keeps a state; else None."""
    held = [one.clone() for one in tensors_of(given)]
    with quiet():
        before = torch.random.get_rng_state()
        first = [None if x is None else x.clone() for x in outputs_of(op(*given[0], **given[1]))]
        if not torch.equal(before, torch.random.get_rng_state()):
            return "it draws random numbers"
        if not all(map(torch.equal, held, tensors_of(given))):
            return "it changes its arguments"
        second = outputs_of(op(*given[0], **given[1]))
    same = all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(first, second, strict=True)
    )
    return None if same else "it gives another result when it is run again"
