"""Streams: the lanes of an accelerator, and what orders work and memory between them.

One thread hands the work out in program order and does not wait for it. What is computed goes into the
caller's stream; moves go into another: one of each channel, or one of all where they have one order on every
rank, as collectives of several communicators need that a device may not run all at once. A kernel runs when
those before it in its stream are done. Between streams the tokens of the network are what orders (`network`):
a token that crosses lanes stands for the firing that gave it, and who takes it waits, on the device, for an
event of that firing. So a consumer waits for what fills its register, a writer for those who read the slot
before it, an update for the readers of what it overwrites, and compute and collectives for each other's pace.

Memory goes back by the same events. An allocator hands freed memory to the next kernel of the stream that it
was allocated in, which other streams may still read. So a tensor that was used in another stream than its own
is held until its own stream is known to come after that use: because it has waited for it, or for something
later, by a token. `record_stream` would hold it until the host happens to see that it is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from .channels import COMPUTE, HOST
from .network import Actor, Member, Network

Tensor = torch.Tensor


class Stream(Protocol):
    """What `torch.Stream` can do, as far as it is used. Within it, work goes there."""

    def record_event(self) -> Any:
        """An event that is over when all that was put in so far is."""
        ...

    def wait_event(self, event: Any) -> None:
        """What is put in from now on waits for an event."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...


class Device(Protocol):
    """Where streams come from."""

    def current(self) -> Stream:
        """The stream that the caller puts its work in."""
        ...

    def make(self) -> Stream:
        """Another stream."""
        ...


class Accelerator:
    """The accelerator that torch uses."""

    def current(self) -> Stream:
        """See `Device`."""
        return torch.accelerator.current_stream()

    def make(self) -> Stream:
        """See `Device`."""
        return torch.Stream(torch.accelerator.current_stream().device)


class _Stamp(NamedTuple):
    """A firing, for those who wait for it.

    Attributes:
        known: by lane, how many of its firings come before whatever waits for this one.
    """

    lane: int
    event: Any
    known: tuple[int, ...]


class Streams:
    """The lanes of one engine on an accelerator; lane 0 is the stream of whoever calls.

    Args:
        device: where streams come from.
    """

    def __init__(self, network: Network, device: Device) -> None:
        self._network, self._device = network, device
        channels = dict.fromkeys(one.lane for one in network.actors if one.lane not in (COMPUTE, HOST))
        numbers = {channel: 1 if network.one_order else number for number, channel in enumerate(channels, 1)}
        self._lane_of = [numbers.get(one.lane, 0) for one in network.actors]
        others = [device.make() for _ in set(numbers.values())]
        self._streams: list[Stream] = [device.current(), *others]
        size = len(self._streams)
        #: By lane: how many firings of each lane come before what is put in from now on; of its own, all.
        self._known = [[0] * size for _ in range(size)]
        #: By lane: (lane, firing, tensor) of tensors of its own that other lanes used.
        self._used: list[list[tuple[int, int, Tensor]]] = [[] for _ in range(size)]
        self._owner: list[int] = []  # by slot, the lane that the memory of what is in it belongs to
        self._foreign: dict[int, int] = {}  # by memory of another lane that an actor reads, that lane
        self._takes = [[edge for edge in one.takes if self._crosses(edge)] for one in network.actors]
        self._gives = [self._given_after(one) for one in network.actors]
        self._gives_last = [
            [gift for gift in one.gives_last if self._crosses(gift[0])] for one in network.actors
        ]
        self._tokens: dict[int, deque[_Stamp | None]] = {}  # by edge that crosses lanes
        self._latest: dict[int, _Stamp] = {}  # by actor

    def _crosses(self, edge: int) -> bool:
        found = self._network.edges[edge]
        return found.source is not None and self._lane_of[found.source] != self._lane_of[found.target]

    def _given_after(self, actor: Actor) -> list[tuple[int, int]]:
        """(edge, number): where a firing gives a token if so many came before it."""
        every = [(edge, 0) for edge, _ in actor.gives]
        return [(edge, late) for edge, late in every + actor.gives_late if self._crosses(edge)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within, a step is put in: after what the caller put in before, and before what it puts in then."""
        self._streams[0] = self._device.current()
        tokens = self._network.tokens
        self._tokens = {edge: deque([None] * tokens[edge]) for edges in self._takes for edge in edges}
        self._owner = [0] * len(self._network.reads)
        others = range(1, len(self._streams))
        self._meet([0], others)
        try:
            yield
        finally:  # after a failure too: memory that is let go then is in use as well
            self._meet(others, [0])
            self._meet([0], others)
            self._tokens, self._latest = {}, {}

    def _meet(self, earlier: Sequence[int], later: Sequence[int]) -> None:
        """Lanes wait for all that is in others."""
        for lane in earlier:
            stamp = self._stamp(lane)
            for other in later:
                self._wait(other, stamp)

    @contextmanager
    def lane(self, actor: Actor, time: int, inputs: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Within, an actor that takes its tokens works on its inputs."""
        lane = self._lane_of[actor.number]
        for edge in self._takes[actor.number]:
            tokens = self._tokens[edge]
            # Without a token: it was given when its source was let off its other firings.
            source = self._network.edges[edge].source
            stamp = tokens.popleft() if tokens else self._latest.get(-1 if source is None else source)
            if stamp is not None:
                self._wait(lane, stamp)
        number, self._foreign = self._known[lane][lane] + 1, {}
        for member, tensors in zip(actor.members, inputs, strict=True):
            for cell, tensor in zip(_slots(actor, member, time), tensors, strict=True):
                owner = self._owner[cell]
                if owner != lane:
                    self._used[owner].append((lane, number, tensor))
                    self._foreign[_memory(tensor)] = owner
        with self._streams[lane] if lane else nullcontext():
            yield

    def made(self, actor: Actor, time: int, results: Sequence[Sequence[Tensor]]) -> None:
        """An actor's work is put in: notes whose memory it wrote to, and gives its tokens."""
        number = actor.number
        lane = self._lane_of[number]
        for member, tensors in zip(actor.members, results, strict=True):
            for (base, modulus), tensor in zip(member.targets, tensors, strict=False):
                owner = self._foreign.get(_memory(tensor), lane) if self._foreign else lane
                self._owner[base + time % modulus] = owner
        gives, gives_last = self._gives[number], self._gives_last[number]
        if not gives and not gives_last:
            self._known[lane][lane] += 1
            return
        stamp = self._latest[number] = self._stamp(lane)
        for edge, late in gives:
            if time >= late:
                self._tokens[edge].append(stamp)
        if time + 1 == actor.fires:
            for edge, tokens in gives_last:
                self._tokens[edge].extend([stamp] * tokens)

    def _stamp(self, lane: int) -> _Stamp:
        """Of all that is in a lane."""
        self._known[lane][lane] += 1
        return _Stamp(lane, self._streams[lane].record_event(), tuple(self._known[lane]))

    def _wait(self, lane: int, stamp: _Stamp) -> None:
        """Lets a lane wait for a firing, unless it does; lets go what other lanes are done with then."""
        known = self._known[lane]
        if known[stamp.lane] >= stamp.known[stamp.lane]:
            return
        self._streams[lane].wait_event(stamp.event)
        known[:] = map(max, known, stamp.known)
        self._used[lane] = [one for one in self._used[lane] if known[one[0]] < one[1]]


def _slots(actor: Actor, member: Member, time: int) -> Iterator[int]:
    """Where the inputs of a member come from, as `Registers.read` has them."""
    if actor.folds and time:
        yield member.targets[0].base
    for base, modulus in member.sources:
        yield base + time % modulus


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
