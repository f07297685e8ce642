"""Plain tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def table(title: str, *columns: str, left: Sequence[int] = (0,)) -> Table:
    """A table without lines.

    Args:
        title: of the first column.
        left: numbers of the columns that are aligned to the left.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate((title, *columns)):
        made.add_column(name, justify="left" if number in left else "right")
    return made
