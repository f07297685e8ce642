"""Who may import whom: the table of the design, held against every import statement of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "monoflow"
EVERYONE_MAY = {"errors", "log", "config"}
TABLE = """
| mesh | - |
| sbp | mesh |
| boxing | mesh sbp |
| graph | sbp |
| runtime | mesh boxing |
| tensor | mesh sbp boxing |
| capture | graph sbp |
| plan | mesh sbp boxing graph |
| lower | mesh sbp boxing graph plan runtime |
| compiler | mesh graph capture plan lower runtime |
| data, checkpoint | mesh sbp tensor |
| step | mesh sbp tensor compiler checkpoint |
| oneflow | mesh sbp tensor step checkpoint data |
| export | checkpoint runtime compiler |
| serve | checkpoint runtime |
| viz | plan runtime (data only) |
| cli | everything above |
"""


def read_table(text: str) -> dict[str, set[str]]:
    """Per part, the parts it may import."""
    allowed: dict[str, set[str]] = {"errors": set(), "config": {"errors"}, "log": {"errors", "config"}}
    for line in text.strip().splitlines():
        parts, words = (cell.strip() for cell in line.strip("|").split("|"))
        names = set(allowed) if words == "everything above" else set(words.split("(")[0].split()) - {"-"}
        for part in parts.split(", "):
            allowed[part] = names | EVERYONE_MAY
    return allowed


def part_of(module: str) -> str | None:
    """The part that a dotted module of the package belongs to; None for the package itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def module_of(path: Path, package: Path) -> tuple[str, bool]:
    """The dotted name of a source file, and whether it is a package's __init__."""
    names = ("monoflow", *path.relative_to(package).with_suffix("").parts)
    is_init = names[-1] == "__init__"
    return ".".join(names[:-1] if is_init else names), is_init


def imported_modules(source: str, module: str, is_init: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import of our own, wherever in the file it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "monoflow":
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_init)
            if base == "monoflow":  # `from . import x` names parts
                yield from ((node.lineno, f"monoflow.{alias.name}") for alias in node.names)
            elif base.startswith("monoflow."):
                yield node.lineno, base


def _base(node: ast.ImportFrom, module: str, is_init: bool) -> str:
    if not node.level:
        return node.module or ""
    names = module.split(".")
    up = node.level - 1 if is_init else node.level
    return ".".join([*names[: len(names) - up], *([node.module] if node.module else [])])


def violations(source: str, module: str, is_init: bool, allowed: dict[str, set[str]]) -> list[str]:
    """Every import of the file that the table forbids, one line each."""
    part = part_of(module)
    if part in (None, "face"):  # the face of the package re-exports
        return []
    if part not in allowed:
        return [f"{module}: the part {part!r} is not in the table"]
    found = []
    for line, target in imported_modules(source, module, is_init):
        other = part_of(target)
        if other is None or (other != part and other not in allowed[part]):
            may = ", ".join(sorted(allowed[part]))
            found.append(f"{module}:{line}: {part} imports {target}, but may import only {may}")
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_follow_the_table(path: Path) -> None:
    module, is_init = module_of(path, PACKAGE)
    assert violations(path.read_text(), module, is_init, read_table(TABLE)) == []


def test_the_face_only_re_exports() -> None:
    for node in ast.parse((PACKAGE / "face.py").read_text()).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_name = isinstance(node, ast.Assign | ast.AnnAssign)
        assert is_docstring or is_name or isinstance(node, ast.ImportFrom), ast.unparse(node)


def test_the_table_is_read_as_written() -> None:
    allowed = read_table(TABLE)
    assert allowed["mesh"] == EVERYONE_MAY
    assert allowed["data"] == allowed["checkpoint"] == {"mesh", "sbp", "tensor", *EVERYONE_MAY}
    assert allowed["viz"] == {"plan", "runtime", *EVERYONE_MAY}
    assert {"step", "compiler", "viz", "runtime"} <= allowed["cli"]
    assert not any("cli" in names for names in allowed.values())


BAD = """
from __future__ import annotations
from typing import TYPE_CHECKING
import torch
import monoflow.plan.cost
from . import routes
from ..sbp import layout
from ..errors import FlowError
if TYPE_CHECKING:
    from ..graph.step_graph import StepGraph
def late():
    from ..runtime import launch
    from .. import lower
    from monoflow import mesh, step
    from .. import __version__
    import monoflow
"""


def test_the_checker_sees_every_form_of_import() -> None:
    found = violations(BAD, "monoflow.boxing.cost", False, read_table(TABLE))
    assert [line.split(", but")[0] for line in sorted(found, key=lambda line: int(line.split(":")[1]))] == [
        "monoflow.boxing.cost:5: boxing imports monoflow.plan.cost",
        "monoflow.boxing.cost:10: boxing imports monoflow.graph.step_graph",
        "monoflow.boxing.cost:12: boxing imports monoflow.runtime",
        "monoflow.boxing.cost:13: boxing imports monoflow.lower",
        "monoflow.boxing.cost:14: boxing imports monoflow.step",
        "monoflow.boxing.cost:15: boxing imports monoflow.__version__",
        "monoflow.boxing.cost:16: boxing imports monoflow",
    ]


def test_relative_imports_are_resolved_from_packages_too() -> None:
    allowed = read_table(TABLE)
    assert violations("from .layout import S", "monoflow.sbp", True, allowed) == []
    assert violations("from ..sbp.layout import S", "monoflow.sbp.rules", True, allowed) == []
    assert len(violations("from ...plan import x", "monoflow.sbp.rules", True, allowed)) == 1
    assert violations("", "monoflow.utils", False, allowed) == [
        "monoflow.utils: the part 'utils' is not in the table"
    ]


def imported_by(code: str) -> set[str]:
    """The modules that a new interpreter has after some code."""
    code += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_only_who_compiles_imports_the_compiler() -> None:
    """It takes as long as all else together."""
    found = imported_by("import monoflow.face")
    assert "monoflow.lower.inductor" in found
    assert not {"torch._inductor.compile_fx", "torch._dynamo.eval_frame", "pyarrow", "filelock"} & found


def test_a_program_is_started_without_torch() -> None:
    found = imported_by("import monoflow.cli")
    assert "monoflow.cli.run" in found and not {"torch", "numpy", "rich.console"} & found


def test_ranks_are_started_without_what_they_run() -> None:
    found = {one for one in imported_by("import monoflow.cli.ranks") if one.startswith("monoflow.")}
    assert {one for one in found if not one.startswith("monoflow.cli")} == {
        "monoflow.config", "monoflow.errors", "monoflow.plan", "monoflow.plan.sheets", "monoflow.runtime",
        "monoflow.runtime.signs",
    }  # fmt: skip


def test_public_names_are_found_when_asked_for() -> None:
    """Also those that are names of parts, whichever is imported first."""
    code = """
import sys, monoflow.graph.step_graph, monoflow.sbp.layout, monoflow as flow
print("monoflow.face" in sys.modules, flow.data.__name__, "monoflow.face" in sys.modules)
print(flow.graph.__module__, flow.sbp.__name__, set(flow.__all__) <= set(dir(flow)), hasattr(flow, "nothing"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "False monoflow.data False",
        "monoflow.step.decorator monoflow.sbp.vocabulary True False",
    ]
