"""OneFlow's words for SBP, and rules for users' own operators: `flow.sbp`."""

from __future__ import annotations

from ..errors import LayoutError
from .layout import B, Broadcast, P, Partial, Split
from .reading import parse
from .user_rules import register, unregister

__all__ = ["broadcast", "parse", "partial_sum", "register", "split", "unregister"]

broadcast: Broadcast = B
partial_sum: Partial = P


def split(dim: int, blocks: int = 1) -> Split:
    """The split of `dim` over an axis (each of its equal blocks, if there are several).

    Raises:
        LayoutError: the dim is negative (a layout does not know how many dims its tensor has).
    """
    if dim < 0:
        raise LayoutError(f"split({dim}): count the dim from the front, a layout does not know the last one")
    return Split(dim, blocks)
