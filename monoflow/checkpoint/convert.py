"""One form of checkpoint made from another, in one process, a piece at a time where the form allows."""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from ..errors import CheckpointError
from .group import Alone, together
from .loading import whole
from .read import Checkpoint, Source
from .tree import decode
from .write import Contents, prepare, write

FORMS = ("monoflow", "safetensors", "pt", "dcp")


def form_of(path: str | Path) -> str:
    """The form that a path's ending asks for."""
    if str(path).endswith(".safetensors"):
        return "safetensors"
    return "pt" if str(path).endswith((".pt", ".pth", ".bin")) else "monoflow"


def convert(source: Source, path: str | Path, form: str) -> None:
    """Writes what a source holds in another form.

    Args:
        form: "monoflow", a checkpoint with everything; "safetensors" or "pt", a file with the model's state
            dict; "dcp", a directory of torch.distributed.checkpoint with model, optimizer (by name) and step.

    Raises:
        CheckpointError: there is something at `path`, the form is unknown, or it cannot be written.
    """
    if form not in FORMS:
        raise CheckpointError(f"{form!r} is no form; choose {', '.join(FORMS)}")
    if form == "monoflow":
        _to_checkpoint(source, path)
        return
    if Path(path).exists():
        raise CheckpointError(f"{path} exists; it is not replaced")
    aside = Path(f"{path}.tmp-{uuid.uuid4().hex[:12]}")
    model = {name: mapped(source, name) for name in source.tensors if ":" not in name}

    def act() -> None:
        aside.parent.mkdir(parents=True, exist_ok=True)
        if form == "safetensors":
            save_file(model, aside, {"format": "pt"})
        elif form == "pt":
            torch.save(model, aside)
        else:
            _to_distributed(source, model, aside)
        os.rename(aside, path)

    try:
        together(Alone(), act)
    except CheckpointError:
        shutil.rmtree(aside, ignore_errors=True)
        aside.unlink(missing_ok=True)
        raise


def _to_checkpoint(source: Source, path: str | Path) -> None:
    meta = dict(source.meta)
    model = {name: _shape_of(source, name) for name in source.tensors if ":" not in name}
    state = {name: _shape_of(source, name) for name in source.tensors if ":" in name}
    texts = {name: text for name in ("plan.json", "config.json") if (text := source.text(name)) is not None}
    snapshot = prepare(path, Contents(model, state, meta, texts), Alone())

    read = ((one, source.read(one.name, one.box)) for one, _ in snapshot.pieces)
    write(replace(snapshot, pieces=read))


def _shape_of(source: Source, name: str) -> torch.Tensor:
    """A tensor of the right shape and dtype without memory."""
    one = source.tensors[name]
    return torch.empty(one.shape, dtype=one.dtype, device="meta")


def _to_distributed(source: Source, model: dict[str, torch.Tensor], path: Path) -> None:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name in source.tensors:
        if name.startswith("optimizer:"):
            _, param, key = name.split(":", 2)
            state.setdefault(param, {})[key] = mapped(source, name)
    optimizers: Any = decode(source.meta.get("optimizers", []), lambda name: whole(source, f"other:{name}"))
    content = {
        "model": model,
        "optim": {"state": state, "param_groups": [group for groups in optimizers for group in groups]},
        "step": int(source.meta.get("step", 0)),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        save_distributed(content, storage_writer=FileSystemWriter(path), no_dist=True)


def mapped(source: Source, name: str) -> torch.Tensor:
    """A whole tensor; mapped from its file where that is one array on a file system."""
    if isinstance(source, Checkpoint) and len(source.stored[name].entries) == 1:
        one, entry = source.stored[name], source.stored[name].entries[0]
        file = Path(source.files.path(entry.file))
        if file.exists() and 0 not in one.shape:
            count = int(np.prod(one.shape)) * one.dtype.itemsize
            data = np.memmap(file, dtype=np.uint8, mode="c", offset=entry.offset, shape=(count,))
            return torch.from_numpy(data).view(one.dtype).view(one.shape)
    return whole(source, name)
