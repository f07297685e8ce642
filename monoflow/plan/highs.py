"""HiGHS without its banner."""

from __future__ import annotations

import os
import sys

import highspy


def quiet_solver() -> highspy.Highs:
    """A solver on one thread that prints nothing.

    The library greets on the process' standard output when its first solver is made, before any option can
    be set: for that moment the output goes nowhere.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        solver = highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    return solver
