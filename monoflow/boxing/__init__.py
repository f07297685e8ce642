"""Boxing: moving a tensor from one nd-SBP to another. Routes and prices are pure; collectives run them."""

from ..sbp.layout import reduce
from .collectives import AxisMove, Group, Tensors, Transport, apply_move, apply_route, run_collective
from .route import LinkCost, Move, Route, axis_price, collective_kind, fits_mesh, move_bytes, price, route
from .table import PriceTable

__all__ = [
    "AxisMove",
    "Group",
    "LinkCost",
    "Move",
    "PriceTable",
    "Route",
    "Tensors",
    "Transport",
    "apply_move",
    "apply_route",
    "axis_price",
    "collective_kind",
    "fits_mesh",
    "move_bytes",
    "price",
    "reduce",
    "route",
    "run_collective",
]
