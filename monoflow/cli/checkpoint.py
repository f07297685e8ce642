"""`monoflow checkpoint`: the commands and their options; `checkpoint_report` does them, with torch."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Look at, verify, convert and compare checkpoints.")
_Path = Annotated[
    str, typer.Argument(help="A checkpoint, a directory of them, or a URL.", show_default=False)
]
_Json = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]


@app.command("ls")
def list_tensors(path: _Path, as_json: _Json = False) -> None:
    """List the tensors of a checkpoint, or the checkpoints of a directory."""
    from . import checkpoint_report  # noqa: PLC0415 - see above

    checkpoint_report.list_tensors(path, as_json)


@app.command()
def verify(path: _Path, as_json: _Json = False) -> None:
    """Read every byte and compare checksums; exit 1 if something is wrong, and name file and tensor."""
    from . import checkpoint_report  # noqa: PLC0415 - see above

    raise typer.Exit(checkpoint_report.verify(path, as_json))


@app.command("convert")
def convert_to(
    path: _Path,
    target: Annotated[str, typer.Argument(help="What to write; nothing may be there.", show_default=False)],
    to: Annotated[
        str | None,
        typer.Option(help="monoflow, safetensors, pt, dcp; what the target's ending says when left out."),
    ] = None,
) -> None:
    """Write a checkpoint in another form: .safetensors or .pt (the model), dcp, or monoflow's own."""
    from . import checkpoint_report  # noqa: PLC0415 - see above

    checkpoint_report.convert_to(path, target, to)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint.", show_default=False)],
    b: Annotated[str, typer.Argument(help="Another.", show_default=False)],
    as_json: _Json = False,
) -> None:
    """List the tensors and settings in which two checkpoints differ, bit for bit; exit 1 if there are any."""
    from . import checkpoint_report  # noqa: PLC0415 - see above

    raise typer.Exit(checkpoint_report.diff(a, b, as_json))
