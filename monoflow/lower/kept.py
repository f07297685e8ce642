"""Compiled pieces kept on disk: found by what a piece is, without importing a compiler or tracing it.

A piece's code is a shared library and a line of JSON beside it, in the folder where torch keeps compiled code
(TORCHINDUCTOR_CACHE_DIR). Its name is a hash of all that the code depends on: the piece, torch, the machine,
the settings, and the source of this package. What is damaged, or was written half, is no match for the hash
in the JSON: it is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from .inductor import Function, cache_folder, loaded, settings
from .pieces import Itself

PACKAGE = Path(__file__).parents[1]
#: Namespaces whose ops are part of torch, or of this package.
_NAMESPACES = ("aten", "prims", "prim", "monoflow")
_PARTS = ("torch", "monoflow")


class Kept(NamedTuple):
    """What is kept of a compiled piece.

    Attributes:
        checks: (low, size, place among the piece's nodes) of every index that the code looks at.
    """

    function: Function
    checks: tuple[tuple[int, int, int], ...]


def digest(key: Any) -> str | None:
    """Equal for pieces whose code is the same, in any run on such a machine.

    Args:
        key: a piece's.

    Returns:
        None where that cannot be known: its code depends on functions of neither torch nor this package.
    """
    try:
        text = _text(key)
    except _NotKnown:
        return None
    return hashlib.sha256(f"{_surroundings()} {text}".encode()).hexdigest()[:40]


def find(name: str) -> Kept | None:
    """What is kept under a digest; None if there is nothing, or it is damaged."""
    library, about = _paths(name)
    try:
        told = json.loads(about.read_text())
        if hashlib.sha256(library.read_bytes()).hexdigest() != told["sha256"]:
            return None
        checks = tuple((int(low), int(size), int(place)) for low, size, place in told["checks"])
        return Kept(loaded(library), checks)
    except (OSError, ValueError, TypeError, KeyError, ImportError):
        return None


def keep(name: str, library: Path, checks: Sequence[tuple[int, int, int]]) -> None:
    """Keeps a compiled library under a digest. Where the folder cannot be written, nothing is kept."""
    code = library.read_bytes()
    told = {"sha256": hashlib.sha256(code).hexdigest(), "checks": list(checks)}
    try:
        for path, content in zip(_paths(name), (code, json.dumps(told).encode()), strict=True):
            _write(path, content)
    except OSError:
        return


def _write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, beside others who do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)


def _paths(name: str) -> tuple[Path, Path]:
    folder = cache_folder()
    return folder / f"{name}.so", folder / f"{name}.json"


# --- what code depends on --------------------------------------------------------------------------


class _NotKnown(Exception):
    """A value of which nobody can say whether it is the same in another run."""


def _text(value: Any) -> str:
    """A value of a piece's key as text that is the same in every run."""
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, FunctionType):
        return _text(value.__code__)
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, torch._ops.OpOverload):
        if value.namespace not in _NAMESPACES:
            raise _NotKnown
        return str(value)
    if isinstance(value, (type, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if isinstance(value, Itself) or " at 0x" in text:
        raise _NotKnown
    return f"{type(value).__module__}.{type(value).__qualname__}:{text}"


def _code(code: CodeType) -> str:
    """A function by where it is; its text is hashed with its package."""
    for name in _PARTS:
        folder = Path(sys.modules[name].__file__ or "").parent
        if Path(code.co_filename).is_relative_to(folder):
            place = Path(code.co_filename).relative_to(folder)
            return f"{name}/{place}:{code.co_firstlineno}:{code.co_qualname}"
    raise _NotKnown


def _surroundings() -> str:
    """All but the piece that its code depends on."""
    return repr(
        (
            torch.__version__, torch.version.git_version, torch.__file__, sys.version, _machine(), _sources(),
            torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled, settings(),
        )
    )  # fmt: skip


@cache
def _machine() -> str:
    """The processor: compiled code uses whatever it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return f"{platform.platform()} {platform.machine()} {platform.processor()} {told}"


@cache
def _sources() -> str:
    """The source of this package: how a piece becomes code."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(f"{path.relative_to(PACKAGE)} ".encode() + path.read_bytes())
    return found.hexdigest()
