"""Charts as SVG text. Colours are classes, so that a page's style says what they are, by day and by night."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from .timescale import Timescale

_WIDTH, _HEIGHT = 960, 260
_LEFT, _RIGHT = 86, 14  # beside a chart over time
_LANE, _GAP, _BAR = 34, 10, 22
_NAMES, _TOTALS = 110, 120  # beside bars

Label = Callable[[float], str]


def legend(names: Sequence[str], prefix: str = "c") -> str:
    """The colours of a chart's parts, in order."""
    keys = (
        f"<span class='key'><i class='{prefix}{i}'></i>{escape(name)}</span>" for i, name in enumerate(names)
    )
    return f"<p>{''.join(keys)}</p>"


def areas(
    scale: Timescale,
    rows: Sequence[Sequence[float]],
    parts: Sequence[str],
    names: Sequence[str],
    limit: float | None,
    label: Label,
) -> str:
    """Stacked areas over time, with the highest point, and the limit where it is near.

    Args:
        rows: per item, the amount of every part.
        parts: what the parts are called.
        names: what the items are called.
        limit: what should not be crossed, if anything.
    """
    shown = scale.highest([sum(row) for row in rows])
    peak = max(range(len(rows)), key=lambda item: sum(rows[item]))
    top = sum(rows[peak]) or 1.0
    ceiling = (max(top, limit) if limit is not None and limit <= 1.5 * top else top) * 1.08
    shapes = list(_grid(ceiling, label))
    below = [0.0] * len(shown)
    for part in range(len(parts)):
        above = [base + rows[item][part] for base, item in zip(below, shown, strict=True)]
        edge = [*_steps(scale, above, ceiling), *reversed(list(_steps(scale, below, ceiling)))]
        shapes.append(f"<polygon class='c{part}' points='{' '.join(edge)}'/>")
        below = above
    if limit is not None and limit <= ceiling:
        shapes.append(_line(limit, ceiling, f"limit {label(limit)}", "over"))
    x = _x(scale, scale.middle(peak))
    y = _HEIGHT * (1 - top / ceiling)
    text = escape(f"peak {label(top)} at {names[peak]}")
    anchor = "end" if x > _WIDTH / 2 else "start"
    shift = -8 if anchor == "end" else 8
    shapes.append(f"<circle class='mark' cx='{x:.1f}' cy='{y:.1f}' r='4'/>")
    shapes.append(f"<text x='{x + shift:.1f}' y='{y + 5:.1f}' text-anchor='{anchor}'>{text}</text>")
    for column, item in enumerate(shown):
        amounts = (f"{part}: {label(one)}" for part, one in zip(parts, rows[item], strict=True) if one)
        shapes.append(_hover(scale, column, 0, _HEIGHT, [names[item], label(sum(rows[item])), *amounts]))
    return _svg(_HEIGHT + 8, shapes, "memory over time")


def lanes(
    scale: Timescale, busy: Mapping[str, Sequence[tuple[int, float]]], names: Sequence[str], label: Label
) -> str:
    """How busy every lane is over time, one below the other.

    Args:
        busy: lane -> (item, seconds) of all that runs in it.
        names: what the items are called.
    """
    shapes: list[str] = []
    for number, (lane, items) in enumerate(busy.items()):
        top = number * (_LANE + _GAP)
        share, longest = scale.busy(items)
        edge = [f"{_LEFT},{top + _LANE}"]
        for column, part in enumerate(share):
            y = f"{top + _LANE * (1 - part):.1f}"
            edge += [f"{_x(scale, column):.1f},{y}", f"{_x(scale, column + 1):.1f},{y}"]
        edge.append(f"{_WIDTH - _RIGHT},{top + _LANE}")
        shapes.append(f"<rect class='lane' x='{_LEFT}' y='{top}' width='{_span()}' height='{_LANE}'/>")
        shapes.append(f"<polygon class='l{number}' points='{' '.join(edge)}'/>")
        shapes.append(_text(0, top + 15, lane) + _text(0, top + 30, label(sum(s for _, s in items)), "dim"))
        for column, item in longest.items():
            said = [f"{lane}: {100 * share[column]:.0f} % busy", names[item]]
            shapes.append(_hover(scale, column, top, _LANE, said))
    height = len(busy) * (_LANE + _GAP)
    for part in range(5):
        x, anchor = _LEFT + _span() * part / 4, ("start", "middle", "middle", "middle", "end")[part]
        said = escape(label(scale.total * part / 4))
        shapes.append(f"<text class='dim' x='{x:.0f}' y='{height + 10}' text-anchor='{anchor}'>{said}</text>")
    return _svg(height + 16, shapes, "what runs over time")


def strip(scale: Timescale, kinds: Sequence[int], names: Sequence[str]) -> str:
    """A line of colours: of which kind most of every moment's items are.

    Args:
        kinds: per item, the number of its kind.
        names: what the kinds are called.
    """
    shapes = []
    for kind, start, stop in scale.runs(kinds):
        x, width = _x(scale, start), _x(scale, stop) - _x(scale, start)
        title = f"<title>{escape(names[kind])}</title>"
        shapes.append(
            f"<rect class='f{kind}' x='{x:.1f}' y='0' width='{width:.1f}' height='14'>{title}</rect>"
        )
    return _svg(18, shapes, "phases over time")


def bars(rows: Mapping[str, Sequence[float]], parts: Sequence[str], label: Label) -> str:
    """Stacked bars, one a row, with the total at its end.

    Args:
        parts: what the parts of a bar are called.
    """
    most = max((sum(values) for values in rows.values()), default=0.0) or 1.0
    scale = (_WIDTH - _NAMES - _TOTALS) / most
    shapes = []
    for number, (name, values) in enumerate(rows.items()):
        y, x = number * (_BAR + _GAP), float(_NAMES)
        shapes.append(_text(0, y + 16, name))
        for part, (value, called) in enumerate(zip(values, parts, strict=True)):
            width = value * scale
            title = f"<title>{escape(f'{called}: {label(value)}')}</title>"
            box = f"x='{x:.1f}' y='{y}' width='{width:.1f}' height='{_BAR}'"
            shapes.append(f"<rect class='l{part}' {box}>{title}</rect>")
            x += width
        shapes.append(_text(x + 6, y + 16, label(sum(values))))
    return _svg(len(rows) * (_BAR + _GAP), shapes, "amounts")


# --- pieces --------------------------------------------------------------------------------------------


def _span() -> int:
    return _WIDTH - _LEFT - _RIGHT


def _x(scale: Timescale, column: float) -> float:
    return _LEFT + _span() * column / scale.num_columns


def _steps(scale: Timescale, values: Sequence[float], ceiling: float) -> Iterator[str]:
    for column, value in enumerate(values):
        y = f"{_HEIGHT * (1 - value / ceiling):.1f}"
        yield f"{_x(scale, column):.1f},{y}"
        yield f"{_x(scale, column + 1):.1f},{y}"


def _grid(ceiling: float, label: Label) -> Iterator[str]:
    for part in range(5):
        value = ceiling / 1.08 * part / 4
        y = _HEIGHT * (1 - value / ceiling)
        yield f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
        said = escape(label(value))
        yield f"<text class='dim' x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{said}</text>"


def _line(value: float, ceiling: float, text: str, kind: str) -> str:
    y = _HEIGHT * (1 - value / ceiling)
    line = f"<line class='{kind}' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
    return f"{line}<text class='{kind}' x='{_LEFT + 6}' y='{max(12.0, y - 5):.1f}'>{escape(text)}</text>"


def _hover(scale: Timescale, column: int, y: float, height: float, lines: Iterable[str]) -> str:
    width = _x(scale, 1) - _x(scale, 0)
    box = f"x='{_x(scale, column):.1f}' y='{y}' width='{width:.1f}' height='{height}'"
    return f"<rect class='hover' {box}><title>{escape(chr(10).join(lines))}</title></rect>"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f" class='{kind}'" if kind else ""
    return f"<text{named} x='{x:.1f}' y='{y:.1f}'>{escape(text)}</text>"


def _svg(height: float, shapes: Sequence[str], title: str) -> str:
    head = f"<svg viewBox='0 0 {_WIDTH} {max(1, height):.0f}' role='img' aria-label='{escape(title)}'>"
    return f"<div class='scroll'>{head}{''.join(shapes)}</svg></div>"
