"""Where ranks tell each other that one of them failed: a key in the store that they joined through."""

from __future__ import annotations

import contextlib

from torch.distributed import DistError
from torch.distributed.distributed_c10d import _get_default_store, _world


def number_of_groups() -> int:
    """How many process groups this job has made so far: the same on all ranks, and never again."""
    return _world.group_count


class StoreBoard:
    """A key of torch's store. None of this is needed to run a step, so that a store that is gone says enough.

    Args:
        number: of those that belong together, and of nobody else.
    """

    def __init__(self, number: int) -> None:
        self._key = f"monoflow/failed/{number}"
        self._store = _get_default_store()

    def tell(self, text: str) -> None:
        """Says to all ranks that this one failed, unless one has said so before."""
        with contextlib.suppress(DistError):
            if not self._store.check([self._key]):
                self._store.set(self._key, text)

    def heard(self) -> str | None:
        """What a rank said first, this one included; None as long as all is well."""
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None
        except DistError as error:
            return f"the rank that holds the store of the job has ended: {error}"
