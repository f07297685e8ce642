"""Boxing: moving a tensor from one nd-SBP to another. Routes and prices are pure; collectives run them."""

from .collectives import AxisMove, Group, Transport, apply_move, apply_route, run_collective
from .route import LinkCost, Move, Route, axis_price, collective_kind, fits_mesh, move_bytes, price, route

__all__ = [
    "AxisMove",
    "Group",
    "LinkCost",
    "Move",
    "Route",
    "Transport",
    "apply_move",
    "apply_route",
    "axis_price",
    "collective_kind",
    "fits_mesh",
    "move_bytes",
    "price",
    "route",
    "run_collective",
]
