"""A line that says how far training is, how fast, and for how long compute waited for data."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..config import SETTINGS
from ..errors import FlowError
from ..log import IDLE, SOURCE, Wait, listen

if TYPE_CHECKING:
    from rich.live import Live

T = TypeVar("T")
Number = float | torch.Tensor

#: Seconds between two looks at a terminal, and how many of them a rate is the mean of.
_REFRESH, _WINDOW = 0.5, 10


class _Seen(NamedTuple):
    """What there was at a moment.

    Attributes:
        at, waited: seconds.
    """

    at: float
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    waited: float = 0.0


class Progress(Generic[T]):
    """See `progress`.

    Attributes:
        wait_seconds: for how long compute had nothing to do because its batch was not there.
    """

    def __init__(
        self,
        batches: Iterable[T],
        total: int | None = None,
        start: int = 0,
        every: float = 10.0,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batches, self._every, self._clock = batches, every, clock
        self._total = len(batches) if total is None and isinstance(batches, Sized) else total
        self._file = sys.stdout if file is None else file
        self._is_live = self._file.isatty()
        self._is_first = (dist.get_rank() if dist.is_initialized() else SETTINGS.rank) == 0
        self._is_shown = self._is_first and (self._is_live or every > 0)
        self._live: Live | None = None  # the line of a terminal, once there is one
        self._values: dict[str, Number] = {}
        self._steps, self._samples, self._tokens = start, 0, 0
        self._pending: Wait | None = None  # for a batch, before it is known whether compute waited too
        self._seen: deque[_Seen] = deque(maxlen=_WINDOW if self._is_live else 2)
        self.wait_seconds = 0.0

    def show(self, **values: Number) -> None:
        """Shows numbers in the line, such as a loss. A tensor is read when the line is renewed, not now.

        Args:
            values: numbers, or tensors of one element that every rank has whole.

        Raises:
            FlowError: a tensor that ranks hold parts of: to read it all of them would have to.
        """
        for name, value in values.items():
            if isinstance(value, DTensor):
                raise FlowError(
                    f"progress shows {name}, a global tensor of which ranks hold parts: give it a number "
                    f"that every rank has, such as {name}.full_tensor()"
                )
        self._values |= values

    def print(self, text: str) -> None:
        """Prints a line above it, on rank 0."""
        if self._is_first and self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        elif self._is_first:
            self._file.write(f"{text}\n")
            self._file.flush()

    def __iter__(self) -> Iterator[T]:
        stop = listen(self._wait)
        self._seen.append(self._now())
        try:
            for batch in self._batches:
                yield batch
                self._count(batch)
                if self._is_shown and self._is_due():
                    self._renew()
            if self._is_shown and self._steps != self._seen[-1].steps:
                self._renew()
        finally:  # without a look at what a step left: it may have failed
            stop()
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _wait(self, wait: Wait) -> None:
        """A batch was waited for, or a step begins: an engine had nothing to do before it."""
        pending, self._pending = self._pending, wait if wait.kind == SOURCE else None
        if pending is not None and wait.kind == IDLE:
            self.wait_seconds += max(0, min(pending.end, wait.end) - max(pending.start, wait.start)) / 1e9
        elif pending is not None:  # no step came between
            self.wait_seconds += (pending.end - pending.start) / 1e9

    def _count(self, batch: Any) -> None:
        self._steps += 1
        leaves = [one for one in pytree.tree_leaves(batch) if isinstance(one, torch.Tensor) and one.dim()]
        texts = [one for one in leaves if one.dim() == 2 and not one.dtype.is_floating_point]
        self._samples += leaves[0].shape[0] if leaves else 0
        self._tokens += texts[0].numel() if texts else 0

    def _now(self) -> _Seen:
        return _Seen(self._clock(), self._steps, self._samples, self._tokens, self.wait_seconds)

    def _is_due(self) -> bool:
        return self._clock() - self._seen[-1].at >= (_REFRESH if self._is_live else self._every)

    def _renew(self) -> None:
        self._seen.append(self._now())
        text = self.text()
        if not self._is_live:
            self._file.write(f"{text}\n")
            self._file.flush()
            return
        self._live = _renewed(self._live, self._file, text)

    def text(self) -> str:
        """The line: how far, what was shown, how fast, the share of waiting, the time that is left."""
        first, last = self._seen[0], self._seen[-1]
        seconds = max(last.at - first.at, 1e-9)
        of = "" if self._total is None else f"/{self._total}"
        parts = [f"step {last.steps}{of}"]
        parts += [f"{name} {float(value):.4f}" for name, value in self._values.items()]
        parts.append(f"{(last.steps - first.steps) / seconds:,.2f} steps/s")
        if last.tokens:
            parts.append(f"{(last.tokens - first.tokens) / seconds:,.0f} tokens/s")
        elif last.samples:
            parts.append(f"{(last.samples - first.samples) / seconds:,.0f} samples/s")
        parts.append(f"waits for data {min(1.0, (last.waited - first.waited) / seconds):.0%}")
        if self._total is not None and last.steps > first.steps and last.steps < self._total:
            left = (self._total - last.steps) * seconds / (last.steps - first.steps)
            parts.append(f"{_duration(left)} left")
        return "  ".join(parts)


def _renewed(live: Live | None, file: TextIO, text: str) -> Live:
    """The line of a terminal with another text. What is printed meanwhile goes above it."""
    # Only who sees it pays for the imports.
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    if live is None:
        live = Live(console=Console(file=file), auto_refresh=False)
        live.start()
    live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
    return live


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress(
    batches: Iterable[T], total: int | None = None, *, start: int = 0, every: float = 10.0
) -> Progress[T]:
    """Iterates batches and shows, on rank 0, how far training is and how fast.

        steps = flow.progress(flow.stream(dataset, 32))
        for batch in steps:
            steps.show(loss=train_step(batch))

    A terminal has one line that is renewed; elsewhere there is a plain line every few seconds and at the end.
    In it are steps and tokens (of the first two-dimensional integers of a batch) or samples per second, what
    `show` was given, and "waits for data": the share of the time in which no step ran and the next batch of
    `flow.stream` was not there.

    Args:
        batches: a stream, or an iterable of batches of one.
        total: how many steps there are; len(batches), if it has one, when left out.
        start: how many of them were done before, by a run that this one goes on from.
        every: seconds between plain lines; 0 for none.
    """
    return Progress(batches, total, start, every)
