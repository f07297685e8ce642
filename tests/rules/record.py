"""Calls of ATen ops with real arguments, as torch's own samples make them: forward, backward, undecomposed.

torch's `op_db` holds sample inputs for every op. A sample is run twice: with autograd, so that the backward
ops are met too, and in inference mode, where an op that is made of others is met as itself. A dispatch mode
keeps every call; an in-place op stands for its functional form, as in a captured graph.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: Calls with a larger tensor are left out: they say no more than small ones.
MAX_ELEMENTS = 20_000

#: Samples that are skipped with their reason: they are of no op that a graph can hold.
_SKIPPED = {
    "jiterator": "compiles CUDA source",
    "sparse": "sparse tensors are refused at capture",
    "uniform": "draws",
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One call of an op: the overload and its real arguments, whole tensors that nothing else holds."""

    op: Callable
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Recorder(TorchDispatchMode):
    """Keeps the first calls of every overload that is wanted, each with other shapes or numbers."""

    def __init__(self, wanted: Callable[[Callable], bool], limit: int) -> None:
        super().__init__()
        self.samples: dict[Callable, dict[Any, Sample]] = {}
        self._wanted, self._limit = wanted, limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        op = functional(func)
        if op is not None and self._wanted(op):
            self._keep(op, args, kwargs)
        return func(*args, **kwargs)

    def _keep(self, op: Callable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        known = self.samples.setdefault(op, {})
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(known) >= self._limit or any(
            _is_unusual(one) or one.numel() > MAX_ELEMENTS for one in tensors
        ):
            return
        key = repr(pytree.tree_map_only(torch.Tensor, _look, (args, dict(kwargs))))
        if key not in known:
            held = pytree.tree_map_only(torch.Tensor, _copied, (args, dict(kwargs)))
            known[key] = Sample(op, *held)


def recorded(
    wanted: Callable[[Callable], bool],
    *,
    limit: int,
    infos: Iterable[OpInfo] = op_db,
    samples_each: int | None = None,
) -> dict[Callable, list[Sample]]:
    """The calls that the samples of `infos` make of every overload that is `wanted`.

    Args:
        limit: of the calls kept of one overload.
        samples_each: of the samples run of one op; all when None.
    """
    recorder = Recorder(wanted, limit)
    for info in infos:
        torch.manual_seed(0)
        random.seed(0)
        if any(name in info.name for name in _SKIPPED):
            continue
        for index, sample in enumerate(_samples(info)):
            if index == samples_each:
                break
            _run(info, sample, recorder)
    return {op: list(calls.values()) for op, calls in recorder.samples.items()}


def functional(func: Callable) -> Callable | None:
    """The overload that a captured graph has in place of `func`; None where it has none."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return func
    packet = func._schema.name.removeprefix("aten::")
    if not packet.endswith("_") or packet.endswith("__"):
        return None
    other = getattr(torch.ops.aten, packet[:-1], None)
    return getattr(other, func._overloadname, None)


def _samples(info: OpInfo) -> Iterator[SampleInput]:
    floats = torch.float64 in info.dtypes
    dtype = torch.float64 if floats else torch.complex128 if torch.complex128 in info.dtypes else torch.int64
    if dtype not in info.dtypes:
        return
    yield from info.sample_inputs(
        "cpu", dtype, requires_grad=info.supports_autograd and dtype.is_floating_point
    )
    if floats and torch.int64 in info.dtypes and not info.supports_autograd:
        yield from info.sample_inputs("cpu", torch.int64, requires_grad=False)


def _run(info: OpInfo, sample: SampleInput, recorder: Recorder) -> None:
    """Runs one sample under the recorder. What a sample of torch's cannot do here is no fact about rules."""
    arguments = (sample.input, *sample.args), sample.kwargs
    try:
        with recorder:
            out = info.op(*arguments[0], **arguments[1])
            _backward(out, arguments)
        with torch.inference_mode(), recorder:
            info.op(*arguments[0], **arguments[1])
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return


def _backward(out: Any, arguments: Any) -> None:
    outs = [one for one in _tensors(out) if one.requires_grad]
    ins = [one for one in _tensors(arguments) if one.requires_grad]
    if outs and ins:
        gradients = [torch.ones_like(one) * 0.5 + torch.rand_like(one) for one in outs]
        torch.autograd.grad(outs, ins, gradients, allow_unused=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_unusual(tensor: torch.Tensor) -> bool:
    return tensor.layout != torch.strided or tensor.is_quantized or type(tensor) is not torch.Tensor


def _look(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone()
