"""Faults, and what does them to a running job."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .job import Job


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        do: does it to a job.
        restarts_launcher: whether the command has to be started again; snapshots in memory are gone then.
        loses: how many steps it may cost a job that takes a snapshot after every step; None if its snapshots
            go too.
        damages: whether the newest checkpoint and snapshot are no longer whole.
    """

    name: str
    do: Callable[[Job, random.Random], None]
    restarts_launcher: bool = False
    damages: bool = False
    loses: int | None = None


def kill_a_rank(job: Job, choice: random.Random) -> None:
    os.kill(choice.choice(job.ranks()), signal.SIGKILL)


def stop_a_rank(job: Job, choice: random.Random) -> None:
    os.kill(choice.choice(job.ranks()), signal.SIGSTOP)


def kill_while_it_saves(job: Job, choice: random.Random) -> None:
    """Waits until files are being written aside, on a slow disk."""
    job.ask("slow-disk")
    job.wait(lambda: any(job.saves.glob("step-*.tmp-*")), "a save under way")
    os.kill(choice.choice(job.ranks()), signal.SIGKILL)


def kill_the_launcher(job: Job, choice: random.Random) -> None:
    pids = job.ranks()
    job.process.kill()
    job.process.wait()
    job.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the ranks' end")


def sleep_in_a_step(job: Job, choice: random.Random) -> None:
    job.ask(f"sleep-{choice.randrange(len(job.ranks()))}")


def fill_the_disk(job: Job, choice: random.Random) -> None:
    """No rank can make a file longer: the next save fails on all of them."""
    job.ask("full-disk")


def damage_the_newest(job: Job, choice: random.Random) -> None:
    """Flips a byte of the newest checkpoint on disk and of those in memory, and kills a rank."""
    ranks = job.ranks()
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    for folder in (job.saves, *job.snapshots()):
        whole = sorted(one for one in folder.glob("step-*") if "." not in one.name)
        if whole:
            _flip(choice.choice(sorted(whole[-1].glob("*.safetensors"))), choice)


def _flip(path: Path, choice: random.Random) -> None:
    with path.open("r+b") as file:
        at = choice.randrange(path.stat().st_size * 3 // 4, path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


SLEEP = "sleep in a step"
FAULTS: Sequence[Fault] = (
    Fault("kill a rank", kill_a_rank, loses=2),
    Fault("kill a rank that saves to a slow disk", kill_while_it_saves),
    Fault("kill the launcher", kill_the_launcher, restarts_launcher=True),
    Fault("stop a rank", stop_a_rank, loses=2),
    Fault(SLEEP, sleep_in_a_step, loses=2),
    Fault("full disk", fill_the_disk),
    Fault("damaged newest checkpoint", damage_the_newest, damages=True),
)


def drawn(seed: int, count: int) -> list[Fault]:
    """So many faults in an order of chance, every kind about equally often."""
    choice = random.Random(seed)
    found: list[Fault] = []
    while len(found) < count:
        found += choice.sample(FAULTS, len(FAULTS))
    return found[:count]
