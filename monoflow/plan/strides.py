"""Which tensors of a rank are contiguous although the captured ones are not, or the other way round.

What a move makes is contiguous, whatever was captured. Views of it then lie otherwise in memory than those
that were captured, until an op makes a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils import _pytree as pytree

from ..sbp.strides import RESHAPES
from .schedule import Box, LaidOut, Op

aten = torch.ops.aten

#: Views that turn what is contiguous into what is not, and back.
_TURNS = {aten.t.default, aten.transpose.int, aten.permute.default}
#: Views that copy what they cannot see through.
_RESHAPES = {*RESHAPES, aten.reshape.default}


class Strides:
    """Follows a schedule item by item."""

    def __init__(self) -> None:
        self._here: dict[LaidOut, bool] = {}  # of those that are not as they were captured

    def is_contiguous(self, value: LaidOut) -> bool:
        """Whether a value is contiguous on a rank."""
        found = self._here.get(value)
        return captured_contiguous(value) if found is None else found

    def is_copied(self, op: Op) -> bool:
        """Whether a view has to copy here: a reshape of what is not contiguous any more."""
        return op.node.target in _RESHAPES and self._here.get(op.inputs[0]) is False

    def note(self, item: Op | Box, shared: Mapping[LaidOut, LaidOut]) -> None:
        """Notes how the results of an item lie.

        Args:
            shared: those of its results that are memory of an input -> that input.
        """
        for value in item.outputs:
            source = shared.get(value)
            if source is not None:
                if source not in self._here:
                    continue
                is_turned = isinstance(item, Op) and item.node.target in _TURNS
                here = not captured_contiguous(value) if is_turned else self._here[source]
            elif isinstance(item, Box) or item.node.target in _RESHAPES:
                here = True
            else:
                continue
            if here != captured_contiguous(value):
                self._here[value] = here


def captured_contiguous(value: LaidOut) -> bool:
    """Whether the captured tensor was contiguous."""
    return pytree.tree_leaves(value.node.meta["val"])[value.index].is_contiguous()
