"""How often to save."""

from __future__ import annotations

import re

from ..errors import CheckpointError

_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600}


class Every:
    """How often to save: `steps`, or `seconds`, or neither.

    Args:
        name: what the argument is called, in the error.
    """

    def __init__(self, every: int | str | None, name: str = "every") -> None:
        self.steps = self.seconds = None
        found = (
            re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|h)\s*", every) if isinstance(every, str) else None
        )
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            self.steps = every
        elif found is not None and float(found[1]) > 0:
            self.seconds = float(found[1]) * _SECONDS[found[2]]
        elif every is not None:
            raise CheckpointError(f'{name}={every!r} is neither a number of steps nor a time such as "10min"')
