"""Charts as SVG text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

COLOURS = ("#5b8bd0", "#8fc3a0", "#e0a458", "#c96f6f", "#9a7fc7", "#7fb8c4", "#b0a58f", "#d69ac0")
_WIDTH, _HEIGHT = 960, 260
_MOST_POINTS = 480
_BAR, _GAP, _LEFT = 22, 8, 110

Label = Callable[[float], str]


def legend(names: Sequence[str]) -> str:
    """The colours of a chart's parts, in order."""
    keys = (
        f"<span class='key' style='background:{_colour(i)}'></span>{escape(name)}"
        for i, name in enumerate(names)
    )
    return f"<p>{''.join(keys)}</p>"


def area(rows: Sequence[Sequence[float]], limit: float, label: Label) -> str:
    """Stacked areas: a row per moment, a column per part. A line marks the limit where it is near."""
    if not rows:
        return "<p>nothing runs</p>"
    shown = _sampled(rows)
    top = max(sum(row) for row in shown) or 1.0
    ceiling = max(top, limit) if limit <= 1.5 * top else top
    below = [0.0] * len(shown)
    shapes = []
    for part in range(len(rows[0])):
        above = [base + row[part] for base, row in zip(below, shown, strict=True)]
        edge = [*_points(above, ceiling), *reversed(_points(below, ceiling))]
        shapes.append(f"<polygon fill='{_colour(part)}' points='{' '.join(edge)}'/>")
        below = above
    marks = [_mark(top, ceiling, label(top), "#888")]
    if limit <= ceiling:
        marks.append(_mark(limit, ceiling, f"limit {label(limit)}", "#c62828"))
    return _svg(_HEIGHT, [*shapes, *marks])


def _sampled(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Few enough moments to draw; of each stretch the one at which most is held."""
    step = max(1, -(-len(rows) // _MOST_POINTS))
    return [max(rows[i : i + step], key=sum) for i in range(0, len(rows), step)]


def _points(values: Sequence[float], ceiling: float) -> list[str]:
    last = max(1, len(values) - 1)
    return [
        f"{_WIDTH * i / last:.1f},{_HEIGHT * (1 - value / ceiling):.1f}" for i, value in enumerate(values)
    ]


def _mark(value: float, ceiling: float, text: str, colour: str) -> str:
    y = _HEIGHT * (1 - value / ceiling)
    line = f"<line x1='0' x2='{_WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='{colour}' stroke-dasharray='4 4'/>"
    return (
        f"{line}<text x='4' y='{max(12.0, y - 4):.1f}' font-size='12' fill='{colour}'>{escape(text)}</text>"
    )


def bars(rows: Mapping[str, Sequence[float]], label: Label) -> str:
    """Stacked bars, one a row, with the total at its end."""
    most = max((sum(values) for values in rows.values()), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 90) / most
    shapes = []
    for number, (name, values) in enumerate(rows.items()):
        y, x = number * (_BAR + _GAP), float(_LEFT)
        shapes.append(_text(0, y, name))
        for part, value in enumerate(values):
            width = value * scale
            box = f"x='{x:.1f}' y='{y}' width='{width:.1f}' height='{_BAR}'"
            shapes.append(f"<rect {box} fill='{_colour(part)}'/>")
            x += width
        shapes.append(_text(x + 6, y, label(sum(values))))
    return _svg(len(rows) * (_BAR + _GAP), shapes)


def _text(x: float, y: float, text: str) -> str:
    return f"<text x='{x:.1f}' y='{y + _BAR - 6}' font-size='13' fill='currentColor'>{escape(text)}</text>"


def _colour(part: int) -> str:
    return COLOURS[part % len(COLOURS)]


def _svg(height: float, shapes: Sequence[str]) -> str:
    return f"<svg viewBox='0 0 {_WIDTH} {max(1, height)}' role='img'>{''.join(shapes)}</svg>"
