"""Steps that do not run: who plans for other devices takes their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

from ..mesh import Placement

#: Takes a call of a step: (step, args, kwargs).
Take = Callable[[Any, Sequence[Any], Mapping[str, Any]], NoReturn]


class Interception(NamedTuple):
    """Devices that steps are to believe in, and who takes their calls."""

    placement: Placement
    take: Take


_INTERCEPTION: ContextVar[Interception | None] = ContextVar("who takes calls of steps", default=None)


def interception() -> Interception | None:
    """Who takes calls of steps now, if somebody does."""
    return _INTERCEPTION.get()


@contextmanager
def intercept(placement: Placement, take: Take) -> Iterator[None]:
    """Within: steps are on a placement and do not run: `take(step, args, kwargs)` gets their calls."""
    token = _INTERCEPTION.set(Interception(placement, take))
    try:
        yield
    finally:
        _INTERCEPTION.reset(token)
