"""Runs a user's script up to its first call of a graph step, without weights, and takes that call."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..compiler import StepGraph
from ..errors import FlowError
from ..mesh import Placement
from ..runtime.launch import user_traceback
from ..step import Step, intercept
from .weightless import weightless


@dataclass(frozen=True)
class FirstStep:
    """What a script asked of its first step.

    Attributes:
        graph: the captured step.
        plan: the plan that the script names; None for the default.
        pins: pattern -> layout, one SBP per axis.
    """

    graph: StepGraph
    plan: str | None
    pins: Mapping[str, tuple]


class _Found(BaseException):
    """Ends the script; no handler of the script's own is meant for it."""


def first_step(script: str, args: Sequence[str], placement: Placement) -> FirstStep:
    """Runs a script as `__main__` until it calls a step.

    Args:
        args: the script's own arguments.
        placement: the devices that its steps are to believe in.

    Raises:
        FlowError: there is no such script, it called no step, or its step cannot be captured.
        ScriptFailed: it raised; its own traceback is what there is to say.
    """
    if not Path(script).is_file():
        raise FlowError(f"no script {script!r} in {Path.cwd()}")
    found: list[FirstStep] = []
    with weightless() as end:

        def take(step: Step, given: Sequence[Any], keywords: Mapping[str, Any]) -> NoReturn:
            end()
            if not found:
                graph = step.capture(*given, **keywords)
                found.append(FirstStep(graph, step.plan_name, step.pins))
            raise _Found

        with intercept(placement, take):
            _run(script, args)
    if not found:
        raise FlowError(
            f"{script} ended without calling a step: nothing was captured. Does it call the "
            "function that @flow.graph decorates, and do its arguments make it get there?"
        )
    return found[0]


class ScriptFailed(Exception):
    """The script raised an exception of its own; the message is its traceback."""


def _run(script: str, args: Sequence[str]) -> None:
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:1] = [script, *args], [os.path.dirname(os.path.abspath(script)), *sys.path[:1]]
    try:
        runpy.run_path(script, run_name="__main__")
    except _Found:
        pass
    except FlowError:
        raise
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    except Exception as error:
        assert error.__traceback__ is not None
        raise ScriptFailed(user_traceback(error.with_traceback(error.__traceback__.tb_next))) from None
    finally:
        sys.argv, sys.path[:] = argv, path
