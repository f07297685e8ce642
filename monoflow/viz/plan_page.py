"""A plan as one page: layers by axes coloured by layout, memory over time, time by phase, bytes by axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .svg import area, bars, legend

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .15rem .7rem; border-bottom: 1px solid #8884; }
td.n { text-align: right; } td.b, td.s, td.p { color: #111; text-align: center; }
td.b { background: #d7dde4; } td.s { background: #9fd0a8; } td.p { background: #f3b98b; }
td.s1 { background: #8fb8ea; } td.s2 { background: #cfa9e6; } td.s3 { background: #e6d27f; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
.over { color: #c62828; font-weight: 600; } svg { max-width: 100%; height: auto; display: block; }
small { color: #888; }
"""


def page(data: Mapping[str, Any]) -> str:
    """The page of a plan.

    Args:
        data: what `monoflow plan --json` writes.
    """
    predicted = data["predicted"]
    mesh = " x ".join(f"{size} ({axis})" for axis, size in data["mesh"].items())
    title = f"{data['step']}: plan {data['plan']!r}"
    sections = [
        f"<h1>{escape(title)}</h1><p>on {escape(mesh)} of {escape(data['device'])}</p>",
        _summary(data, predicted),
        _section("Layers", _layers(data), "parameters as stored, and each layer's largest result in forward"),
        _section("Memory over a step", _memory(data, predicted), "bytes of one rank at every op, in order"),
        _section("Time", _time(predicted), "seconds of one rank by phase"),
        _section("Sent", _sent(predicted), "bytes that one rank sends along each axis in a step"),
        _section("Compared", _compared(data), "other plans, by the same prices"),
        _unruled(data),
    ]
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang='en'>{head}<body>{''.join(sections)}</body></html>\n"


def _section(title: str, body: str, note: str) -> str:
    return f"<h2>{escape(title)}</h2><small>{escape(note)}</small>{body}"


def _summary(data: Mapping[str, Any], predicted: Mapping[str, Any]) -> str:
    over = predicted["peak_bytes"] - data["limit_bytes"]
    fits = f" <span class='over'>{size(over)} too much</span>" if over > 0 else ""
    collectives = ", ".join(f"{count} {kind}" for kind, count in predicted["collectives"].items())
    rows = [
        ("step", duration(predicted["seconds"])),
        ("memory at its peak", f"{size(predicted['peak_bytes'])} of {size(data['limit_bytes'])}{fits}"),
        ("at", escape(predicted["peak_item"])),
        ("collectives", escape(collectives) or "none"),
    ]
    return _table((), (f"<th>{name}</th><td>{value}</td>" for name, value in rows))


def _layers(data: Mapping[str, Any]) -> str:
    axes = list(data["mesh"])
    stored = (
        f"<td>{escape(row['pattern'])}</td><td class='n'>{row['count']}</td><td>{escape(row['meta'])}</td>"
        + "".join(map(_cell, row["axes"]))
        for row in data["parameters"]
    )
    made = (
        f"<td>{escape(row['module'] or '(none)')}</td><td class='n'>{row['count']}</td>"
        f"<td>{escape(row['op'])} {escape(row['meta'])}</td>" + "".join(map(_cell, row["axes"]))
        for row in data["layers"]
    )
    parameters = _table(("parameters", "", "", *axes), stored)
    return f"{parameters}<p></p>{_table(('modules', '', 'largest result', *axes), made)}"


def _cell(sbp: str) -> str:
    """One SBP in the colour of its kind; splits by their dim."""
    kind = sbp[0].lower()
    dim = sbp[2] if kind == "s" and len(sbp) > 2 and sbp[2] in "123" else ""
    return f"<td class='{kind}{f' s{dim}' if dim else ''}'>{escape(sbp)}</td>"


def _memory(data: Mapping[str, Any], predicted: Mapping[str, Any]) -> str:
    memory = predicted["memory"]
    chart = area(memory["held"], limit=data["limit_bytes"], label=size)
    return legend(memory["categories"]) + chart


def _time(predicted: Mapping[str, Any]) -> str:
    phases = predicted["seconds_by"]
    kinds = list(dict.fromkeys(kind for by_kind in phases.values() for kind in by_kind))
    rows = {phase: [by_kind.get(kind, 0.0) for kind in kinds] for phase, by_kind in phases.items()}
    return legend(kinds) + bars(rows, label=duration)


def _sent(predicted: Mapping[str, Any]) -> str:
    return bars({axis: [float(count)] for axis, count in predicted["sent"].items()}, label=size)


def _compared(data: Mapping[str, Any]) -> str:
    rows = []
    for name, one in data["compared"].items():
        shown = f"<b>{escape(name)}</b>" if name == data["plan"] else escape(name)
        fits = "" if one["peak_bytes"] <= data["limit_bytes"] else "<span class='over'>does not fit</span>"
        rows.append(
            f"<td>{shown}</td><td class='n'>{duration(one['seconds'])}</td>"
            f"<td class='n'>{size(one['peak_bytes'])}</td><td>{fits}</td>"
        )
    return _table(("plan", "time", "memory", ""), rows)


def _unruled(data: Mapping[str, Any]) -> str:
    if not data["unruled"]:
        return ""
    rows = (
        f"<td>{escape(name)}</td><td class='n'>{size(count)}</td>" for name, count in data["unruled"].items()
    )
    note = "every rank runs them whole: bytes of their inputs and outputs"
    return _section("Ops without a rule", _table(("op", "bytes"), rows), note)


def _table(columns: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if columns else ''}{body}</table>"


def size(num_bytes: float) -> str:
    """Bytes for people, with three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds for people, with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
