"""SBP read from text."""

from __future__ import annotations

import re

from ..errors import LayoutError
from .layout import At, B, NdSbp, Partial, Sbp, Split

_FORM = re.compile(
    r"B|@(?P<stage>\d+)|P(?:\(\s*(?P<op>sum|max|min)\s*\))?|S\(\s*(?P<numbers>\d+(?:\s*,\s*\d+){0,2})\s*\)"
)


def parse(text: str) -> NdSbp:
    """The nd-SBP that a text names: `S(0)`, `S(0, 3)`, `B`, `P`, `P(max)`, `@0`, or `(S(0), B)` for two axes.

    Raises:
        LayoutError: the text is not in this form.
    """
    form = text.strip()
    inner = form[1:-1] if form.startswith("(") and form.endswith(")") else form
    words = [word.strip() for word in re.split(r",(?![^(]*\))", inner) if word.strip()]
    matches = [_FORM.fullmatch(word) for word in words]
    if not matches or None in matches:
        raise LayoutError(f"{text!r} is not a layout; write S(0), B, P(sum), or (S(0), B) for two axes")
    return tuple(_one(match) for match in matches if match)


def _one(match: re.Match[str]) -> Sbp:
    word = match.group()
    if word == "B":
        return B
    if word.startswith("@"):
        return At(int(match.group("stage")))
    if word.startswith("P"):
        return Partial(match.group("op") or "sum")
    return Split(*(int(number) for number in match.group("numbers").split(",")))
