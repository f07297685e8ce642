"""Directories of torch.distributed.checkpoint, read.

Their `.metadata` is a pickle, which torch's own reader loads as it comes. Here an unpickler reads it that
knows the few names such a file may hold and makes records of them, so that no code of the file's choice runs;
a file that names anything else is refused. Tensors are read with torch's weights-only loader.

Private parts of torch used here: the names and fields of that pickle. tests/local/test_checkpoint_foreign.py
fails when they move.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .boxes import Box, extents, meet, within
from .files import bytes_at
from .read import Wanted
from .tree import encode

METADATA = ".metadata"
_OPTIMIZERS = ("optim", "optimizer", "optimizers")


class _Record:
    """What stands for an object of the pickle: its fields and nothing else."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state

    def __hash__(self) -> int:
        return id(self)


_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_CHECKPOINT, name)
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta", "MetadataIndex",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Makes records, sizes and dtypes, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "collections" and name == "OrderedDict":
            return dict
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside")


class Distributed:
    """A directory that torch.distributed.checkpoint wrote, of any number of ranks.

    Names are those of `dcp.save({"model": ..., "optim": ...})` with states by parameter name, as
    `torch.distributed.checkpoint.state_dict` makes them; or of a model's state dict alone.

    Raises:
        CheckpointError: its metadata cannot be read, or names what it should not.
    """

    is_foreign = True

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.files = bytes_at(path)
        metadata = self._metadata()
        self._where: dict[tuple[str, tuple[int, ...]], Any] = {
            (key.fqn, tuple(getattr(key, "offset", None) or ())): info
            for key, info in metadata.storage_data.items()
        }
        entries: dict[str, Any] = metadata.state_dict_metadata
        paths = {key: tuple((metadata.planner_data or {}).get(key, (key,))) for key in entries}
        names = _names(paths)
        self._stored = {
            names[key]: (key, one) for key, one in entries.items() if key in names and hasattr(one, "size")
        }
        self.tensors = {
            name: Wanted(tuple(one.size), one.properties.args[0]) for name, (_, one) in self._stored.items()
        }
        self.meta = self._meta({key: paths[key] for key, one in entries.items() if not hasattr(one, "size")})
        self._last: tuple[tuple[str, tuple], torch.Tensor] | None = None

    def _metadata(self) -> Any:
        size = self.files.size(METADATA)
        if size is None:
            raise CheckpointError(f"{self.path} has no {METADATA}")
        try:
            found = _Unpickler(io.BytesIO(self.files.read(METADATA, 0, size))).load()
            assert found.storage_data is not None and found.state_dict_metadata is not None
            return found
        except Exception as error:
            raise CheckpointError(
                f"{self.files.path(METADATA)} is not what torch.distributed.checkpoint writes, and is "
                f"refused: {error}"
            ) from None

    def read(self, name: str, box: Box) -> torch.Tensor:
        key, one = self._stored[name]
        made = torch.empty(extents(box), dtype=self.tensors[name].dtype)
        for chunk in one.chunks:
            begins = tuple(chunk.offsets)
            ends = tuple((a, a + size) for a, size in zip(begins, chunk.sizes, strict=True))
            if (shared := meet(box, ends)) is not None:
                made[within(shared, box)] = self._chunk(key, begins)[within(shared, ends)]
        return made

    def _chunk(self, key: str, begins: tuple[int, ...]) -> torch.Tensor:
        """A chunk as it was written; the last one is kept, because it is read piece by piece."""
        if self._last is None or self._last[0] != (key, begins):
            self._last = None
            self._last = ((key, begins), self._load(key, begins))
        return self._last[1]

    def _load(self, key: str, begins: tuple[int, ...] = ()) -> Any:
        info = self._where[key, begins]
        file = self.files.path(info.relative_path)
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{file}: {key} is stored as {info.transform_descriptors}, which is not read"
            )
        try:
            data = self.files.read(info.relative_path, info.offset, info.length)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing; it holds {key}") from None
        except CheckpointError as error:
            raise CheckpointError(f"{error}; it holds {key}") from None
        except Exception as error:
            reason = str(error).split("\n")[0]
            raise CheckpointError(f"{file}: {key} is damaged, or more than a tensor: {reason}") from None

    def faults(self, names: Iterable[str], share: int = 0, num_shares: int = 1) -> list[str]:
        """What cannot be loaded; the zip format of the chunks has checksums of its own."""
        found = []
        every = [
            (key, tuple(c.offsets)) for name in names for key, one in [self._stored[name]] for c in one.chunks
        ]
        for key, begins in every[share::num_shares]:
            try:
                self._load(key, begins)
            except CheckpointError as error:
                found.append(str(error))
        return found

    def text(self, name: str) -> str | None:
        return None

    def _meta(self, paths: Mapping[str, tuple]) -> dict[str, Any]:
        """The step count and the groups of the optimizer, where they are plain values."""
        groups: dict[int, dict[str, Any]] = {}
        meta: dict[str, Any] = {}
        for key, path in paths.items():
            if path == ("step",):
                value = self._load(key)
                meta |= {"step": value} if isinstance(value, int) else {}
            elif len(path) == 4 and path[0] in _OPTIMIZERS and path[1] == "param_groups":
                groups.setdefault(int(path[2]), {})[str(path[3])] = self._load(key)
        if groups:
            meta["optimizers"] = encode([[groups[number] for number in sorted(groups)]], "groups", {})
        return meta


def _names(paths: Mapping[str, tuple]) -> dict[str, str]:
    """Key -> our name, of model tensors and states of an optimizer."""
    has_model = any(path[0] == "model" for path in paths.values())
    found = {}
    for key, path in paths.items():
        parts = [str(part) for part in path]
        if parts[0] in _OPTIMIZERS and len(parts) == 4 and parts[1] == "state":
            found[key] = f"optimizer:{parts[2]}:{parts[3]}"
        elif parts[0] == "model" and len(parts) > 1:
            found[key] = ".".join(parts[1:])
        elif not has_model and parts[0] not in _OPTIMIZERS:
            found[key] = ".".join(parts)
    return found
