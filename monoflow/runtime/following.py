"""Two steps on their way: how far the first one is, and what that lets the second one do.

`openings` says where, from the programs alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from .network import Actor, Network
from .openings import openings


class Following:
    """The openings of every rank that a network hosts, by actor."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.openings = {rank: openings(one, network.one_order) for rank, one in network.programs.items()}
        #: By rank and place, the actors that have a task there.
        self.at: dict[int, dict[int, list[int]]] = {rank: {} for rank in network.programs}
        for actor in network.actors:
            for member in actor.members:
                place = self.openings[member.rank].tasks[member.task.index]
                self.at[member.rank].setdefault(place, []).append(actor.number)

    def closed(self, places: Mapping[int, int]) -> list[int]:
        """The actors that may not fire yet, once for every rank on which they may not.

        Args:
            places: by rank, how far the step before has got.
        """
        return [
            number
            for rank, found in self.at.items()
            for place, actors in found.items()
            if place > places[rank]
            for number in actors
        ]


class Progress:
    """How far a step has got in program order, on every rank.

    Attributes:
        places: by rank, the first task that is not done; one more than the tasks once the step is over.
    """

    def __init__(self, following: Following) -> None:
        self.following = following
        self.places = dict.fromkeys(following.at, 0)
        self._done = {rank: set[int]() for rank in following.at}

    def note(self, actor: Actor) -> list[int]:
        """An actor has done all of its step. Returns the actors of the next one that this opens."""
        opened: list[int] = []
        for member in actor.members:
            rank, place = member.rank, member.task.index
            done = self._done[rank]
            if place != self.places[rank]:
                done.add(place)
                continue
            at = self.following.at[rank]
            place += 1
            opened += at.get(place, ())
            while place in done:
                done.remove(place)
                place += 1
                opened += at.get(place, ())
            self.places[rank] = place
        return opened

    def end(self) -> list[int]:
        """The step is over. Returns the actors of the next one that this opens."""
        opened: list[int] = []
        for rank, program in self.following.network.programs.items():
            over = len(program.tasks) + 1
            opened += [
                number
                for place, actors in self.following.at[rank].items()
                if self.places[rank] < place <= over
                for number in actors
            ]
            self.places[rank] = over
        return opened

    @property
    def takes_inputs(self) -> bool:
        """Whether the next step may take its inputs."""
        openings = self.following.openings
        return all(place >= openings[rank].inputs for rank, place in self.places.items())
