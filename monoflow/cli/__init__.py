"""The command line: `monoflow run`, `monoflow doctor`."""

from .app import main

__all__ = ["main"]
