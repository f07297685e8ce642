"""Message passing over a sum of small tables: a lower bound of its minimum, and good choices.

Sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", 2006): messages move cost between the tables of pairs until the minima of the parts agree as
far as they can. Whatever the messages, the sum of the minima of the parts is a bound, at best that of the
linear program over the parts. Choices are read off on the way, one variable after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tables:
    """A cost function of choices: one vector per variable and a table for some pairs (first < second)."""

    unary: tuple[np.ndarray, ...]
    pairs: tuple[tuple[int, int, np.ndarray], ...]

    def cost(self, choices: Sequence[int]) -> float:
        """The cost of one choice for every variable."""
        single = sum(float(table[one]) for table, one in zip(self.unary, choices, strict=True))
        return single + sum(float(table[choices[a], choices[b]]) for a, b, table in self.pairs)

    def restricted(self, allowed: Sequence[np.ndarray]) -> Tables:
        """The same costs with only some of every variable's choices."""
        return Tables(
            tuple(table[kept] for table, kept in zip(self.unary, allowed, strict=True)),
            tuple((a, b, table[np.ix_(allowed[a], allowed[b])]) for a, b, table in self.pairs),
        )


class Messages:
    """The messages of one cost function; `sweep` improves them and yields bounds and choices."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.into = [
            [np.zeros(len(tables.unary[a])), np.zeros(len(tables.unary[b]))] for a, b, _ in tables.pairs
        ]
        self.edges: list[list[tuple[int, int, bool]]] = [[] for _ in tables.unary]  # (edge, side, is later)
        for number, (a, b, _) in enumerate(tables.pairs):
            self.edges[a].append((number, 0, True))
            self.edges[b].append((number, 1, False))
        self.share = [
            1.0 / max(sum(later for *_, later in own), sum(not later for *_, later in own), 1)
            for own in self.edges
        ]

    def sweep(self) -> Iterator[tuple[float, list[int]]]:
        """Forward and backward over all variables, again and again: (lower bound, choices) after each."""
        order = range(len(self.edges))
        while True:
            choices = self._decode()
            for one in order:
                self._send(one, True)
            yield sum(self._send(one, False) for one in reversed(order)), choices

    def _send(self, one: int, forwards: bool) -> float:
        """Sends a variable's messages in one direction; what its minima add to the bound."""
        own = self.tables.unary[one] + sum(self.into[edge][side] for edge, side, _ in self.edges[one])
        least = float(own.min())
        own -= least
        bound = least
        for edge, side, later in self.edges[one]:
            if later is not forwards:
                continue
            table = self.tables.pairs[edge][2]
            given = self.share[one] * own - self.into[edge][side]
            sent = (given[:, None] + table).min(0) if side == 0 else (table + given[None, :]).min(1)
            smallest = float(sent.min())
            bound += smallest
            self.into[edge][1 - side] = sent - smallest
        return bound

    def _decode(self) -> list[int]:
        """Chooses in order: what is chosen counts as it is, what is not by its messages."""
        choices = [0] * len(self.edges)
        for one, own in enumerate(self.edges):
            total = self.tables.unary[one].copy()
            for edge, side, later in own:
                if later:
                    total += self.into[edge][side]
                else:
                    first, _, table = self.tables.pairs[edge]
                    total += table[choices[first]]
            choices[one] = int(total.argmin())
        return choices
