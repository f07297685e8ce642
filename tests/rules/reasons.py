"""Why a signature that is exact is left out of a rule."""

from __future__ import annotations


def reason(op: str, signature: str) -> str | None:
    """The reason for one op and one signature, or None."""
    return None
