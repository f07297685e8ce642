"""What `monoflow checkpoint` prints: what is in a checkpoint, whether it is sound, how two differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ..checkpoint import Source, Wanted, checkpoints, open_source
from ..checkpoint.convert import convert, form_of
from ..checkpoint.diff import Difference, differences

_WIDTH = 120


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _num_bytes(one: Wanted) -> int:
    return math.prod(one.shape) * one.dtype.itemsize


def _dtype(one: Wanted) -> str:
    return str(one.dtype).removeprefix("torch.")


def list_tensors(path: str, as_json: bool) -> None:
    """Prints the tensors of a checkpoint, or the checkpoints of a directory."""
    series = checkpoints(path)
    if series:
        _list_series(series, as_json)
        return
    source = open_source(path)
    if as_json:
        tensors = {
            name: {"dtype": _dtype(one), "shape": list(one.shape), "bytes": _num_bytes(one)}
            for name, one in source.tensors.items()
        }
        typer.echo(json.dumps({"path": source.path, "meta": _summary(source), "tensors": tensors}))
        return
    table = Table("tensor", "dtype", "shape", title=source.path, title_justify="left")
    table.add_column("bytes", justify="right")
    for name, one in source.tensors.items():
        table.add_row(name, _dtype(one), str(list(one.shape)), f"{_num_bytes(one):,}")
    table.add_section()
    total = sum(map(_num_bytes, source.tensors.values()))
    table.add_row(f"{len(source.tensors)} tensors", "", "", f"{total:,}")
    console = _console()
    console.print(table)
    for key, value in _summary(source).items():
        console.print(f"{key}: {value}", soft_wrap=True)


def _list_series(series: Iterable[tuple[int, str]], as_json: bool) -> None:
    rows = []
    for number, path in series:
        source = open_source(path)
        rows.append((number, path, len(source.tensors), sum(map(_num_bytes, source.tensors.values()))))
    if as_json:
        keys = ("step", "path", "tensors", "bytes")
        typer.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
        return
    table = Table("step", "path", "tensors", "bytes")
    for number, path, count, size in rows:
        table.add_row(str(number), path, str(count), f"{size:,}")
    _console().print(table)


def _summary(source: Source) -> dict[str, Any]:
    """What is no tensor, without what is long."""
    meta = source.meta
    found = {key: meta[key] for key in ("step", "versions", "stream") if meta.get(key) is not None}
    return found | ({"extra": sorted(meta["extra"])} if meta.get("extra") else {})


def verify(path: str, as_json: bool) -> int:
    """Reads every byte and prints what is wrong, by file and tensor; returns the exit status."""
    paths = [one for _, one in checkpoints(path)] or [path]
    found = {}
    for one in paths:
        source = open_source(one)
        found[one] = source.faults(source.tensors, 0, 1)
        if not as_json:
            how = (
                "no checksums: sizes and forms were looked at"
                if source.is_foreign
                else "every checksum is right"
            )
            typer.echo(
                f"{one}: {len(source.tensors)} tensors, {how}" if not found[one] else "\n".join(found[one])
            )
    if as_json:
        typer.echo(json.dumps(found))
    return 1 if any(found.values()) else 0


def convert_to(path: str, target: str, to: str | None) -> None:
    """Writes a checkpoint in another form."""
    form = to or form_of(target)
    convert(open_source(path), target, form)
    typer.echo(f"{target}: {form}")


def diff(a: str, b: str, as_json: bool) -> int:
    """Prints the tensors and settings in which two checkpoints differ; returns the exit status."""
    found = list(differences(open_source(a), open_source(b)))
    if as_json:
        typer.echo(json.dumps([_finite(one._asdict()) for one in found]))
    elif found:
        table = Table("what", a, b, "elements that differ", "by at most")
        for one in found:
            table.add_row(one.name, one.a or "-", one.b or "-", *_extent(one))
        _console().print(table)
    else:
        typer.echo("the same, bit for bit")
    return 1 if found else 0


def _extent(one: Difference) -> tuple[str, str]:
    return (f"{one.num_elements:,}", f"{one.largest:.3g}") if one.num_elements else ("", "")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        key: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
