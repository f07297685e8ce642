"""A plan as one page: layers by axes coloured by layout, memory and work over time, bytes by axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..plan.tabulate import duration, size
from .style import STYLE
from .svg import areas, bars, lanes, legend, strip
from .timescale import Timescale

_KINDS = (("parameter", "parameter, as stored"), ("activation", "largest result"), ("gradient", "gradient"))


def page(data: Mapping[str, Any]) -> str:
    """The page of a plan: one text, that needs nothing else.

    Args:
        data: what `monoflow plan --json` writes.
    """
    title = f"{data['step']}: plan {data['plan']!r}"
    mesh = " x ".join(f"{extent} ({axis})" for axis, extent in data["mesh"].items())
    scale = Timescale([item["seconds"] for item in data["timeline"]])
    sections = [
        f"<h1>{escape(title)}</h1><p class='note'>on {escape(mesh)} of {escape(data['device'])}</p>",
        _cards(data),
        _section("Layers", "modules that differ only by their number are one row", _modules(data)),
        _section("Memory", "bytes of one rank over the predicted step", _memory(data, scale)),
        _section("Time", "how busy compute and every axis are over the same step", _time(data, scale)),
        _section("Sent", "bytes that one rank sends along each axis in a step", _sent(data)),
        _section("Tried", _bound(data), _compared(data)),
        _section("Parameters", "by name, those of the most bytes first", _parameters(data)),
        _unruled(data),
    ]
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(sections)}</body></html>\n"


def _section(title: str, note: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2><p class='note'>{escape(note)}</p>{body}"


def _cards(data: Mapping[str, Any]) -> str:
    predicted, limit = data["predicted"], data["limit_bytes"]
    over = predicted["peak_bytes"] - limit if limit is not None else 0
    of = f"of {size(limit)}" if limit is not None else "without a limit"
    fits = f" <span class='over'>{size(over)} too much</span>" if over > 0 else ""
    counts = ", ".join(f"{count} {kind}" for kind, count in predicted["collectives"].items())
    cards = (
        (duration(predicted["seconds"]), "a step, predicted"),
        (size(predicted["peak_bytes"]), f"a rank at its peak, {of}{fits}"),
        (size(sum(predicted["sent"].values())), "sent by a rank in a step"),
        (str(sum(predicted["collectives"].values())), f"collectives: {escape(counts) or 'none'}"),
    )
    boxes = (f"<div class='card'><b>{value}</b><span>{said}</span></div>" for value, said in cards)
    return f"<div class='cards'>{''.join(boxes)}</div>"


# --- layouts -------------------------------------------------------------------------------------------


def _modules(data: Mapping[str, Any]) -> str:
    axes = list(data["mesh"])
    gap = "<td class='gap'></td>"
    over = "".join(f"{gap}<th colspan='{len(axes)}'>{escape(said)}</th>" for _, said in _KINDS)
    under = "".join(gap + "".join(f"<th class='dim'>{escape(axis)}</th>" for axis in axes) for _ in _KINDS)
    rows = [f"<th></th><th></th>{over}", f"<th></th><th></th>{under}"]
    for row in data["modules"]:
        cells = "".join(gap + _cells(row[kind], len(axes)) for kind, _ in _KINDS)
        rows.append(f"<td>{_dotted(row['module'])}</td><td class='n'>{_times(row['count'])}</td>{cells}")
    return _key() + _table((), rows)


def _key() -> str:
    kinds = [("b", "B: whole on every rank"), *((f"s{dim}", f"S({dim})") for dim in range(4))]
    kinds.append(("p", "P: addends"))
    keys = (f"<span class='key'><i class='{kind}'></i>{said}</span>" for kind, said in kinds)
    return f"<p>{''.join(keys)}</p>"


def _cells(cell: Mapping[str, Any] | None, num_axes: int) -> str:
    if cell is None:
        return "<td></td>" * num_axes
    title = escape(f"{cell['name']} {cell['meta']}", quote=True)
    return "".join(_cell(sbp, title) for sbp in cell["axes"])


def _cell(sbp: str, title: str = "") -> str:
    """One SBP in the colour of its kind; splits by their dim."""
    kind = sbp[0].lower()
    dim = min(3, int(sbp[2 : sbp.index("," if "," in sbp else ")")])) if kind == "s" else ""
    hover = f" title='{title}'" if title else ""
    return f"<td class='sbp {kind}{dim}'{hover}>{escape(sbp)}</td>"


def _dotted(name: str) -> str:
    """A dotted name with its last part to the fore."""
    before, dot, last = name.rpartition(".")
    return f"<span class='dim'>{escape(before + dot)}</span>{escape(last)}" if name else "(no module)"


def _times(count: int) -> str:
    return f"x {count}" if count > 1 else ""


def _parameters(data: Mapping[str, Any]) -> str:
    rows = (
        f"<td>{_dotted(row['pattern'])}</td><td class='n'>{_times(row['count'])}</td>"
        f"<td>{escape(row['meta'])}</td><td class='n'>{size(row['num_bytes'])}</td>"
        + "".join(map(_cell, row["axes"]))
        + f"<td>{_state(row)}</td>"
        for row in data["parameters"]
    )
    columns = ("", "", "shape", "in all", *data["mesh"], "optimizer's state")
    return f"<details><summary>{len(data['parameters'])} kinds</summary>{_table(columns, rows)}</details>"


def _state(row: Mapping[str, Any]) -> str:
    return "none" if row["state"] is None else "same" if row["state"] == row["layout"] else row["state"]


# --- time ----------------------------------------------------------------------------------------------


def _memory(data: Mapping[str, Any], scale: Timescale) -> str:
    memory, timeline = data["predicted"]["memory"], data["timeline"]
    if not timeline:
        return "<p>nothing runs</p>"
    names = [f"{item['name']} ({item['phase']})" for item in timeline]
    chart = areas(scale, memory["held"], memory["categories"], names, data["limit_bytes"], size)
    limit = data["limit_bytes"] or 0
    is_far = limit > 1.5 * data["predicted"]["peak_bytes"]
    note = f"<p class='note'>the limit, {size(limit)}, is far above</p>" if is_far else ""
    return legend(memory["categories"]) + chart + note


def _time(data: Mapping[str, Any], scale: Timescale) -> str:
    timeline = data["timeline"]
    if not timeline:
        return "<p>nothing runs</p>"
    used = {item["lane"] for item in timeline if item["seconds"] > 0}
    order = [lane for lane in ("compute", "local move", *data["mesh"]) if lane in used]
    busy: dict[str, list[tuple[int, float]]] = {lane: [] for lane in order}
    for number, item in enumerate(timeline):
        if item["lane"] in busy:
            busy[item["lane"]].append((number, item["seconds"]))
    phases = list(dict.fromkeys(item["phase"] for item in timeline))
    kinds = [phases.index(item["phase"]) for item in timeline]
    names = [f"{one['name']} ({one['phase']}): {duration(one['seconds'])}" for one in timeline]
    return legend(phases, "f") + strip(scale, kinds, phases) + lanes(scale, busy, names, duration)


def _sent(data: Mapping[str, Any]) -> str:
    sent = data["predicted"]["sent"]
    return bars({axis: [float(count)] for axis, count in sent.items()}, ["sent"], size)


# --- what else there was -------------------------------------------------------------------------------


def _bound(data: Mapping[str, Any]) -> str:
    search = data["search"]
    if search is None:
        return "a template: other plans, by the same prices"
    bound, fits = duration(search["bound"]), " that fits" if data["limit_bytes"] is not None else ""
    return (
        f"by the same prices. It is proven that no plan on this mesh{fits} takes less than {bound}: "
        f"none saves more than {100 * search['gap']:.1f} % of this one's time"
    )


def _compared(data: Mapping[str, Any]) -> str:
    rows, own, limit = [], data["predicted"]["seconds"], data["limit_bytes"]
    for name, one in data["compared"].items():
        shown = f"<b>{escape(name)}</b>" if name == data["plan"] else escape(name)
        fits = limit is None or one["peak_bytes"] <= limit
        said = "" if fits else "<span class='over'>does not fit</span>"
        ratio = f"{one['seconds'] / own:.2f} x" if own else ""
        rows.append(
            f"<td>{shown}</td><td class='n'>{duration(one['seconds'])}</td>"
            f"<td class='n'>{ratio}</td><td class='n'>{size(one['peak_bytes'])}</td><td>{said}</td>"
        )
    return _table(("plan", "time", "", "memory", ""), rows)


def _unruled(data: Mapping[str, Any]) -> str:
    if not data["unruled"]:
        return ""
    rows = (
        f"<td>{escape(name)}</td><td class='n'>{size(count)}</td>" for name, count in data["unruled"].items()
    )
    note = "every rank runs them whole: bytes of their inputs and outputs"
    return _section("Ops without a rule", note, _table(("op", "bytes"), rows))


def _table(columns: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class='scroll'><table>{f'<tr>{head}</tr>' if columns else ''}{body}</table></div>"
