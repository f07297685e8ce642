"""A checkpoint in an object store, through fsspec.

Objects appear whole or not at all, and the index is written last: until then the directory is what it was.
Files carry the label of their save in their names; those of other saves are removed when the index is there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from ..errors import CheckpointError
from .arrange import PIECE, Arrangement, Write, in_own_files
from .held import Held
from .index import INDEX, Piece, checksum
from .local import bytes_of

#: By which Hugging Face's loaders find the tensors of several files.
HF_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"-[0-9a-f]{12}-\d{5}-of-\d{5}\.safetensors$")


def is_url(path: str) -> bool:
    """Whether a path is for fsspec: it begins with a protocol other than file."""
    return "://" in path and not path.startswith("file://")


def open_url(path: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        CheckpointError: fsspec, or what it needs for the protocol, is missing or cannot open it.
    """
    try:
        return import_module("fsspec.core").url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be opened: {error}; URLs are read by fsspec: pip install 'monoflow[remote]', and "
            f"what it names for the protocol (s3fs, gcsfs...)"
        ) from error


class RemoteTarget:
    """Writes one checkpoint to an fsspec URL.

    Args:
        label: 12 hexadecimal digits that tell the files of this save from others.
    """

    def __init__(self, path: str, label: str) -> None:
        self.path, self.label = path.rstrip("/"), label
        self.system, self.root = open_url(self.path)

    def arrange(self, files: Mapping[str, Mapping[str, Held]], ranks: Sequence[int]) -> Arrangement:
        return in_own_files(files, ranks, self.label, PIECE)

    def begin(self, arrangement: Arrangement) -> None:
        """Nothing is there before it is written whole."""
        with self._named(self.path):
            self.system.makedirs(self.root, exist_ok=True)

    def write(
        self, arrangement: Arrangement, pieces: Iterable[tuple[Write, torch.Tensor]]
    ) -> list[tuple[Write, Piece]]:
        """Writes a rank's files, from first to last byte; returns the checksums of their pieces."""
        written = []
        out: Any = None
        present = ""
        with contextlib.ExitStack() as stack:
            for write, tensor in pieces:
                file = arrangement.entries[write.name][write.entry].file
                with self._named(file, write.name):
                    if file != present:
                        stack.close()
                        out = stack.enter_context(self.system.open(f"{self.root}/{file}", "wb"))
                        out.write(arrangement.heads[file])
                        present = file
                    data = bytes_of(tensor)
                    out.write(data)
                    written.append((write, Piece(write.box, checksum(data))))
            with self._named(present):
                stack.close()
        return written

    def finish(self, texts: Mapping[str, bytes]) -> None:
        """Writes what is left, the index last; then removes the files of other saves."""
        for name in sorted(texts, key=lambda name: name == INDEX):
            with self._named(name):
                self.system.pipe_file(f"{self.root}/{name}", texts[name])
        self._remove(lambda name: self.label not in name)
        if HF_INDEX not in texts:
            with contextlib.suppress(FileNotFoundError):
                self.system.rm_file(f"{self.root}/{HF_INDEX}")

    def abandon(self) -> None:
        """Removes what this save wrote."""
        self._remove(lambda name: self.label in name)

    def _remove(self, choose: Any) -> None:
        self.system.invalidate_cache()
        with contextlib.suppress(OSError):
            for path in self.system.ls(self.root, detail=False):
                name = path.rsplit("/", 1)[-1]
                if _OURS.search(name) and choose(name):
                    self.system.rm_file(path)

    @contextlib.contextmanager
    def _named(self, file: str, tensor: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            about = f" ({tensor})" if tensor else ""
            where = file if file == self.path else f"{self.path}/{file}"
            raise CheckpointError(f"{where}{about} cannot be written: {error.strerror or error}") from error
