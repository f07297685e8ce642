"""Into live tensors: compare with what a source has, verify it, then copy.

Nothing is written to a live tensor before every byte that any rank will read has been checked: names, shapes
and file sizes first, then the checksums, of which each rank takes its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import DamagedError
from .arrange import PIECE
from .boxes import cut, num_elements, whole_box, within
from .group import Group, together
from .held import Held, Holders, held, memory_of
from .read import Source, Wanted


def misfits(source: Source, wanted: Mapping[str, Wanted], *, may_cast: bool = False) -> list[str]:
    """Every way in which tensors that are wanted are not those of a source.

    Args:
        may_cast: whether a floating dtype may differ from a floating dtype.
    """
    found = []
    have = source.tensors
    for name, want in wanted.items():
        got = have.get(name)
        if got is None:
            found.append(f"{name} {_meta(want)} is not in it")
        elif tuple(got.shape) != tuple(want.shape) or not _same_kind(got.dtype, want.dtype, may_cast):
            found.append(f"{name} is {_meta(got)} in it, {_meta(want)} here")
    return found


def _same_kind(got: torch.dtype, want: torch.dtype, may_cast: bool) -> bool:
    return got == want or (may_cast and got.is_floating_point and want.is_floating_point)


def _meta(one: Wanted) -> str:
    return f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}"


def check(source: Source, names: Sequence[str], group: Group) -> None:
    """Verifies the stored bytes of some tensors, each rank its share. Collective.

    Raises:
        DamagedError: something is wrong; everything that is, the same on all ranks.
    """
    share = list(group.ranks).index(group.rank)
    found = together(group, lambda: source.faults(names, share, len(group.ranks)))
    if faults := [one for some in found for one in some]:
        raise DamagedError("\n".join(faults))


def fill(source: Source, tensors: Mapping[str, torch.Tensor], group: Group) -> None:
    """Copies what this rank holds of some tensors into their memory, a piece at a time.

    Args:
        tensors: by name in the source: DTensors, or plain tensors that are whole on every rank.
    """
    holders = Holders()
    for name, tensor in tensors.items():
        one: Held = held(tensor, group.ranks)
        for part in holders.parts(name, one.shape, one.layout, group.rank):
            for box in cut(part.box, PIECE // one.dtype.itemsize):
                memory_of(one.local, part, box).copy_(source.read(name, box))


def whole(source: Source, name: str) -> torch.Tensor:
    """A whole tensor, on the CPU."""
    meta = source.tensors[name]
    made = torch.empty(meta.shape, dtype=meta.dtype)
    box = whole_box(meta.shape)
    if num_elements(box):
        for part in cut(box, PIECE // meta.dtype.itemsize):
            made[within(part, box)] = source.read(name, part)
    return made
