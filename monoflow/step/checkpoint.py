"""flow.save, flow.load and flow.checkpointer: checkpoints of a step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import (
    Checkpointer,
    Every,
    Saver,
    Shadow,
    candidates,
    first_does,
    folder_of,
    group_of,
    open_together,
    open_whole,
)
from ..config import Settings
from ..errors import DamagedError
from ..log import stage_logger
from .contents import Stateful, contents_of
from .decorator import Step
from .restore import Restored, restore


def save(path: str | Path, step: Step, *, stream: Any = None, extra: Mapping[str, Any] | None = None) -> None:
    """Saves everything that the next step depends on. All ranks call it, between two steps.

    A checkpoint holds global tensors, so it loads into any other placement and plan. Each rank writes its
    parts. What was at `path` stays as it is until the new one is complete.

    Args:
        path: a directory that all ranks see, or an fsspec URL such as "s3://bucket/run/last".
        step: what `flow.graph` made. Its parameters, buffers, optimizers, step count and random state are
            saved.
        stream: what `flow.stream` made, or anything with state_dict() and load_state_dict().
        extra: numbers, text, lists, dicts and tensors by name, the same on every rank; and objects with
            state_dict() and load_state_dict(), such as a learning rate scheduler.

    Raises:
        CheckpointError: some rank could not write its part; the same error on all ranks.
    """
    Saver(_group(step)).save(path, contents_of(step, stream, extra))


def load(
    path: str | Path,
    step: Step,
    *,
    stream: Any = None,
    extra: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> Restored:
    """Loads a checkpoint into a step, in place. All ranks call it, before the step's first call or later.

    Each rank reads its parts. Every byte is verified before the first tensor changes, and a checkpoint that
    does not fit changes nothing.

    Args:
        path: a checkpoint; a directory of them, of which the newest is loaded; a directory of Hugging Face
            safetensors or of torch.distributed.checkpoint; or a state dict in a .safetensors or .pt file.
            What other programs wrote may hold the model alone, and its floating dtypes may differ.
        stream: moved to where it was.
        extra: the objects with a state that were saved as `extra`, by the same names.
        verify: whether checksums are compared; without, bytes are read once.

    Returns:
        the step count, what else was saved as `extra`, and the plan's JSON.

    Raises:
        CheckpointError: it is damaged, or does not fit model, optimizer or stream; the message lists how.
    """
    group = _group(step)
    return restore(step, open_together(path, group), group, stream, extra, verify)


def checkpointer(
    path: str | Path,
    step: Step,
    *,
    stream: Any = None,
    extra: Mapping[str, Any] | None = None,
    every: int | str | None = None,
    keep_last: int | None = 3,
    on_signal: bool = True,
    asynchronous: bool = True,
    resume: bool = True,
    snapshot_every: int | str = "30s",
) -> Checkpointer:
    """Saves a series of checkpoints, `path/step-0000000100`, while training goes on. All ranks call it.

    If there are some, the newest whole one is loaded, as `load` does: what was interrupted goes on.

    ```python
    with flow.checkpointer("runs/gpt", train_step, stream=batches, every="10min") as checkpoints:
        for batch in batches:
            loss = train_step(batch)
            checkpoints.after_step()
    ```

    Args:
        path: a directory that all ranks see, or an fsspec URL.
        stream, extra: as in `save`.
        every: steps, or a time such as "90s", "10min", "2h"; None to save only when asked, or on a signal.
        keep_last: how many checkpoints stay, the newest last; None for all. Those of later steps than the
            newest do not: a run that went back does not have those steps.
        on_signal: whether SIGTERM or SIGINT to any rank makes all ranks save after the same step, and then
            end (SystemExit 143, KeyboardInterrupt). A second signal does what it did before.
        asynchronous: whether a rank copies its share to the host and a thread writes it. One copy at most:
            the next save waits for the one before.
        resume: whether to go on from what is there; False to begin anew: the first checkpoint replaces those
            of later steps. A job that re-forms goes on from its snapshots in memory all the same.
        snapshot_every: under `monoflow run --elastic`, how often a snapshot is taken in memory between
            checkpoints, in steps or as a time: all that a rank which dies can cost.

    Raises:
        CheckpointError: an argument makes no sense, or what is there does not fit the step.
    """
    often = Every(snapshot_every, "snapshot_every")
    ranks, settings = step.ranks, Settings.from_env(os.environ)
    memory = folder_of(settings.snapshots, str(path)) if settings.snapshots else None
    if settings.num_hosts > 1:  # a host that is lost would take its part along
        memory = None
    own = [memory] if memory else []  # there is nothing of another run
    folders = [*own, str(path)]
    _resume(step, folders if resume else own, stream, extra)
    shadow = Shadow(memory, group_of(ranks), often) if memory else None
    series = Checkpointer(
        path,
        lambda: contents_of(step, stream, extra),
        step.settled,
        group_of(ranks),
        every=every,
        keep_last=keep_last,
        on_signal=on_signal,
        asynchronous=asynchronous,
        shadow=shadow,
    )

    def roll_back() -> bool:
        series.wait()
        is_own = resume or series.saver.newest is not None  # then what it saved is the newest there
        return _resume(step, folders if is_own else own, None, extra)

    step.refusals.roll_back = roll_back
    return series


def _resume(step: Step, folders: Sequence[str], stream: Any, extra: Mapping[str, Any] | None) -> bool:
    """Loads the newest checkpoint of some folders that is whole; returns whether there was one."""
    group, log = _group(step), stage_logger("runtime")
    for path in first_does(group, lambda: candidates(folders)):
        try:
            restore(step, open_whole(path, group), group, stream, _objects(extra), verify=True)
        except DamagedError as error:
            log.warning("%s is passed over: %s", path, error)
            continue
        log.info("%s goes on from %s, after step %d", step.name, path, step.num_steps)
        return True
    return False


def _objects(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those that have a state."""
    return {key: value for key, value in (extra or {}).items() if isinstance(value, Stateful)}


def _group(step: Step):
    """The step's own group for saving and loading, made at the first time."""
    ranks = step.ranks
    if step.save_group is None or tuple(step.save_group.ranks) != ranks:
        step.save_group = group_of(ranks)
    return step.save_group
