"""The commands and their options. What a command works with, it imports when it is called.

`monoflow run` starts programs: without torch where it can, and never with all of this package.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import FlowError
from ..plan.sheets import DEVICES, LINKS
from . import checkpoint, runs
from . import run as launcher

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="One training step, written for one device, on any layout of any devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint.app, name="checkpoint")
_WIDTH = 120  # of tables that go to a file or a pipe
_HOSTS, _ELASTIC = "Several hosts (as torchrun)", "Ranks that come and go"


def own_version() -> str:
    """The installed version of monoflow."""
    try:
        return version("monoflow")
    except PackageNotFoundError:
        return "not installed (running from source)"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"monoflow {own_version()}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before a command."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="The script that every rank runs.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--nproc-per-node", help="Ranks on this host: 1, or with --elastic what it has devices for."
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what every actor did and when, for Perfetto: out.json.")
    ] = None,
    trace_events: Annotated[int, typer.Option(help="How many firings a rank keeps: its last ones.")] = 1
    << 16,
    nnodes: Annotated[str | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    node_rank: Annotated[int | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    master_addr: Annotated[str | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    master_port: Annotated[int | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    rdzv_backend: Annotated[str | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    rdzv_id: Annotated[str | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    rdzv_conf: Annotated[str | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    local_addr: Annotated[str | None, typer.Option(rich_help_panel=_HOSTS)] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            help="MIN:MAX ranks: when some fail, hang or join, the job goes on with those there are.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="How often it may.", rich_help_panel=_ELASTIC)
    ] = None,
) -> None:
    """Run a script on N local ranks; the first failure is the only one printed, and ends the job."""
    options = launcher.agent_options(
        [
            ("nnodes", nnodes),
            ("node-rank", node_rank),
            ("master-addr", master_addr),
            ("master-port", master_port),
            ("rdzv-backend", rdzv_backend),
            ("rdzv-endpoint", rdzv_endpoint),
            ("rdzv-id", rdzv_id),
            ("rdzv-conf", rdzv_conf),
            ("local-addr", local_addr),
            ("max-restarts", max_restarts),
        ]
    )
    bounds = launcher.elastic_bounds(elastic) if elastic is not None else None
    count = num_ranks if num_ranks is not None else launcher.default_ranks(bounds)
    job = launcher.Job(count, script, tuple(args or ()), options, trace, trace_events, bounds)
    raise typer.Exit(launcher.run(job))


@app.command()
def trace(
    files: Annotated[
        list[Path],
        typer.Argument(help="What `monoflow run --trace` wrote: a file a host.", show_default=False),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print it as data.")] = False,
    join: Annotated[
        Path | None, typer.Option(help="Write several hosts' files as one, for Perfetto.")
    ] = None,
) -> None:
    """Sum up a trace: where the time went, what waited for what, and the bottleneck."""
    from . import trace as tracer  # noqa: PLC0415 - see above

    raise typer.Exit(tracer.trace(files, json, join, _console()))


@app.command()
def top(
    job: Annotated[
        str | None,
        typer.Argument(help="The process id of a `monoflow run`, or a job's folder; else the last."),
    ] = None,
    once: Annotated[bool, typer.Option(help="Print what is now, and end.")] = False,
) -> None:
    """Show what the ranks of a running job do: speed, actors, registers, memory."""
    from . import top as watcher  # noqa: PLC0415 - see above

    raise typer.Exit(watcher.top(runs.find(job, os.environ), once, _console()))


@app.command(context_settings={"allow_interspersed_args": True})
def plan(
    script: Annotated[
        str, typer.Argument(help="The script whose first step is planned.", show_default=False)
    ],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")] = None,
    device: Annotated[
        str | None, typer.Option(help=f"{', '.join(DEVICES)}; this machine when left out.")
    ] = None,
    mesh: Annotated[str, typer.Option(help="Sizes of the mesh's axes, outermost first: 8 or 16x8.")] = "1",
    memory: Annotated[
        str | None, typer.Option(help="What a rank may use: 80GB; all it has when left out.")
    ] = None,
    link: Annotated[str | None, typer.Option(help=f"Of every axis: {', '.join(LINKS)}.")] = None,
    plan: Annotated[str | None, typer.Option(help="A plan, instead of the script's.")] = None,
    compare: Annotated[bool, typer.Option(help="Plan the templates too, to compare.")] = True,
    html: Annotated[Path | None, typer.Option(help="Write a report to look at.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write what is printed, as data.")] = None,
) -> None:
    """Plan a script's first step for a machine that need not be here: no devices, no ranks, no weights."""
    from . import plan as planner  # noqa: PLC0415 - see above

    request = planner.Request(
        script, tuple(args or ()), device, mesh, link, memory, plan, compare, html, save, json
    )
    raise typer.Exit(planner.plan(request, _console()))


@app.command()
def calibrate(
    num_ranks: Annotated[
        list[int] | None,
        typer.Option("-n", "--nproc-per-node", help="Ranks that share this host; may be repeated."),
    ] = None,
) -> None:
    """Measure what ops and collectives take on this machine, for the planner; in under a minute each."""
    from rich.console import Console  # noqa: PLC0415 - see above

    from . import calibrate as calibrator  # noqa: PLC0415

    raise typer.Exit(calibrator.calibrate(tuple(num_ranks or ()), Console(highlight=False)))


@app.command()
def doctor() -> None:
    """Print versions, devices, compiler and back ends, and the command that fixes what is missing."""
    from rich.console import Console  # noqa: PLC0415 - see above

    from . import doctor as doctor_report  # noqa: PLC0415

    findings = doctor_report.examine(own_version())
    Console(highlight=False).print(doctor_report.render(findings))
    raise typer.Exit(1 if any(finding.is_fatal for finding in findings) else 0)


def _console() -> Console:
    from rich.console import Console  # noqa: PLC0415 - see above

    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def main() -> None:
    """The `monoflow` program."""
    try:
        app()
    except FlowError as error:
        sys.exit(f"monoflow: {error}")
