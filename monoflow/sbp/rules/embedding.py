"""Look-ups: splits of the index and of the row dim, and of the vocabulary by shifting and masking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..layout import Split
from ..registry import Forms, OpRule, aten, own_op
from ..signature import LocalCall, LocalOp, OpCall, Signature, TensorShard
from .common import argument, named

Runs = Sequence[int]  # start and stop of every run, one after the other (schemas have no pairs)


@torch.library.custom_op("monoflow::check_index", mutates_args=())
def check_index(index: torch.Tensor, size: int) -> torch.Tensor:
    """A copy of `index`. Raises IndexError if an element lies outside [0, size) of the *whole* table."""
    if index.numel() and index.device.type == "cpu":
        low, high = (int(one) for one in torch.aminmax(index))
        if low < 0 or high >= size:
            raise IndexError(
                f"index {low if low < 0 else high} is out of range for a vocabulary of {size} rows"
            )
    elif index.numel():
        # A read-back would stall an accelerator's stream; its own assertion does not.
        held = ((index >= 0) & (index < size)).all()
        torch.ops.aten._assert_async.msg(held, f"an index is out of range for a vocabulary of {size} rows")
    return index.clone()


@check_index.register_fake
def _(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty_like(index)


def shard_index(index: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Where the elements of a global index are in a shard that holds the global `runs`; -1 elsewhere."""
    local = torch.full_like(index, -1)
    offset = 0
    for start, stop in zip(runs[::2], runs[1::2], strict=True):
        held = (index >= start) & (index < stop)
        local = torch.where(held, index - (start - offset), local)
        offset += stop - start
    return local


def embedding_shard(weight: torch.Tensor, index: torch.Tensor, size: int, runs: Runs | None) -> torch.Tensor:
    """Rows of a table of `size` rows, of which `weight` holds the global `runs`; zeros for other rows.

    `runs` None: all of them. The sum over all shards of a table is the look-up in the whole table.
    """
    index = check_index(index, size)
    if runs is None:
        return torch.ops.aten.embedding.default(weight, index)
    if weight.shape[0] == 0:
        return weight.new_zeros([*index.shape, weight.shape[1]])
    local = shard_index(index, runs)
    rows = torch.ops.aten.embedding.default(weight, local.clamp(min=0))
    return torch.where(
        (local >= 0).unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device)
    )


def embedding_backward_shard(
    grad: torch.Tensor, index: torch.Tensor, rows: int, runs: Runs, padding_idx: int, by_frequency: bool
) -> torch.Tensor:
    """Gradient of the `rows` rows of a table that a shard holds as global `runs`."""
    local = shard_index(index, runs)
    # Rows that are elsewhere, and the padding row, go to one row past the end, which is then dropped.
    local = torch.where((local < 0) | (index == padding_idx), torch.full_like(local, rows), local)
    backward = torch.ops.aten.embedding_dense_backward.default
    return backward(grad, local, rows + 1, rows, by_frequency).narrow(0, 0, rows)


def _runs(shard: TensorShard) -> tuple[int, ...] | None:
    """The shard's runs of dim 0, flat; None where it holds all of it."""
    if not shard.is_split(0):
        return None
    return tuple(edge for run in shard.runs(0) for edge in run)


_LETTERS = "abcefghijklm"  # for the index; v and d are the table's


def _signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    index = _LETTERS[: len(call.inputs[1].shape)]
    return named(
        call, axis_size, forms, {"weight": "vd", "indices": index}, [index + "d"], linear=[("weight",)]
    )


def _local(call: LocalCall) -> LocalOp:
    weight = call.inputs[0]
    return embedding_shard, (call.args[0], call.args[1], weight.meta.shape[0], _runs(weight)), {}


def _backward_signatures(call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
    index = _LETTERS[: len(call.inputs[1].shape)]
    groups = {"grad_output": index + "d", "indices": index}
    found = named(call, axis_size, forms, groups, ["vd"], linear=[("grad_output",)])
    if argument(call, "scale_grad_by_freq"):  # a row's frequency is counted over the whole index
        found = [one for one in found if not isinstance(one.inputs[1], Split)]
    return found


def _backward_local(call: LocalCall) -> LocalOp:
    output = call.outputs[0]
    assert output is not None
    runs = _runs(output)
    if runs is None:
        return own_op(call)
    padding, by_frequency = argument(call, "padding_idx"), argument(call, "scale_grad_by_freq")
    return embedding_backward_shard, (*call.args[:2], output.shape[0], runs, padding, by_frequency), {}


RULES: dict[Callable, OpRule] = {
    **dict.fromkeys(aten("embedding"), OpRule(_signatures, _local)),
    **dict.fromkeys(aten("embedding_dense_backward"), OpRule(_backward_signatures, _backward_local)),
}
