"""A check before the run: a network finishes, whatever its timing, within the memory of its registers.

Actors of a marked graph that can fire stay so until they do, whatever the others do: a network that finishes
in one order of firing finishes in every one. So it is enough to go through a step once, without tensors. Of
many micro-batches a few are enough too: all that bounds how far actors run ahead of each other are the slots,
and after as many micro-batches as there are slots everything repeats.

Ranks that are not in a network count as there for every move. A network with one rank of every stage is
enough, then: ranks of the same stage run the same tasks on other shapes.
"""

from __future__ import annotations

from .bounds import Bounds
from .network import Actor, Edge, Marking, Network


def verify_live(network: Network) -> Network:
    """Returns the network if it can finish a step; asserts otherwise, naming those who wait in a circle."""
    most = max((cells.modulus for cells in network.cells), default=1)
    enough = min(network.micro_batches, 2 * most + 2)
    if enough < network.micro_batches:
        short = Network(network.programs, network.placement, network.one_order, enough, network.is_paced)
        marking = walked(short)
    else:
        marking = walked(network)
    if not marking.is_done:
        lines = [
            f"{actor.place}{marking.when(actor)} {marking.described(actor, edge)}"
            for actor, edge in circle(marking)
        ]
        raise AssertionError(
            "the program can deadlock, each of these waits for the next:\n" + "\n".join(lines)
        )
    return network


def needed_bytes(network: Network) -> dict[int, int]:
    """By rank, the most that a step holds in any timing: inputs, registers, what its moves work with."""
    found = {rank: Bounds(program, network.one_order) for rank, program in network.programs.items()}
    return {rank: one.outside + one.rest[0] for rank, one in found.items()}


def walked(network: Network) -> Marking:
    """The tokens after everything has fired that can."""
    marking = Marking(network)
    ready = marking.ready()
    while ready:
        actor = ready.pop()
        marking.begin(actor)
        ready += marking.end(actor)
    return marking


def circle(marking: Marking) -> list[tuple[Actor, Edge]]:
    """Actors of which each waits for the next, and the last for the first; if there are none, a chain."""
    waits = dict(marking.waiting())
    actor = next(iter(waits))
    path: list[tuple[Actor, Edge]] = []
    place: dict[int, int] = {}
    while actor.number not in place and waits.get(actor):
        place[actor.number] = len(path)
        edge = waits[actor][0]
        path.append((actor, edge))
        source = marking.source(edge)
        if source is None:
            return path
        actor = source
    return path[place.get(actor.number, 0) :]
