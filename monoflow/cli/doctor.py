"""`monoflow doctor`: what this machine has, what is missing, and the command that fixes it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from rich.table import Table

REQUIRED = ("torch", "numpy", "highspy", "safetensors", "rich", "typer")
OPTIONAL = (("transformers", "hf"), ("pytest", "dev"), ("scikit-learn", "dev"))
BACKENDS = ("gloo", "nccl", "xccl", "mpi")
OLDEST_TORCH, OLDEST_TORCH_ONE_DEVICE = (2, 13), (2, 11)


@dataclass(frozen=True)
class Finding:
    """One line of the report: a thing, what was found, and what fixes it if something is wrong."""

    name: str
    found: str
    fix: str = ""
    is_fatal: bool = False


def examine(own_version: str) -> list[Finding]:
    """Look at everything, in the order it is printed."""
    return [
        Finding("python", f"{platform.python_version()} ({sys.executable})"),
        Finding("monoflow", own_version),
        *_packages(),
        _torch_age(torch.__version__),
        Finding("cores", str(os.cpu_count())),
        *_devices(),
        _compiler(),
        *_backends(),
    ]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    for package in REQUIRED:
        found = _installed(package)
        if found:
            yield Finding(package, found)
        else:
            yield Finding(package, "missing", f"pip install {package}", is_fatal=True)
    for package, extra in OPTIONAL:
        found = _installed(package)
        fix = "" if found else f"pip install 'monoflow[{extra}]'"
        yield Finding(package, found or "missing (optional)", fix)


def _torch_age(torch_version: str) -> Finding:
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    fix = "pip install --upgrade 'torch>=2.13,<2.15'"
    if (major, minor) < OLDEST_TORCH_ONE_DEVICE:
        return Finding("torch is recent enough", "no", fix, is_fatal=True)
    if (major, minor) < OLDEST_TORCH:
        return Finding("torch is recent enough", "for one device only", fix)
    return Finding("torch is recent enough", "yes")


def _devices() -> Iterator[Finding]:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        yield Finding("devices", "cpu only")
        return
    count = torch.accelerator.device_count()
    yield Finding("devices", f"cpu, {count} x {accelerator.type}")


def _compiler() -> Finding:
    wanted = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++", "cl"]
    paths = [path for path in map(shutil.which, wanted) if path]
    if paths:
        return Finding("C++ compiler", paths[0])
    installers = {
        "apt-get": "apt-get install g++",
        "dnf": "dnf install gcc-c++",
        "brew": "xcode-select --install",
    }
    known = [command for tool, command in installers.items() if shutil.which(tool)]
    return Finding(
        "C++ compiler", "missing: compiled tasks need one", (known or ["install g++ or clang++"])[0]
    )


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding(
            "distributed",
            "missing: this torch runs one device only",
            "install a torch build with distributed",
        )
        return
    found = [backend for backend in BACKENDS if dist.is_backend_available(backend)]
    yield Finding("distributed back ends", ", ".join(found) or "none")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        needed = dist.get_default_backend_for_device(accelerator.type)
        if needed not in found:
            yield Finding(
                f"{accelerator.type} ranks", f"need {needed}", f"install a torch build that has {needed}"
            )


def render(findings: list[Finding]) -> Table:
    """The report as a table; a row that needs something is coloured and says what."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "found", "to fix it"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = "red" if finding.is_fatal else "yellow" if finding.fix else ""
        table.add_row(finding.name, finding.found, finding.fix, style=style)
    return table
