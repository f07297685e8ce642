"""The few settings that come from the environment, read once into one frozen value."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import FlowError

STAGES = ("capture", "plan", "lower", "runtime")


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        log_stages: stages that write a log (MONOFLOW_LOG, a comma-separated list, or "all").
        log_all_ranks: whether every rank writes it, not only rank 0 (MONOFLOW_LOG_RANKS=all).
        verify: whether each stage's verifier runs (MONOFLOW_VERIFY, on unless 0).
        cache: folder of what was measured and may be deleted (MONOFLOW_CACHE; else in the user's cache
            folder).
        run_dir: folder in which ranks tell of themselves (MONOFLOW_RUN_DIR, set by `monoflow run`); "" for
            nowhere.
        trace_events: how many of its last events a rank keeps for a trace (MONOFLOW_TRACE_EVENTS, set by
            `monoflow run --trace`); 0 for no trace.
        snapshots: a folder in memory that outlives the ranks of this host (MONOFLOW_SNAPSHOTS, set by
            `monoflow run --elastic`); "" for none.
        life: how often the ranks of this job were started before (MONOFLOW_LIFE, set by `monoflow run`).
        lanes: whether compute and every channel of moves have a thread of their own (MONOFLOW_LANES, on
            unless 0).
        plan_seconds: seconds of work that planning may take beside the search itself, counted in what is done
            and not by the clock (MONOFLOW_PLAN_SECONDS).
        watchdog: seconds without any progress after which a step fails, naming who waits for whom
            (MONOFLOW_WATCHDOG); 0 for no end.
        link_delay: seconds that a move's lane sleeps to start and for every byte sent, as if the link were
            that slow: a tool for benches (MONOFLOW_LINK_DELAY, such as 2e-4:1e-8); None for none.
        rank, world_size: this process among all (RANK, WORLD_SIZE, as torchrun sets them).
        local_rank, local_world_size: this process among those of its host.
        num_hosts: of the job (GROUP_WORLD_SIZE, as torchrun sets it).
    """

    log_stages: frozenset[str] = frozenset()
    log_all_ranks: bool = False
    verify: bool = True
    cache: str = "~/.cache/monoflow"
    run_dir: str = ""
    trace_events: int = 0
    snapshots: str = ""
    life: int = 0
    lanes: bool = True
    plan_seconds: int = 10
    watchdog: int = 300
    link_delay: tuple[float, float] | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_hosts: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """The settings in `env`. Raises FlowError naming a variable whose value is not understood."""
        world_size = _integer(env, "WORLD_SIZE", 1)
        return cls(
            log_stages=_stages(env.get("MONOFLOW_LOG", "")),
            log_all_ranks=_choice(env, "MONOFLOW_LOG_RANKS", {"0": False, "all": True}, "0"),
            verify=_choice(env, "MONOFLOW_VERIFY", {"0": False, "1": True}, "1"),
            cache=env.get("MONOFLOW_CACHE") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/monoflow",
            run_dir=env.get("MONOFLOW_RUN_DIR", ""),
            trace_events=_integer(env, "MONOFLOW_TRACE_EVENTS", 0, least=0),
            snapshots=env.get("MONOFLOW_SNAPSHOTS", ""),
            life=_integer(env, "MONOFLOW_LIFE", 0),
            lanes=_choice(env, "MONOFLOW_LANES", {"0": False, "1": True}, "1"),
            plan_seconds=_integer(env, "MONOFLOW_PLAN_SECONDS", 10, least=0),
            watchdog=_integer(env, "MONOFLOW_WATCHDOG", 300, least=0),
            link_delay=_link(env.get("MONOFLOW_LINK_DELAY", "")),
            rank=_integer(env, "RANK", 0),
            world_size=world_size,
            local_rank=_integer(env, "LOCAL_RANK", 0),
            local_world_size=_integer(env, "LOCAL_WORLD_SIZE", 1),
            num_hosts=_integer(env, "GROUP_WORLD_SIZE", 1),
        )


def _stages(text: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if "all" in names:
        return frozenset(STAGES)
    if unknown := names - set(STAGES):
        raise FlowError(
            f"MONOFLOW_LOG={text!r} names {sorted(unknown)}; the stages are {', '.join(STAGES)} (or all)"
        )
    return names


def _choice(env: Mapping[str, str], name: str, choices: Mapping[str, bool], default: str) -> bool:
    value = env.get(name, default)
    if value not in choices:
        raise FlowError(f"{name}={value!r} is not one of {', '.join(choices)}")
    return choices[value]


def _integer(env: Mapping[str, str], name: str, default: int, least: int | None = None) -> int:
    value = env.get(name)
    if value is None:
        return default
    try:
        number = int(value)
    except ValueError:
        raise FlowError(f"{name}={value!r} is not an integer") from None
    if least is not None and number < least:
        raise FlowError(f"{name}={value!r} is less than {least}")
    return number


def _link(text: str) -> tuple[float, float] | None:
    if not text:
        return None
    try:
        alpha, beta = map(float, text.split(":"))
        valid = 0 <= alpha < math.inf and 0 <= beta < math.inf
    except ValueError:
        valid = False
    if not valid:
        raise FlowError(
            f"MONOFLOW_LINK_DELAY={text!r} is not seconds to start and seconds a byte, such as 2e-4:1e-8"
        )
    return alpha, beta


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_memory(text: str, name: str) -> int:
    """Bytes from a number and a unit, "80GB" (10^9) or "80GiB" (2^30).

    Args:
        name: what the text was given for, in the error.

    Raises:
        FlowError: it is no such thing.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) == 0:
        raise FlowError(f"{name}{text!r} is not a size of memory; write a number and a unit, such as 80GB")
    return int(float(found[1]) * unit)


SETTINGS = Settings.from_env(os.environ)
