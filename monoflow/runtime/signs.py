"""What a launcher and its ranks tell each other by: variables, files, signals. It imports nothing of ours.

A launcher needs no more of this package than this, and should start at once.
"""

from __future__ import annotations

import signal

#: Set by `monoflow run` for the ranks it starts: they leave the printing of errors to it.
LAUNCHER_VARIABLE = "MONOFLOW_LAUNCHER_PID"
#: Where ranks give signs of life, set by `monoflow run`: a file that is touched, whose text is the number of
#: steps that are over, and one in which a rank that gets the signal `ASK` says where it stands.
WATCH_VARIABLE = "MONOFLOW_WATCH_DIR"
PULSE, STACKS, ASK = ".pulse", ".stacks", signal.SIGUSR2
#: A folder in memory that outlives the ranks of this host, set by `monoflow run --elastic`.
SNAPSHOTS_VARIABLE = "MONOFLOW_SNAPSHOTS"
#: How often the launcher has started the ranks before: a job that re-forms lives several times.
LIFE_VARIABLE = "MONOFLOW_LIFE"
#: Endings of the files in which ranks tell of themselves.
SNAPSHOT, EVENTS, NAMES = ".json", ".events", ".names"
#: The exit status of a program that Ctrl-C ended.
INTERRUPTED = 128 + signal.SIGINT
#: How the message of a step begins that found itself hung.
HANG = "no actor has fired"
