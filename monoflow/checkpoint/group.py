"""The ranks that save and load together, and how they come to the same end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError, FlowError

T = TypeVar("T")


class Group(Protocol):
    """Ranks that act together. `ranks` are numbers of the job; `rank` is this one's."""

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def rank(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, in the order of `ranks`. Collective."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process."""

    rank: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Joined:
    """Ranks of this job, over a Gloo group of their own, so that a thread of its own may use it.

    Collective over `ranks`.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.rank = dist.get_rank()
        self.group = gloo_group(self.ranks)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * len(self.ranks)
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} lost touch with the others of ranks {list(self.ranks)}: {error}"
            ) from error
        return found


def gloo_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new Gloo group of these ranks, of which all must call it."""
    # torch names a group that only its own ranks make by how many groups there are, and gives such a name
    # twice where some were destroyed in between.
    some = len(ranks) < dist.get_world_size()
    group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=some)
    assert isinstance(group, dist.ProcessGroup)
    return group


def group_of(ranks: Sequence[int]) -> Group:
    """The group of these ranks. Collective if there are several."""
    return Joined(ranks) if len(ranks) > 1 else Alone(ranks[0])


def together(group: Group, act: Callable[[], T]) -> list[T]:
    """What `act` returns on every rank. Collective; `act` must not be.

    Raises:
        CheckpointError: it failed on some rank; the same error on all of them.
    """
    failure: str | None = None
    result: Any = None
    cause: BaseException | None = None
    try:
        result = act()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure, cause = _text(error), error
    answers = group.gather((failure, result))
    failures = [
        (rank, text) for rank, (text, _) in zip(group.ranks, answers, strict=True) if text is not None
    ]
    if failures:
        texts = list(dict.fromkeys(text for _, text in failures))
        places = {text: [rank for rank, one in failures if one == text] for text in texts}
        several = len(group.ranks) > 1
        lines = [f"rank {', '.join(map(str, places[text]))}: {text}" if several else text for text in texts]
        raise CheckpointError("\n".join(lines)) from cause
    return [answer for _, answer in answers]


def first_does(group: Group, act: Callable[[], T]) -> T:
    """What `act` returns on the first rank, which alone calls it. Collective; errors as in `together`."""
    return together(group, lambda: act() if group.rank == group.ranks[0] else None)[0]  # type: ignore[return-value]


def _text(error: BaseException) -> str:
    if isinstance(error, FlowError):
        return str(error)
    return f"{type(error).__name__}: {error}"
