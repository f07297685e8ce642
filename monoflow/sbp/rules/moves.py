"""What the rules of ops that only move elements share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..layout import B, Partial, Sbp
from ..registry import Forms, LocalRule, OpRule, SignatureRule, aten, letters
from ..signature import LocalCall, OpCall, Signature, TensorMeta, TensorShard

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def wrap(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim + ndim if dim < 0 else dim


def names(ndim: int, fixed: Iterable[int] = ()) -> list[str]:
    """A letter for each dim, "_" for the fixed ones."""
    held = set(fixed)
    return ["_" if dim in held else ALPHABET[dim] for dim in range(ndim)]


def partial_ops(meta: TensorMeta) -> tuple[str, ...]:
    """The partials that a tensor can be in."""
    return ("sum",) if meta.dtype.is_complex else ("sum", "max", "min")


def partials(call: OpCall, inputs: Iterable[int] | None = None) -> list[Signature]:
    """Partial in, partial out: `inputs` (all when left out) are partial together, the others B.

    Right for an op that moves elements of these inputs and reads the others as indices.
    """
    moved = set(range(len(call.inputs)) if inputs is None else inputs)
    found = []
    for op in partial_ops(call.inputs[min(moved)]):
        ins: list[Sbp] = [Partial(op) if i in moved else B for i in range(len(call.inputs))]
        found.append(Signature(tuple(ins), tuple(B if one is None else Partial(op) for one in call.outputs)))
    return found


def moved(
    call: OpCall, axis_size: int, forms: Forms, ins: list[list[str]], outs: list[list[str]]
) -> list[Signature]:
    """Signatures of an op whose inputs all only move: letters say where every dim goes."""
    spec = ",".join(map("".join, ins)) + "->" + ",".join(map("".join, outs))
    return [*letters(call, axis_size, forms, spec), *partials(call)]


def unique(signatures: Iterable[Signature]) -> list[Signature]:
    """The signatures in order, each once."""
    return list(dict.fromkeys(signatures))


def held_before(shard: TensorShard, dim: int, index: int) -> int:
    """How many elements of `dim` with a global index below `index` the rank holds."""
    return sum(max(0, min(stop, index) - start) for start, stop in shard.runs(dim))


def output_shape(call: LocalCall, index: int = 0) -> list[int]:
    """The local shape of an output, as a size argument."""
    shard = call.outputs[index]
    assert shard is not None, f"output {index} of {call.op} is absent"
    return list(shard.shape)


def result_shape(call: OpCall) -> tuple[int, ...]:
    """The shape of the only output."""
    (result,) = call.outputs
    assert result is not None, call
    return result.shape


def rules(
    overloads: Sequence[str], signatures: SignatureRule, local: LocalRule | None = None
) -> dict[Callable, OpRule]:
    """One rule for several ops of torch.ops.aten."""
    return {op: OpRule(signatures, local) for op in aten(*overloads)}
