"""The bytes of files: below a directory, or below an fsspec URL."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError
from .remote import is_url, open_url


class LocalBytes:
    """Files of a directory; each is opened once, so that what is read is what was opened."""

    #: To read so many bytes that are not needed takes no longer than to begin another read.
    detour = 4 * 2**10

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._opened: dict[str, int] = {}

    def path(self, file: str) -> str:
        return str(self.root / file)

    def size(self, file: str) -> int | None:
        try:
            return os.fstat(self._descriptor(file)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, file: str, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self.read_into(file, offset, memoryview(data))
        return bytes(data)

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes from `offset` on. Raises CheckpointError where the file ends before."""
        descriptor, at, end = self._descriptor(file), offset, offset + len(out)
        while at < end:
            got = os.preadv(descriptor, [out[at - offset :]], at)
            if not got:
                raise CheckpointError(f"{self.root / file} ends at byte {at}, {end} were expected")
            at += got

    def _descriptor(self, file: str) -> int:
        if file not in self._opened:
            self._opened[file] = os.open(self.root / file, os.O_RDONLY)
        return self._opened[file]

    def __del__(self) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)


class RemoteBytes:
    """Objects below an fsspec URL."""

    detour = 4 * 2**20

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.system, self.root = open_url(self.url)

    def path(self, file: str) -> str:
        return f"{self.url}/{file}"

    def size(self, file: str) -> int | None:
        try:
            return int(self.system.info(f"{self.root}/{file}")["size"])
        except FileNotFoundError:
            return None

    def read(self, file: str, offset: int, count: int) -> bytes:
        return self.system.cat_file(f"{self.root}/{file}", start=offset, end=offset + count)

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        data = self.read(file, offset, len(out))
        if len(data) != len(out):
            raise CheckpointError(
                f"{self.path(file)} ends at byte {offset + len(data)}, {offset + len(out)} were expected"
            )
        out[:] = data


def bytes_at(path: str | Path) -> LocalBytes | RemoteBytes:
    """The files of a directory or URL."""
    return RemoteBytes(str(path)) if is_url(str(path)) else LocalBytes(str(path).removeprefix("file://"))
