"""What was found, as tables: a line an op, what core ATen lacks, and one line of totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tests.rules.core_aten import Coverage
from tests.rules.prove import Proof
from tests.rules.reasons import reason
from tests.rules.stand_ins import PROVEN_AS_MATHS


def show(proofs: Mapping[str, Proof], crashed: Sequence[str], coverage: Coverage, console: Console) -> None:
    """Prints the whole report.

    Args:
        crashed: ops whose kernel ended the process when the search gave it shards that do not go together.
    """
    console.print(_ops(proofs))
    console.print(_missing(proofs))
    console.print(_core(coverage))
    if crashed:
        console.print(f"not searched, as their kernels do not check sizes: {', '.join(sorted(crashed))}")
    for proof in proofs.values():
        for problem in proof.wrong[:3]:
            console.print(f"[bold red]WRONG[/] {problem}", highlight=False, soft_wrap=True)
    console.print(totals(proofs, coverage), style="bold", highlight=False, soft_wrap=True)


def totals(proofs: Mapping[str, Proof], coverage: Coverage) -> str:
    """The one line to read."""
    every = proofs.values()
    unexplained, explained = (sum(counts) for counts in zip(*map(_count_missing, every), strict=True))
    samples, proven = sum(one.samples for one in every), sum(one.proven for one in every)
    wrong, possible = sum(len(one.wrong) for one in every), len(coverage.ruled) + len(coverage.missing)
    return (
        f"{len(proofs)} ops, {samples} samples, {proven} signatures proven, {wrong} wrong, "
        f"{unexplained} missing ({explained} more left out for a reason); "
        f"core ATen: {len(coverage.ruled)} of {possible} that can have a rule"
    )


def _count_missing(proof: Proof) -> tuple[int, int]:
    """How many exact signatures the rule leaves out: without a reason, and with one."""
    explained = sum(reason(proof.name, text) is not None for text in proof.surely_missing())
    return len(proof.surely_missing()) - explained, explained


def _ops(proofs: Mapping[str, Proof]) -> Table:
    table = Table("op", title="Rules proven on real calls")
    for name in ("samples", "proven", "wrong", "missing", "left out"):
        table.add_column(name, justify="right")
    table.add_column("note")
    for name, one in sorted(proofs.items()):
        missing = map(str, _count_missing(one))
        style = "bold red" if one.wrong or not one.samples else ""
        row = (name, str(one.samples), str(one.proven), str(len(one.wrong)), *missing, _note(one))
        table.add_row(*row, style=style)
    return table


def _note(proof: Proof) -> str:
    if not proof.samples:
        return "NOT PROVEN: no sample runs here"
    notes = ["in its mathematical form"] if proof.name in PROVEN_AS_MATHS else []
    return ", ".join([*notes, *([] if proof.proven else ["stays whole"])])


def _missing(proofs: Mapping[str, Proof]) -> Table:
    """One line an op and reason, with the first of the signatures."""
    table = Table("op", "number", "exact, but not listed: the first", "why", title="Missing signatures")
    for name, one in sorted(proofs.items()):
        groups: dict[str | None, list[str]] = {}
        for text in one.surely_missing():
            groups.setdefault(reason(name, text), []).append(text)
        for why, texts in groups.items():
            table.add_row(name, str(len(texts)), texts[0], why or "-", style="" if why else "yellow")
    return table


def _core(coverage: Coverage) -> Table:
    table = Table("core op", "why it has no rule", title="Core ATen without a rule")
    for name, why in sorted(coverage.without.items()):
        table.add_row(name, why)
    for name in coverage.missing:
        table.add_row(name, "MISSING", style="bold red")
    return table
