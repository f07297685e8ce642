"""The report of `monoflow plan --html`: one page, no scripts, nothing fetched."""

from __future__ import annotations

from .plan_report import Planned


def page(done: Planned) -> str:
    """The page."""
    return f"<!doctype html><title>{done.plan.graph.name}</title>"
