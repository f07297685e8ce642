"""The price of every move between a set of nd-SBPs at once: all pairs of shortest routes.

`route` searches one pair; a planner asks for hundreds of pairs of the same tensor. The single-axis moves are
the same here, and so are the prices; where no dim is even, a detour through some third layout may be cheaper.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..sbp.layout import B, NdSbp, Partial, Sbp, Split
from ..sbp.signature import TensorMeta
from .route import LinkCost, Move, carriers, fits_mesh, seconds_of, single_moves


class PriceTable:
    """Seconds from any to any of some layouts of one tensor; infinite where there is no way.

    Args:
        copying: seconds that a move copies for, beside what it sends; nothing when left out.
    """

    def __init__(
        self,
        layouts: Iterable[NdSbp],
        meta: TensorMeta,
        mesh: Sequence[int],
        links: Sequence[LinkCost],
        copying: Callable[[Move], float] | None = None,
    ) -> None:
        self.layouts = tuple(dict.fromkeys(layouts))
        size = tuple(mesh)
        carrier = carriers(meta, size)
        on_axis: list[dict[Sbp, None]] = [
            dict.fromkeys([B, *carrier, *(one[axis] for one in self.layouts)]) for axis in range(len(size))
        ]
        states = [one for one in itertools.product(*on_axis) if fits_mesh(meta.shape, one, size)]
        self.position = {one: number for number, one in enumerate(states)}
        table = np.full((len(states), len(states)), np.inf)
        np.fill_diagonal(table, 0.0)
        for state in states:
            for move in single_moves(state, on_axis, meta, size):
                pads = isinstance(state[move.axis], Split) and isinstance(move.target[move.axis], Partial)
                end = self.position.get(move.target)
                if end is None or pads:  # full-size zeros instead of a shard: never worth it
                    continue
                price = seconds_of(move, meta, links)
                if copying is not None:
                    price += copying(move)
                table[self.position[state], end] = price
        for middle in range(len(states)):
            np.minimum(table, table[:, middle, None] + table[None, middle, :], out=table)
        self.table = table

    def between(self, sources: Sequence[NdSbp], targets: Sequence[NdSbp]) -> np.ndarray:
        """The prices from each of `sources` to each of `targets`, all of them among the layouts."""
        rows = [self.position[one] for one in sources]
        columns = [self.position[one] for one in targets]
        return self.table[np.ix_(rows, columns)]
