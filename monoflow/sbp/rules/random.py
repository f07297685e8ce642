"""Rules of the counter-based random ops: every split of the output, drawn at the shard's own indices."""

from __future__ import annotations

from collections.abc import Callable

from ..layout import B, S
from ..ops.random import bits, normal, pack_runs, uniform
from ..registry import Forms, OpRule
from ..signature import LocalCall, LocalOp, OpCall, Signature


def _signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    (result,) = call.outputs
    assert result is not None, call
    return [Signature((B,), (S(dim),)) for dim in range(len(result.shape))]


def _local(call: LocalCall) -> LocalOp:
    (result,) = call.outputs
    assert result is not None, call.op
    key, op, shape, *_ = call.args
    dims = range(len(shape))
    if not any(result.is_split(dim) for dim in dims):
        return call.op, call.args, call.kwargs
    assert call.kwargs.get("runs") is None, f"{call.op} is a shard already"
    runs = pack_runs([result.runs(dim) for dim in dims])
    kwargs = call.kwargs | {"global_shape": list(shape), "runs": runs}
    return call.op, (key, op, list(result.shape)), kwargs


RULES: dict[Callable, OpRule] = {op: OpRule(_signatures, _local) for op in (uniform, normal, bits)}
